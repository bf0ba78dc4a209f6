"""Mixtures of experts whose tokens each rank sorts for itself: three steps of AdamW equal one device's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import slow_devices
from tests.distributed.steps import TOLERANCE, follow
from tests.passes.canonicalize.test_experts import ROUTED, batch

pytestmark = pytest.mark.distributed

STEPS = 3


def train(rank: int, name: str, options: dict[str, Any]) -> tuple[float, int]:
    """The largest difference of any loss, gradient or parameter, and how many rows a rank computes."""
    from autopar.ir.ops import routing
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    search = Search(**options)
    parallel: Any = parallelize(
        ROUTED[name]().double(), mesh_of(2, 2), cluster=slow_devices(), timeout=WAIT, search=search
    )
    batches = [{"x": batch(8)[0].double() * (step + 1)} for step in range(STEPS)]
    worst = follow(parallel, ROUTED[name]().double(), batches)
    (rows, *_) = [n for n in parallel.forward_graph.graph.nodes if n.target is routing.route]
    with torch.no_grad():
        return worst, int(rows.meta["val"].shape[0])


@pytest.mark.parametrize("name", ["bias", "index_add"])
def test_each_rank_routes_its_own_tokens(ranks: Ranks, name: str) -> None:
    results = ranks.run(train, name, {"recipe": "fsdp"})
    assert max(worst for worst, _ in results) < TOLERANCE
    assert {rows for _, rows in results} == {8 * 4 * 2 // 4}


@pytest.mark.parametrize("seed", range(2))
def test_random_plans(ranks: Ranks, seed: int) -> None:
    results = ranks.run(train, "bias", {"recipe": "random", "seed": seed})
    assert max(worst for worst, _ in results) < TOLERANCE


@pytest.mark.deep
@pytest.mark.parametrize("pins", [{"microbatches": 2}, {"recompute": "search", "microbatches": 4}])
def test_microbatches(ranks: Ranks, pins: dict[str, Any]) -> None:
    results = ranks.run(train, "scatter_add", {"pins": pins})
    assert max(worst for worst, _ in results) < TOLERANCE
