"""Pipelines that the search chooses: when, which, and that nothing beats its bound."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autopar
from autopar.compiler import program_of, rewrite, solve
from autopar.costs.cluster import Cluster, Link
from autopar.errors import InfeasibleError
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.pipeline.schedules import order
from autopar.search.options import Search
from autopar.search.pipeline.space import PipelineShape, bubble, idle_factor
from autopar.simulate import pipeline, simulate
from autopar.verify.verify import compare, global_values

AXES = {"node": 2, "gpu": 2}
LAYERS, WIDTH, ROWS = 4, 256, 32

MANY = 8
"""Layers of which a stage's take long beside what stages send."""


class Deep(nn.Module):
    """Wide layers of few samples: gradients are much larger than activations."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@cache
def captured(layers: int = LAYERS) -> tuple[Program, nn.Module, tuple[torch.Tensor, ...]]:
    model, batch = Deep(layers), (torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)),)
    return program_of(model, batch), model, batch


def machine(slow: float) -> Cluster:
    """Two nodes of two devices; the link between nodes has so many bytes per second."""
    fast = Link("fast", 1e10, 1e-7)
    device = replace(Cluster.preset("cpu").device, flops={"float32": 1e10}, launch=1e-7)
    return Cluster("two nodes", device, (fast, Link("slow", slow, 1e-7)), (2,))


@cache
def planned(slow: float, **pins: Any) -> Plan:
    return solve(captured()[0], AXES, machine(slow), search=Search(pins={"stages": "search", **pins}))


@pytest.mark.slow
def test_a_slow_link_is_for_a_pipeline() -> None:
    program, model, batch = captured(MANY)
    plan = solve(program, AXES, machine(3e7), search=Search(pins={"stages": "search", "virtual": 1}))
    assert plan.pipeline is not None
    assert plan.pipeline.axis == "node"
    assert plan.microbatches > 1
    alone = solve(program, AXES, machine(3e7))
    assert plan.predicted.step_seconds < alone.predicted.step_seconds
    report = compare(program, rewrite(program, plan), plan, global_values(program, model, batch), torch.float64)
    assert report.max_error < 1e-10, report.worst


@pytest.mark.slow
def test_a_fast_link_is_not() -> None:
    assert planned(1e10, virtual=1).pipeline is None


@pytest.mark.deep
def test_no_pipeline_beats_what_is_found_or_its_bound() -> None:
    program, slow = captured()[0], machine(2e7)
    found = planned(2e7)
    for schedule, virtual in (("gpipe", 1), ("zb-h1", 1), ("interleaved", 2), ("zbv", 2)):
        for axis in AXES:
            for count in (4, 8):
                pins = {"stages": 2, "stage_axis": axis, "virtual": virtual, "schedule": schedule}
                plan = solve(program, AXES, slow, search=Search(pins={**pins, "microbatches": count}))
                assert plan.predicted.step_seconds >= found.predicted.step_seconds * (1 - 1e-9)
                assert plan.predicted.step_seconds >= found.certificate.lower_bound


@pytest.mark.slow
def test_what_is_not_pinned_is_searched() -> None:
    plan = planned(2e7, schedule="gpipe", microbatches=8)
    assert plan.pipeline is None or (plan.pipeline.schedule, plan.microbatches) == ("gpipe", 8)
    pins = {"stages": 2, "stage_axis": "gpu", "microbatches": 4, "virtual": 1}
    fixed = solve(captured()[0], AXES, machine(2e7), search=Search(pins=pins))
    assert fixed.pipeline is not None
    assert fixed.pipeline.axis == "gpu"
    assert "4 microbatches; the devices of a stage" in fixed.certificate.space


@pytest.mark.slow
def test_little_memory_is_for_a_schedule_with_few_under_way() -> None:
    pins = {"stages": 2, "stage_axis": "node", "microbatches": 8, "virtual": 1, "recompute": "none"}
    program, slow = captured()[0], machine(2e7)
    eager = solve(program, AXES, slow, search=Search(pins={**pins, "schedule": "gpipe"}))
    lazy = solve(program, AXES, slow, search=Search(pins={**pins, "schedule": "1f1b"}))
    needs = [sum(p.predicted.peak_bytes.values()) for p in (eager, lazy)]
    assert needs[1] < needs[0]
    budget = sum(needs) / 2
    plan = solve(program, AXES, slow, memory=budget, search=Search(pins=pins))
    assert sum(plan.predicted.peak_bytes.values()) <= budget
    with pytest.raises(InfeasibleError, match="more than the budget"):
        solve(program, AXES, slow, memory=1000, search=Search(pins=pins))


@given(
    st.lists(st.floats(0.1, 10), min_size=2, max_size=5),
    st.integers(1, 12),
    st.sampled_from(["gpipe", "1f1b"]),
    st.floats(0.1, 0.9),
    st.sampled_from([1.0, 1.4, 2.0]),
)
def test_later_stages_wait(stages: list[float], count: int, schedule: str, ahead: float, alone: float) -> None:
    devices = len(stages)
    forward, backward = ([share * t for t in stages] for share in (ahead, 1 - ahead))
    took = simulate(pipeline(order(schedule, devices, count), forward, backward, 0.0, alone=alone)).step_seconds
    work, shape = count * sum(stages) / devices, PipelineShape((("pp", devices),), "pp", devices, 1, (schedule,))
    assert took >= work * idle_factor(shape, count, [1.0] * devices, alone) * (1 - 1e-9)


@pytest.mark.parametrize(
    ("schedule", "virtual"), [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("looped-bfs", 4)]
)
@pytest.mark.parametrize("devices", [2, 4])
def test_what_waiting_adds_to_the_work(schedule: str, virtual: int, devices: int) -> None:
    """Stages are alike, and a backward pass takes twice its forward."""
    count = 4 * devices
    weight = 1.0 if schedule == "zb-h1" else 0.0
    tasks = pipeline(order(schedule, devices, count, virtual), 1.0, 2.0 - weight, weight)
    work = 3.0 * count * virtual
    way = PipelineShape((("pp", devices),), "pp", devices, virtual, (schedule,))
    assert simulate(tasks).step_seconds / work - 1 == pytest.approx(bubble(way, schedule, count))
    shared = simulate([replace(t, alone=2.0) for t in tasks]).step_seconds
    assert shared / work - 1 >= bubble(way, schedule, count, alone=2.0) - 1e-9


@pytest.mark.parametrize(
    "schedules", [pytest.param(s, marks=pytest.mark.deep) for s in (("1f1b",), ("gpipe", "1f1b", "zb-h1"))], ids=len
)
def test_within_a_budget_nothing_beats_what_is_found_or_its_bound(schedules: tuple[str, ...]) -> None:
    """The fastest of all needs more than there is: a pipeline, which is searched within it."""
    program, slow = captured()[0], machine(2e7)
    pins = {"virtual": 1, "microbatches": 8}
    ample = planned(2e7, **pins)
    budget = 0.995 * sum(solve(program, AXES, slow, memory=1e12, search=Search(
        pins={"stages": "search", **pins})).predicted.peak_bytes.values())  # fmt: skip
    search = Search(pins={"stages": "search", **pins})
    plan = solve(program, AXES, slow, memory=budget, search=search)
    assert sum(plan.predicted.peak_bytes.values()) <= budget
    # The search of pipelines ends where none can be faster by half a per cent.
    assert 0.995 * ample.predicted.step_seconds < plan.predicted.step_seconds
    assert plan.certificate.space.startswith("no pipeline, or stages cut anywhere")
    others = [solve(program, AXES, slow, memory=budget, search=Search(pins={"microbatches": 8}))]
    for schedule in schedules:
        own = {**pins, "stages": 2, "stage_axis": "node", "schedule": schedule}
        with suppress(InfeasibleError):  # gpipe holds too much
            others.append(solve(program, AXES, slow, memory=budget, search=Search(pins=own)))
    assert len(others) > 1
    for other in others:
        assert other.predicted.step_seconds >= plan.predicted.step_seconds * (1 - 1e-9)
        assert other.predicted.step_seconds >= plan.certificate.lower_bound


def layouts_by_stage() -> dict[str, Any]:
    """Pins under which alike layers of two stages lie in other ways."""
    pins = {f"layers.{i}.weight": {"gpu": "S(0)" if i < 2 else "R"} for i in range(LAYERS)}
    return {"stages": 2, "stage_axis": "node", "microbatches": 4, **pins}


def test_stages_may_have_layouts_of_their_own() -> None:
    _, model, batch = captured()
    search = Search(pins=layouts_by_stage(), tie_layers=False)
    plan = solve(captured()[0], AXES, machine(1e8), search=search)
    inside = [str(plan.parameters[f"layers.{i}.weight"][1]) for i in range(LAYERS)]
    assert inside == ["S(0.0)", "S(0.0)", "R", "R"]
    assert [stage.modules[0] for stage in plan.stages] == ["layers.0", "layers.2"]
    assert autopar.verify(model, batch, AXES, plan=plan).max_error < 1e-12


@pytest.mark.slow
def test_stages_may_take_a_factor_of_an_axis() -> None:
    model, batch = captured()[1:]
    links = replace(machine(1e7), group_sizes=(2,))
    search = Search(pins={"stages": 2, "microbatches": 4})
    plan = autopar.plan(model, batch, cluster=links, axes={"node": 8}, search=search)
    assert dict(plan.axes) == {"node_stages": 2, "node": 4}
    assert plan.pipeline is not None
    assert plan.pipeline.axis == "node_stages"
    report = autopar.verify(model, batch, dict(plan.axes), plan=plan)
    assert report.max_error < 1e-10, report.worst
    with pytest.raises(InfeasibleError, match="no axis of the mesh"):  # of a mesh that is there
        solve(captured()[0], {"node": 8}, links, search=search)
