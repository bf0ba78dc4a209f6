"""What is made or moved again in the backward pass, on four ranks: three steps of AdamW equal one device's."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import make, slow_devices
from tests.distributed.steps import TOLERANCE
from tests.distributed.test_reductions import train
from tests.verify.test_reductions import Moments

pytestmark = pytest.mark.distributed


@pytest.mark.deep
@pytest.mark.parametrize("seed", [0, 3])
def test_random_plans(ranks: Ranks, seed: int) -> None:
    found = ranks.run(train, Moments, seed, {"recompute": "search"})
    assert max(worst for worst, _ in found) < TOLERANCE
    assert all(again > 0 for _, again in found)


class Checkpointed(Moments):
    """Regions of every kind."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def pair(x: torch.Tensor) -> torch.Tensor:
            return x + self.second(gelu(self.first(x)))

        policy = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        x = checkpoint(pair, x, use_reentrant=False)
        x = checkpoint(pair, x, use_reentrant=True)
        return checkpoint(pair, x, use_reentrant=False, context_fn=policy).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [None, pytest.param("random", marks=pytest.mark.deep)])
def test_regions_of_the_model(ranks: Ranks, recipe: str | None) -> None:
    found = ranks.run(train, Checkpointed, 0, {}, recipe)
    assert max(worst for worst, _ in found) < TOLERANCE
    assert all(again > 0 for _, again in found)


def dropped(rank: int, deterministic: bool) -> list[float]:
    """Losses and a sum of gradients of a model with dropout: kept masks, then masks that are drawn again."""
    from dataclasses import replace

    from autopar.ir.node_info import info
    from autopar.ir.plan import EVERY
    from autopar.ir.program import draws
    from autopar.parallelize import parallelize
    from tests.passes.test_insert_recompute import Dropped

    torch.manual_seed(0)
    batch = (torch.randn(16, 8),)
    options: dict[str, Any] = {"cluster": slow_devices(), "timeout": WAIT, "deterministic": deterministic}
    first: Any = parallelize(Dropped(), mesh_of(2), batch, **options)
    names = [*first.plan.choices, *(f"consumer {name}" for name in first.plan.consumer_layouts)]
    again = replace(
        first.plan, recompute={name: EVERY for name in names if "backward" not in name or "dropout" in name}
    )
    second: Any = parallelize(Dropped(), mesh_of(2), batch, plan=again, **options)
    found = []
    for module in (first, second):
        torch.manual_seed(7)
        loss = module(*batch)
        loss.backward()
        gradients = module.full_gradients()
        found += [float(loss), *(float(g.double().square().sum()) for g in gradients.values())]
    assert second.backward_graph is not None
    assert any(info(n).recompute_of is not None and draws(n) for n in second.backward_graph.graph.nodes)
    return found


@pytest.mark.parametrize("deterministic", [pytest.param(False, marks=pytest.mark.deep), True])
def test_masks_that_are_drawn_again_are_the_same(two_ranks: Ranks, deterministic: bool) -> None:
    for found in two_ranks.run(dropped, deterministic):
        half = len(found) // 2
        assert found[:half] == pytest.approx(found[half:], rel=1e-6)


def within(rank: int) -> tuple[float, float, float, int]:
    """Budget, predicted peak, largest difference of gradients, and how much is recomputed where memory is short."""
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    (model, batches), options = make("gpt2"), {"cluster": slow_devices(), "timeout": WAIT}
    batch = batches(0)
    free: Any = parallelize(make("gpt2")[0], mesh_of(4), batch, memory="1GiB", **options)
    budget, whole = 0.75 * sum(free.plan.predicted.peak_bytes.values()), Search(pins={"microbatches": 1})
    tight: Any = parallelize(make("gpt2")[0], mesh_of(4), batch, memory=budget, search=whole, **options)
    model(**batch).loss.backward()
    tight(**batch).loss.backward()
    gradients = tight.full_gradients()
    worst = max(float((gradients[n] - p.grad).abs().max()) for n, p in model.named_parameters() if p.grad is not None)
    return budget, sum(tight.plan.predicted.peak_bytes.values()), worst, len(tight.plan.recompute)


@pytest.mark.deep
def test_a_budget_makes_it_compute_again(ranks: Ranks) -> None:
    for budget, peak, worst, again in ranks.run(within):
        assert peak <= budget
        assert worst < 1e-9
        assert again > 0
