"""Pins on modules, on four processes: the moves that they ask for run, and steps are those of one device."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import make
from tests.distributed.test_recipes import ROWS, reference
from tests.distributed.test_training import TOLERANCE

pytestmark = pytest.mark.distributed


def train(rank: int, pins: dict[str, Any]) -> tuple[float, list[list[str]]]:
    import torch

    from autopar.parallelize import parallelize
    from autopar.search.find import Search

    expected = reference("mlp")
    model, batch = make("mlp")
    parallel = parallelize(model, mesh_of(2, 2), batch(0, ROWS[0]), search=Search(pins=pins), timeout=WAIT)
    optimizer, worst = torch.optim.AdamW(parallel.parameters(), lr=1e-2), 0.0
    for step, rows in enumerate(ROWS):
        parallel(**batch(step, rows))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        full = parallel.full_state_dict()
        worst = max(worst, *(float((full[k] - v).abs().max()) for k, v in expected[step].items()))
    return worst, [[str(p) for p in parallel.plan.relays[name]] for name in parallel.plan.held]


def test_steps_equal_one_device(ranks: Ranks) -> None:
    results: list[Any] = ranks.run(train, {"up": ("S(1)", "S(0)"), "down": ("S(0)", "R")})
    for worst, relays in results:
        assert worst < TOLERANCE
        assert sorted(relays) == [["S(0.0)", "R"], ["S(1.0)", "S(0.0)"]]
