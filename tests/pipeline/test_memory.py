"""What a schedule has under way: counted in runs, and in the memory that is predicted."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.compiler import program_of, rewrite, solve
from autopar.errors import InfeasibleError
from autopar.pipeline.memory import held_by, peaks
from autopar.pipeline.pieces import Cutting
from autopar.pipeline.runner import StageRun
from autopar.pipeline.schedules import order
from autopar.search.find import Search
from tests import models as zoo
from tests.pipeline.test_pipelines import staged

UNDER_WAY = {"gpipe": [4, 4], "1f1b": [2, 1], "zb-h1": [2, 2], "zbv": [4, 3, 2, 1]}
"""Microbatches that each of two or four stages holds at most, of four: counted in the schedules' figures."""


@pytest.mark.parametrize("schedule", UNDER_WAY)
def test_microbatches_under_way(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    most: dict[int, int] = {}
    forward = StageRun.forward

    def counted(self: StageRun, microbatch: int, received: Any) -> None:
        forward(self, microbatch, received)
        most[self.stage] = max(most.get(self.stage, 0), len(self._saved))

    monkeypatch.setattr(StageRun, "forward", counted)
    stages = len(UNDER_WAY[schedule])
    pins = {"stages": 2, "virtual": stages // 2, "microbatches": 4, "schedule": schedule}
    staged("cnn" if stages == 4 else "mlp", {"stage": 2}, pins)
    assert [most[s] for s in range(stages)] == UNDER_WAY[schedule]


def test_memory_goes_with_them() -> None:
    program = program_of(*zoo.mlp())
    plan = solve(program, {"stage": 2}, "cpu", search=Search(pins={"stages": 2, "microbatches": 4}))
    held = held_by(Cutting(rewrite(program, plan), 2), plan.inner, split=False)

    def peak(schedule: str, microbatches: int) -> float:
        return sum(peaks(held, order(schedule, 2, microbatches))[0].values())

    saved = peak("gpipe", 3) - peak("gpipe", 2)
    assert saved > 0
    assert peak("gpipe", 8) - peak("gpipe", 2) == 6 * saved
    assert peak("1f1b", 8) == peak("1f1b", 2) == peak("gpipe", 2)


@pytest.mark.deep
def test_a_budget_is_kept() -> None:
    program = program_of(*zoo.llama(batch=16))
    search = Search(pins={"stages": 2, "microbatches": 8})
    free = solve(program, {"stage": 2, "other": 2}, "cpu", search=search)
    needed = sum(free.predicted.peak_bytes.values())
    tight = solve(program, {"stage": 2, "other": 2}, "cpu", memory=0.8 * needed, search=search)
    assert sum(tight.predicted.peak_bytes.values()) <= 0.8 * needed
    assert tight.recompute


def test_what_is_missing_is_said() -> None:
    program = program_of(*zoo.mlp())
    with pytest.raises(InfeasibleError, match=r"more than the budget of .*; ask for more stages"):
        solve(program, {"stage": 2}, "cpu", memory=2000, search=Search(pins={"stages": 2, "microbatches": 4}))
