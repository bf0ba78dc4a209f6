"""What a schedule has under way: counted in runs, and in the memory that is predicted."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.compiler import program_of, rewrite, solve
from autopar.errors import InfeasibleError
from autopar.pipeline.executor import StageRun
from autopar.pipeline.schedules import SCHEDULES, device_of, order
from autopar.pipeline.stage_graphs import StageGraphs
from autopar.search.options import Search
from autopar.search.pipeline.stage_memory import memory_of_stages, peaks
from autopar.simulate import pipeline, simulate
from tests import models as zoo
from tests.pipeline.test_pipelines import staged

DEVICES, COUNT = 2, 4


def under_way(schedule: str, device: int, devices: int = DEVICES, count: int = COUNT) -> int:
    """How often a device's stages together hold what a microbatch has saved, at most, by the schedules' papers."""
    stages = VIRTUAL[schedule]
    return {
        "gpipe": count,
        "1f1b": min(count, devices - device),  # PipeDream-Flush: as many as stages behind, and itself
        "zb-h1": min(count, devices),  # zero bubble, table 1: as 1F1B's first device
        "interleaved": min(count * stages, (stages - 1) * devices + 2 * (devices - 1 - device) + 1),  # Megatron, 2.2
        "zbv": 2 * devices,  # of half the size
        "dualpipe-v": 2 * devices + 1,  # DualPipe's README: as many as stages, and one
    }.get(schedule, count * stages)  # breadth first: all of them


VIRTUAL = {name: 1 + rule.interleaved for name, rule in SCHEDULES.items()}


def count_under_way(monkeypatch: pytest.MonkeyPatch, device_of: list[int]) -> dict[int, int]:
    """What devices hold at most, while pipelines run in this process."""
    forward, most, runs = StageRun.forward, dict[int, int](), dict[int, StageRun]()

    def counted(self: StageRun, microbatch: int, received: Any) -> None:
        forward(self, microbatch, received)
        runs[self.stage] = self
        device = device_of[self.stage]
        held = sum(len(run._saved) for stage, run in runs.items() if device_of[stage] == device)
        most[device] = max(most.get(device, 0), held)

    monkeypatch.setattr(StageRun, "forward", counted)
    return most


@pytest.mark.some(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_microbatches_under_way(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted while it runs, in the papers, and by the simulator."""
    actions = order(schedule, DEVICES, COUNT, VIRTUAL[schedule])
    most = count_under_way(monkeypatch, device_of(actions))
    pins = {"stages": DEVICES, "virtual": VIRTUAL[schedule], "microbatches": COUNT, "schedule": schedule}
    staged("cnn", {"stage": DEVICES}, pins)
    assert most == {device: under_way(schedule, device) for device in range(DEVICES)}
    timeline = simulate(pipeline(actions, 1, 1, 1, saved=1))
    assert most == {device: timeline.peak_memory(device)["activations"] for device in range(DEVICES)}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("devices", "count"), [(2, 8), (4, 8), (8, 24)])
def test_microbatches_under_way_in_the_simulator(schedule: str, devices: int, count: int) -> None:
    timeline = simulate(pipeline(order(schedule, devices, count, VIRTUAL[schedule]), 1, 1, 1, saved=1))
    found = [timeline.peak_memory(device)["activations"] for device in range(devices)]
    assert found == [under_way(schedule, device, devices, count) for device in range(devices)]


def test_memory_goes_with_them() -> None:
    program = program_of(*zoo.mlp())
    plan = solve(program, {"stage": 2}, "cpu", search=Search(pins={"stages": 2, "microbatches": 4}))
    held = memory_of_stages(StageGraphs(rewrite(program, plan), 2), plan.inner, split=False)

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
