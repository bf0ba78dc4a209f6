"""State outside of modules, deferred checks and averages over all batches, under random plans on four ranks."""

from __future__ import annotations

import copy
import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.steps import TOLERANCE, adamw, step_apart

pytestmark = pytest.mark.distributed

NAME = "AUTOPAR_TEST_RANKS"


class Gain:
    """An object that is called, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h * self.calls


class Normed(nn.Module):
    """Batch norm over all batches so far, a distribution, the environment."""

    def __init__(self) -> None:
        super().__init__()
        # No bias: batch norm takes it out again, and AdamW makes steps of the rounding that its gradient is.
        self.first, self.last = nn.Linear(8, 8, bias=False), nn.Linear(8, 4)
        self.norm, self.gain = nn.BatchNorm1d(8, momentum=None), Gain()

    def forward(self, x: Tensor) -> Tensor:
        h = self.gain(self.norm(self.first(x))).tanh() * float(os.environ.get(NAME, "1"))
        mean, scale = self.last(h).chunk(2, -1)
        return -torch.distributions.Normal(mean, scale.exp()).log_prob(x[:, :2]).mean()


class Steers:
    """A hook with a strength, which a script changes, and a counter."""

    def __init__(self) -> None:
        self.strength, self.calls = 1.0, 0

    def __call__(self, module: nn.Module, given: Any, output: Tensor) -> Tensor:
        self.calls += 1
        return output * self.strength


class Changing(nn.Module):
    """Values of a tensor that is kept, a hook's own state, a library's activation whose forward is replaced, a
    function that is, and what is set on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act = nn.Linear(8, 8), nn.ReLU6()
        self.kept = torch.ones(1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = functional.softsign(self.act(self.first(x))) * getattr(x, "gain", 1.0) * float(np.asarray(self.kept)[0])
        return {"loss": h.square().mean(), "hidden": h}


class Biased(nn.Module):
    """A bias of positions behind a mask, whose gradient is summed over microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.first = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.ones(8, 8, dtype=torch.bool).tril()
        scores = self.first(x)[:, None] + torch.where(hidden, self.bias, -1e4)
        return scores.softmax(-1).square().mean() * float(os.environ.get(NAME, "1"))


CASES: tuple[tuple[type[nn.Module], dict[str, Any]], ...] = (
    (Normed, {"microbatches": 1}),
    (Biased, {"microbatches": 2}),
)


def train(rank: int, sizes: tuple[int, ...], seed: int, cases: tuple[Any, ...]) -> tuple[float, bool]:
    """The largest difference of any loss, gradient, parameter or buffer, and whether invalid values are refused."""
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    worst, refused = 0.0, False
    for kind, pins in cases:
        torch.manual_seed(0)
        plain = kind().double()
        torch.manual_seed(0)
        search = Search(recipe="random", seed=seed, pins=pins)
        parallel: Any = parallelize(kind().double(), mesh_of(*sizes), search=search, timeout=WAIT)
        optimizers = [adamw(m) for m in (parallel, plain)]
        for step in range(3):
            os.environ[NAME] = str(1 + step)
            x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            worst = max(worst, step_apart(parallel, plain, optimizers, {"x": x}))
        state = parallel.full_state_dict()
        worst = max([worst, *(float((state[n] - b).abs().max()) for n, b in plain.named_buffers())])
        if kind is Normed:
            try:
                parallel(x=x.fill_(float("nan")))
            except ValueError as e:
                refused = "constraints refuse" in str(e)
    del os.environ[NAME]
    return worst, refused


@pytest.mark.slow
def test_training_on_two_ranks_equals_one_device(two_ranks: Ranks) -> None:
    for worst, refused in two_ranks.run(train, (2,), 1, CASES[:1]):
        assert worst < TOLERANCE
        assert refused


@pytest.mark.deep
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_training_equals_one_device(ranks: Ranks, seed: int) -> None:
    for worst, refused in ranks.run(train, (2, 2), seed, CASES):
        assert worst < TOLERANCE
        assert refused


def change(rank: int, seed: int) -> tuple[float, list[str]]:
    """The largest difference, and what is said of a gradient through what is no loss, or of a gradient."""
    from autopar.errors import AutoparError
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    torch.manual_seed(0)
    plain = Changing().double()
    search = Search(recipe="random", seed=seed)
    parallel: Any = parallelize(copy.deepcopy(plain), mesh_of(2), search=search, timeout=WAIT)
    hooks = [Steers(), Steers()]
    for m, hook in zip((parallel, plain), hooks, strict=True):
        m.first.register_forward_hook(hook)
    optimizers = [adamw(m) for m in (parallel, plain)]
    forward, softsign, worst = nn.ReLU6.forward, functional.softsign, 0.0
    try:
        for step in range(3):
            nn.ReLU6.forward = lambda self, x, n=step: torch.tanh(x) * (1 + n)  # type: ignore[method-assign]
            functional.softsign = lambda x, n=step: x / (2 + n)
            for m in (parallel, plain):
                m.kept.fill_(2 + step)
            for hook in hooks:
                hook.strength = 1.0 + step
            x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            x.gain = 1.0 + step  # type: ignore[attr-defined]
            worst = max(worst, step_apart(parallel, plain, optimizers, {"x": x}))
    finally:
        functional.softsign = softsign
        nn.ReLU6.forward = forward  # type: ignore[method-assign]
    assert hooks[0].calls == hooks[1].calls
    out, weight = parallel(x=x), parallel.first.weight
    (slope,) = torch.autograd.grad(out["loss"], weight, create_graph=True)
    said = []
    for total in (out["loss"] + out["hidden"].to_local().sum(), (slope * slope).sum()):
        try:
            torch.autograd.grad(total, weight)
        except AutoparError as e:
            said.append(str(e)[:34])
    return worst, said


@pytest.mark.some(1)
@pytest.mark.parametrize("seed", [0, 1])
def test_what_changes_between_calls_on_two_ranks(two_ranks: Ranks, seed: int) -> None:
    for worst, said in two_ranks.run(change, seed):
        assert worst < TOLERANCE
        assert said == ["a gradient was asked through outpu", "a gradient of a gradient of the pa"]
