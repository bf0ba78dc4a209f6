"""Reductions over split dims, and bags of a split table, on four ranks: three steps of AdamW equal one device's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import slow_devices
from tests.distributed.steps import TOLERANCE, follow
from tests.verify.test_reductions import Bags, Moments, batch_of

pytestmark = pytest.mark.distributed

STEPS = 3


def double(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.double() if t.is_floating_point() else t for name, t in batch.items()}


def train(
    rank: int, make: type[nn.Module], seed: int, pins: dict[str, str], recipe: str | None = "random"
) -> tuple[float, int]:
    """The largest difference of any loss, gradient or parameter in some steps of AdamW, by default under a random plan.

    Besides: how many classes of values the plan makes or moves again in the backward pass.
    """
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    plain = make().double()
    search = Search(recipe=recipe, seed=seed, pins=pins)
    parallel: Any = parallelize(make().double(), mesh_of(2, 2), search=search, cluster=slow_devices(), timeout=WAIT)
    worst = follow(parallel, plain, [double(batch_of(plain, step)) for step in range(STEPS)])
    return worst, len(parallel.plan.recompute)


@pytest.mark.parametrize(
    ("make", "seed"),
    [(Bags, 0), *(pytest.param(*c, marks=pytest.mark.deep) for c in ((Moments, 0), (Moments, 1), (Bags, 2)))],
)
def test_random_plans(ranks: Ranks, make: type[nn.Module], seed: int) -> None:
    assert max(worst for worst, _ in ranks.run(train, make, seed, {})) < TOLERANCE
