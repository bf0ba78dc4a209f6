"""No plan that fits is faster than what is known before any is made."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import suppress
from functools import cache

import pytest

from autopar.compiler import program_of, solve
from autopar.costs.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.ir.program import Program
from autopar.pipeline.schedules import BACKWARD_WEIGHT, FORWARD, SCHEDULES, order
from autopar.search.microbatch.memory_floor import MemoryFloor
from autopar.search.options import Job, Search
from autopar.search.pipeline.shape import PipelineShape
from autopar.search.pipeline.space import inside_stage, room_for_saved
from tests import models as zoo

LATE = math.inf
KIB = 1024.0
CLUSTER = Cluster.preset("cpu")


@cache
def program() -> Program:
    """What it saves takes more than its parameters."""
    return program_of(*zoo.encoder(batch=16, seq=16))


def floor_of(shape: PipelineShape | None, first: int) -> MemoryFloor:
    search = Search(time_limit=1e3)
    axes = {"a": 2} if shape is None else shape.inside
    search = search if shape is None else inside_stage(search, shape)
    job = Job(axes, CLUSTER, graphs=1 if shape is None else shape.devices, search=search)
    return MemoryFloor(program(), job, 1.0 if shape is None else 1 / shape.devices, first)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4])
def test_no_plan_that_fits_is_faster(count: int) -> None:
    floor = floor_of(None, 2)
    ample = solve(program(), {"a": 2}, CLUSTER, memory=1e9, search=Search(pins={"microbatches": count}))
    free, found, fitting = ample.predicted, [], []
    for share in (0.85, 0.7):
        memory = share * sum(free.peak_bytes.values())
        while floor.improve(count, memory, LATE):
            pass
        bound = floor.bound(count, memory)
        with suppress(InfeasibleError):
            plan = solve(program(), {"a": 2}, CLUSTER, memory=memory, search=Search(pins={"microbatches": count}))
            assert bound <= plan.predicted.step_seconds
            fitting.append(plan)
        found.append(bound)
    assert found == sorted(found)
    assert fitting
    assert found[-1] > found[0]
    assert floor.bound(count, memory, to_check=10.0) == pytest.approx(found[-1], rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_no_pipeline_that_fits_is_faster(schedule: str) -> None:
    shape = PipelineShape((("stage", 2), ("a", 2)), "stage", 2, schedules=(schedule,))
    floor, pins = floor_of(shape, 2), {"stages": 2, "stage_axis": "stage", "schedule": schedule, "microbatches": 4}
    axes = dict(shape.axes)
    ample = solve(program(), axes, CLUSTER, memory=1e9, search=Search(pins=pins))
    fitting = []
    for share in (1.0, 0.8, 0.7):
        memory = share * sum(ample.predicted.peak_bytes.values())
        room = memory * room_for_saved(shape, 4)
        while floor.improve(4, room, LATE):
            pass
        with suppress(InfeasibleError):
            plan = solve(program(), axes, CLUSTER, memory=memory, search=Search(pins=pins))
            assert 0 < floor.bound(4, room) / 2 <= plan.predicted.step_seconds
            fitting.append(plan)
    assert len(fitting) > 1
    tight = 0.05 * memory * room_for_saved(shape, 4)
    assert floor.improve(4, tight, LATE)  # by prices alone: the problem is known
    assert floor.bound(4, tight) > floor.bound(4, math.inf)


def test_fewer_microbatches_bound_more() -> None:
    """Two bound four with twice the bytes; one bounds itself alone, since it has nothing that is hoisted."""
    floor = floor_of(None, 2)
    assert floor.bound(4, math.inf) == 0.0
    assert floor.improve(4, 100 * KIB, LATE)
    in_any_memory = floor.bound(4, 100 * KIB)
    assert floor.improve(4, 100 * KIB, LATE)
    assert list(floor.known) == [2]
    by_two = floor.bound(4, 100 * KIB)
    assert by_two == floor.bound(2, 200 * KIB) > in_any_memory > 0.0 == floor.bound(1, 200 * KIB)
    assert floor.improve(4, 100 * KIB, LATE)
    assert list(floor.known) == [2, 4]
    assert floor.bound(4, 100 * KIB) >= by_two
    assert floor.improve(4, 100 * KIB, LATE)
    assert not floor.improve(4, 100 * KIB, LATE)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_hold_as_many_microbatches_as_are_counted(name: str) -> None:
    """1, 2, ... in some order, of what each stage of a device saves."""
    for devices, count, virtual in ((2, 2, 1), (3, 6, 1), (4, 8, 2), (4, 16, 2), (3, 9, 3), (8, 16, 2), (4, 5, 1)):
        try:
            rows = order(name, devices, count, virtual)
        except ValueError:
            continue
        most = []
        for row in rows:
            held, reached = Counter(dict.fromkeys({a.stage for a in row}, 0)), 0
            for stage, kind, _ in row:
                held[stage] += {FORWARD: 1, BACKWARD_WEIGHT: 0}.get(kind, -1)
                reached = max(reached, min(held.values()))
            most.append(reached)
        assert all(k <= n for k, n in zip(range(1, devices + 1), sorted(most), strict=True)), (name, devices, most)
        shape = PipelineShape((("stage", devices),), "stage", devices, virtual, (name,))
        assert room_for_saved(shape, count) == pytest.approx(sum(1 / k for k in range(1, devices + 1)))
