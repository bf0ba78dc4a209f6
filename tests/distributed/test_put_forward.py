"""A ``forward`` that a library puts on a parallel model: around its own, or calling its parts; against eager."""

from __future__ import annotations

import copy
import functools
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

from autopar import parallelize
from autopar.errors import AutoparError
from autopar.search.options import Search
from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import slow_devices

D = torch.float64
TOLERANCE = 1e-10


class Model(nn.Module):
    """Counts its calls, and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(6, 8, dtype=D), nn.BatchNorm1d(8, dtype=D), nn.Linear(8, 4, dtype=D)
        self.calls = 0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        self.calls += 1
        return {"loss": self.head(self.norm(self.body(x))).square().mean() * scale}


def fused(model: Any) -> None:
    """As TRL's: parts of the model and a head's weight, or the model's own forward."""
    own = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: Any, x: Any, *args: Any, labels: Any = None, fused: bool = False, **kwargs: Any) -> Any:
        if not fused:
            return own(x, *args, **kwargs)
        self.calls += 10
        each = (self.norm(self.body(x)) @ self.head.weight.t() - labels).square().mean(1)
        return {"loss": each.mean(), "each": each, "unused": each.exp(), "count": 3}

    model.forward = MethodType(forward, model)


def doubled(model: Any) -> None:
    model.forward = lambda x, own=model.forward: {"loss": 2 * own(x)["loss"]}


def parts(model: Any) -> None:
    model.forward = lambda x: {"loss": model.head(model.body(x)).square().mean()}


def weight(model: Any) -> None:
    model.forward = MethodType(lambda self, x: {"loss": nn.functional.linear(x, self.body.weight).sum()}, model)


FUSED = {"fused": True, "labels": torch.randn(8, 4, dtype=D, generator=torch.Generator().manual_seed(9))}
CASES: dict[str, tuple[tuple[Any, ...], list[dict[str, Any]]]] = {
    "parts, then its own": ((fused,), [FUSED, FUSED, {}, {"scale": 2.0}]),
    "its own, then parts": ((fused,), [{}, FUSED, {}, FUSED]),
    "around its own, twice": ((doubled, doubled), [{}, {}]),
    "a closure that calls parts": ((parts,), [{}, {}]),
    "a weight alone": ((weight,), [{}, {}]),
    "around one that calls parts": ((parts, doubled), [{}, {}]),
    "parts, around one": ((doubled, parts), [{}, {}]),
}


def loss_of(output: dict[str, Any]) -> torch.Tensor:
    """Of the outputs that are tensors of several numbers, where there are some."""
    each = output.get("each")
    return output["loss"] if each is None else (each * each.exp().detach()).sum() / torch.tensor(3.0)


def trained(model: Any, name: str) -> list[torch.Tensor]:
    """Losses, counts and random numbers of each step, then the state."""
    put, calls = CASES[name]
    for one in put:
        one(model)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step, arguments in enumerate(calls):
        torch.manual_seed(step)
        loss = loss_of(model(torch.randn(8, 6, dtype=D), **arguments))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [loss.detach(), torch.tensor(model.calls), torch.rand(1)]
    state = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
    return [*found, *state.values()]


def difference(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max(float((x.double() - y.double()).abs().max()) for x, y in zip(a, b, strict=True))


@pytest.mark.some(2)
@pytest.mark.parametrize("name", CASES)
def test_one_that_is_put_on_one_device(name: str) -> None:
    model = parallelize(Model(), None, loss="outside")
    assert difference(trained(Model(), name), trained(model, name)) < TOLERANCE


def apart(rank: int) -> dict[str, float]:
    found = {}
    for name in ("its own, then parts", "around one that calls parts"):
        model = parallelize(Model(), mesh_of(2), cluster=slow_devices(), search=Search(recipe="fsdp"), timeout=WAIT,
                            loss="outside", outputs="whole")  # fmt: skip
        found[name] = difference(trained(Model(), name), trained(model, name))
    return found


@pytest.mark.slow
@pytest.mark.distributed
def test_one_that_is_put_on_two_ranks(two_ranks: Ranks) -> None:
    for found in two_ranks.run(apart):
        assert max(found.values()) < TOLERANCE, found


def test_its_own_again() -> None:
    plain, model = Model(), parallelize(Model(), None)
    own, data = model.forward, torch.ones(8, 6, dtype=D)
    parts(model)
    model(data)
    model.forward = own
    assert model(data)["loss"] == plain(data)["loss"]
    parts(model)
    model(data)
    del model.forward
    assert model(data)["loss"] == plain(data)["loss"]


def test_of_a_copy() -> None:
    model, data = parallelize(Model(), None, loss="outside"), torch.ones(8, 6, dtype=D)
    fused(model)
    expected = model(data, **FUSED)["each"]
    copied = copy.deepcopy(model)
    torch.testing.assert_close(copied(data, **FUSED)["each"], expected)
    with pytest.raises(AutoparError, match="runs for a copy"):  # what it refers to is the first model's forward
        copied(data)


def test_what_cannot_be_tried_is_refused() -> None:
    model = parallelize(Model(), None)
    model.forward = lambda x: {"loss": model.head(model.body(x.mul_(2))).mean()}
    with pytest.raises(AutoparError, match=r"changes what it is given before it calls parts of the model"):
        model(torch.ones(8, 6, dtype=D))


def test_what_a_method_of_a_function_refers_to() -> None:
    """Its cells are state, as those of a plain function are."""
    factor = [2.0]
    plain = Model()
    plain.forward = MethodType(lambda self, x: (self.body(x) * factor[0]).sum(), plain)  # type: ignore[method-assign]
    model, data = parallelize(plain, None), torch.ones(8, 6, dtype=D)
    first = model(data).item()
    factor[0] = 3.0
    assert model(data).item() == pytest.approx(1.5 * first)
