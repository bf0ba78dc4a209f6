"""Parameters that a script writes between the forward and the backward pass: an error or the gradients, as in eager."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import Mlp, slow_devices

pytestmark = pytest.mark.distributed

WRITTEN = ("up.weight", "up.bias", "down.weight", "down.bias")


def outcome(model: Any, name: str, batch: dict[str, torch.Tensor]) -> list[torch.Tensor] | str:
    """All gradients after one parameter has been written to between the passes, or which error there was."""
    model.zero_grad()
    result = model(**batch)
    with torch.no_grad():
        if name:
            given = {**batch, **result}
            (given[name] if name in given else model.get_parameter(name)).mul_(0.5)
    try:
        result["loss"].backward()
    except RuntimeError as e:
        assert ("batch tensor 0" if name == "x" else name) in str(e) or not hasattr(model, "plan")
        return str(e).split(":", maxsplit=1)[0].removesuffix(" ")
    return [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]


def outcomes(rank: int) -> tuple[list[str], set[str]]:
    """Where it was neither eager mode's error nor its gradients without the write, and the recipes with errors."""
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    torch.manual_seed(0)
    plain, wrong, refused = Mlp().double(), [], set[str]()
    batch = {key: torch.randn(8, 16, dtype=torch.float64, requires_grad=key == "x") for key in "xy"}
    for recipe in ("fsdp", "megatron", "ddp", "random"):
        given = Mlp().double()
        given.load_state_dict(plain.state_dict())
        search = Search(recipe=recipe)
        model = parallelize(given, mesh_of(4), batch, cluster=slow_devices(), search=search, timeout=WAIT)
        for name in WRITTEN:
            gradients, error = (outcome(plain, written, batch) for written in ("", name))
            found = outcome(model, name, batch)
            if isinstance(found, str):
                refused.add(recipe)
                wrong += [] if found == error else [f"{recipe} {name}: {found}, and {error}"]
            elif not all(torch.allclose(*pair) for pair in zip(found, gradients, strict=True)):
                wrong.append(f"{recipe} {name}: other gradients")
    return wrong, refused


class Shifted(torch.nn.Module):
    """A scale that is read through a view, and a shift that compiled graphs alone read again: they recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(16, 16)
        self.shift, self.scale = (torch.nn.Parameter(torch.linspace(low, 1, 16)) for low in (0.1, 0.5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.up(x)
        loss = (gelu(h + self.shift) * gelu(h) * self.scale.view(1, -1) - y).square().mean()
        return {"loss": loss, "hidden": h.detach().view(-1, 4, 4).clone(), "apart": h + 1}


def said_of_writes(rank: int) -> dict[tuple[str, bool], str]:
    """By what is written and whether graphs are compiled: the error, or whether gradients are of the values before."""
    from torch.distributed.tensor import Shard, distribute_tensor

    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    torch.manual_seed(0)
    mesh, plain, said = mesh_of(4), Shifted().double(), dict[tuple[str, bool], str]()
    batch = {key: torch.randn(8, 16, dtype=torch.float64) for key in "xy"}
    gradients = outcome(plain, "", batch)
    for compiled in (False, True):
        given = Shifted().double()
        given.load_state_dict(plain.state_dict())
        model: Any = parallelize(
            given, mesh, batch, cluster=slow_devices(), search=Search(recipe="ddp"), timeout=WAIT,
            compile=(lambda graph, values: graph.forward) if compiled else None,
        )  # fmt: skip
        for name in ("apart", "shift", "scale", "x", "hidden"):  # parameters stay as they are written
            passed = {**batch, "x": distribute_tensor(batch["x"].clone(), mesh, [Shard(0)])}
            found = outcome(model, name, passed)
            if not isinstance(found, str):
                same = all(torch.allclose(*pair) for pair in zip(found, gradients, strict=True))
                found = "gradients" if same else "other gradients"
            said[name, compiled] = found
    return said


@pytest.mark.slow
def test_what_graphs_read_again(ranks: Ranks) -> None:
    """Through views, of the batch, in results, and where compiled graphs recompute what eager mode saves."""
    error = "one of the variables needed for gradient computation has been modified by an inplace operation"
    for said in ranks.run(said_of_writes):
        free = [("shift", False), ("apart", False), ("apart", True)]
        assert [said.pop(each) for each in free] == ["gradients"] * 3
        assert set(said.values()) == {error}


class Alike(torch.nn.Module):
    """Results that are memory of the batch, of parameters, of buffers or of one another in eager mode."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(16, 16)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.up(x)
        self.count.add_(1)
        return h.square().mean(), x, self.up.weight.t(), self.count, h + 1, (h + 2).view(-1), x.clone()


def said_of_results(rank: int, recipe: str) -> list[str]:
    """By the result that is written: which error the backward pass, or the next call, ends in."""
    from autopar.errors import AutoparError
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    torch.manual_seed(0)
    batch = (torch.randn(8, 16, dtype=torch.float64),)
    search = Search(recipe=recipe, seed=1)
    model: Any = parallelize(Alike().double(), mesh_of(4), batch, cluster=slow_devices(), search=search, timeout=WAIT)
    said = []
    for number in range(1, 7):
        for trained in (True, False):
            with torch.set_grad_enabled(trained):
                results = model(*batch)
            with torch.no_grad():
                results[number].mul_(2)
            try:
                results[0].backward() if trained else model(*batch)
                said.append("")
            except AutoparError as e:
                said.append(str(e))
            if trained and said[-1]:
                with contextlib.suppress(AutoparError):
                    model(*batch)
    return said


@pytest.mark.some(1)
@pytest.mark.parametrize("recipe", ["ddp", "random"])
def test_results_that_are_memory_of_others(ranks: Ranks, recipe: str) -> None:
    """A write to one of them, which eager mode shows in the other, is an error that names both."""
    for said in ranks.run(said_of_results, recipe):
        of = ["batch tensor 0", "parameter 'up.weight'", "buffer 'count'"]
        for i, name in enumerate(of):
            for text in said[2 * i : 2 * i + 2]:
                assert f"written to output '{i + 1}', which in eager mode is memory of {name}" in text
        assert not any(said[6:])


@pytest.mark.slow
def test_a_parameter_that_is_written_between_the_passes(ranks: Ranks) -> None:
    """What is saved is what the forward pass had, or there is an error; weights that stay split are read again."""
    for wrong, refused in ranks.run(outcomes):
        assert not wrong and "megatron" in refused
