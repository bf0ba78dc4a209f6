"""Pins on modules, on four processes: the moves that they ask for run, and steps are those of one device."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import make
from tests.distributed.steps import TOLERANCE, follow
from tests.distributed.test_recipes import ROWS

pytestmark = pytest.mark.distributed


def train(rank: int, pins: dict[str, Any]) -> tuple[float, list[list[str]]]:
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    (model, batch), (plain, _) = make("mlp"), make("mlp")
    parallel = parallelize(model, mesh_of(2, 2), batch(0), search=Search(pins=pins), timeout=WAIT)
    worst = follow(parallel, plain, [batch(step, rows) for step, rows in enumerate(ROWS)])
    forced = parallel.plan.forced_consumer_layouts
    return worst, [[str(p) for p in parallel.plan.consumer_layouts[name]] for name in forced]


def test_steps_equal_one_device(ranks: Ranks) -> None:
    results: list[Any] = ranks.run(train, {"up": ("S(1)", "S(0)"), "down": ("S(0)", "R")})
    for worst, consumer_layouts in results:
        assert worst < TOLERANCE
        assert sorted(consumer_layouts) == [["S(0.0)", "R"], ["S(1.0)", "S(0.0)"]]
