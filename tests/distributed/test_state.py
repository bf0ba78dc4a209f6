"""Buffers, parameters and attributes that a model writes by itself, and hooks, on two ranks and on four."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from autopar import parallelize
from autopar.search.options import Search
from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import slow_devices
from tests.distributed.steps import TOLERANCE, largest

pytestmark = pytest.mark.distributed


def train(rank: int, shape: tuple[int, ...], seed: int | None) -> tuple[float, list[Any]]:
    """The largest difference from one device over three steps, and what else must be equal."""
    from tests.reports.test_backward import Reversed
    from tests.reports.test_state import Stateful

    plain = Stateful()
    plain.inner.register_forward_hook(lambda module, args, output: Reversed.apply(output, 2.0))
    search = Search() if seed is None else Search(recipe="random", seed=seed)
    model = parallelize(copy.deepcopy(plain), mesh_of(*shape), search=search, cluster=slow_devices(), timeout=WAIT)
    seen: list[list[float]] = [[], []]
    for m, found in zip((model, plain), seen, strict=True):
        m.f.register_forward_hook(lambda module, args, output, found=found: found.append(output.norm().item()))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    apart = []
    for step in range(3):
        x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        losses = []
        for m in (model, plain):
            m.beta = 1.0 + step // 2
            loss = m(x) + m.auxiliary
            loss.backward()
            losses.append(loss.detach())
        gradients = model.full_gradients()
        pairs = [(gradients[n], p.grad) for n, p in plain.named_parameters() if p.grad is not None]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        state = model.full_state_dict()
        pairs += [(state[n], value) for n, value in plain.state_dict().items()]
        pairs += [(losses[0], losses[1]), (model.inner.ema, plain.inner.ema)]
        pairs += [(torch.stack(model.inner.seen), torch.stack(plain.inner.seen)), (*map(torch.tensor, seen),)]
        apart += [float((a - b).detach().abs().max()) for a, b in pairs]
    return largest(apart), [model.inner.calls, model.inner.average == plain.inner.average]


def copies(rank: int, seed: int) -> float:
    """The largest difference of results, gradients and buffers from those of one device."""
    from tests.runtime.step.test_copies_of_state import Copies, Results, outcome, written

    batch, pairs = (torch.randn(4, 4).double(),), list[tuple[torch.Tensor, torch.Tensor]]()
    plain: Any
    for plain in (Copies().double(), Results().double()):
        given, search = copy.deepcopy(plain), Search(recipe="random", seed=seed)
        model = parallelize(given, mesh_of(2), batch, search=search, cluster=slow_devices(), timeout=WAIT)
        both = ((model, given), (plain, plain))
        a, b = (outcome(*each) if isinstance(plain, Copies) else written(each[0]) for each in both)
        # The view among them: parts of the mesh may be moved for one result, and not for the other.
        pairs += [pair for i, pair in enumerate(zip(a, b, strict=True)) if isinstance(plain, Copies) or i != 2]
    return largest([float((a - b).detach().abs().max()) for a, b in pairs])


@pytest.mark.slow
def test_copies_of_buffers_that_are_written_later(two_ranks: Ranks) -> None:
    for seed in (1, 2):
        assert max(two_ranks.run(copies, seed)) < TOLERANCE


@pytest.mark.slow
def test_on_two_ranks(two_ranks: Ranks) -> None:
    for error, rest in two_ranks.run(train, (2,), 1):
        assert error < TOLERANCE
        assert rest == [3, True]


@pytest.mark.deep
@pytest.mark.parametrize(("shape", "seed"), [((4,), None), *(((2, 2), seed) for seed in range(1, 8))])
def test_on_ranks(ranks: Ranks, shape: tuple[int, ...], seed: int | None) -> None:
    for error, rest in ranks.run(train, shape, seed):
        assert error < TOLERANCE
        assert rest == [3, True]
