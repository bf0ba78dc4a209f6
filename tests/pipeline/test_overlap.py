"""Collectives of stages beside kernels: the same values, within each stage's own graphs, in less time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import import_module
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from autopar.compiler import program_of, rewrite, solve
from autopar.ir.node_info import info
from autopar.ir.ops.collectives import waits_for
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes import DETERMINISTIC_PASSES
from autopar.pipeline.custom_schedule import Step, text_of
from autopar.pipeline.executor import StageRun
from autopar.pipeline.schedules import order_of
from autopar.pipeline.stage_graphs import BACKWARD, FORWARD, INPUT, WEIGHT, StageGraph, StageGraphs
from autopar.search.options import Search
from autopar.search.pipeline.stage_memory import memory_of_stages, peaks
from autopar.search.pipeline.stage_times import plan_tasks
from autopar.search.recost import recosted
from autopar.simulate import simulate
from autopar.verify.verify import compare, global_values
from benchmarks.overlap import gathered_per_use
from tests import models as zoo
from tests.pipeline.test_pipelines import SCHEDULES, example

bucketing = import_module("autopar.passes.collectives.bucket_collectives")  # whose name its function has in the package

AXES = {"stage": 2, "data": 2}
LAYERS, STAGES = 4, 2
BOUND = 1e-10


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of small models are buckets of their own, as those of large ones are."""
    monkeypatch.setattr(bucketing, "SMALLEST", 1)
    monkeypatch.setattr(bucketing, "LARGEST", 2**12)


@cache
def captured() -> Program:
    return program_of(*zoo.llama(layers=LAYERS, batch=8))


@cache
def planned(schedule: str, per_use: bool = True) -> tuple[Program, Plan]:
    """Four layers whose parameters are sharded, and gathered for each microbatch or once for all."""
    program = captured()
    pins = {"stages": STAGES, "stage_axis": "stage", "microbatches": 4, "schedule": schedule}
    pins["virtual"] = SCHEDULES[schedule]
    plan = solve(program, AXES, "h100", search=Search(recipe="fsdp", pins=pins), deterministic=True)
    return program, gathered_per_use(program, plan) if per_use else plan


def graphs(plan: Plan, program: Program) -> StageGraphs:
    return StageGraphs(rewrite(program, plan, passes=DETERMINISTIC_PASSES), len(plan.stages))


def error(program: Program, plan: Plan) -> float:
    local = rewrite(program, plan, passes=DETERMINISTIC_PASSES)
    values = global_values(program, *zoo.llama(layers=LAYERS, batch=8))
    return compare(program, local, plan, values, torch.float64).max_error


def collectives(graph: StageGraph, kind: str) -> list[fx.Node]:
    return [n for n in graph.nodes if (c := info(n).collective) and c.kind == kind]


def products_beside(graph: StageGraph, node: fx.Node) -> int:
    """Matrix products between the issue of a collective and its first wait."""
    nodes = list(graph.nodes)
    first = min(nodes.index(w) for w in waits_for(node))
    return sum(n.target is torch.ops.aten.mm.default for n in nodes[nodes.index(node) : first])


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    [s if s == "zb-h1" else pytest.param(s, marks=pytest.mark.deep) for s in SCHEDULES],
)
def test_every_schedule_computes_the_same(schedule: str) -> None:
    program, plan = planned(schedule)
    assert plan.overlap
    assert error(program, plan) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zbv", marks=pytest.mark.deep)])
def test_stages_gather_what_they_use_themselves(schedule: str) -> None:
    """No value crosses between stages, or between the parts of a backward, for a bucket."""
    program, plan = planned(schedule)
    joined, alone = (graphs(replace(plan, overlap=on), program) for on in (True, False))
    assert joined.parameter_stages == alone.parameter_stages
    assert joined.parameter_transfers() == alone.parameter_transfers()
    for stage in range(len(plan.stages)):
        kinds = (FORWARD, BACKWARD, INPUT, WEIGHT)
        few, many = ([len(collectives(g.microbatch_graph(stage, k), "all_gather")) for k in kinds]
                     for g in (joined, alone))  # fmt: skip
        assert few[0] < many[0] / 2
        assert few[1] <= few[2] + few[3] < many[1] / 2
    saved = [[m.saved_for_weights for m in memory_of_stages(g, plan.inner, True)] for g in (joined, alone)]
    assert saved[0] == saved[1]


@pytest.mark.slow
def test_buckets_of_two_stages_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    program, plan = planned("1f1b")
    monkeypatch.setattr(bucketing, "LARGEST", 2**25)
    monkeypatch.setattr(bucketing, "SMALLEST", 2**25)
    assert not graphs(plan, program).parameter_transfers()
    monkeypatch.setattr(StageGraphs, "places", lambda self: {})
    assert graphs(plan, program).parameter_transfers()


def test_gathers_are_a_layer_ahead_within_a_stage() -> None:
    program, plan = planned("1f1b")
    cutting = graphs(plan, program)
    for stage in range(STAGES):
        for kind in (FORWARD, BACKWARD):
            graph = cutting.microbatch_graph(stage, kind)
            layers = [n for n in collectives(graph, "all_gather") if (c := info(n).collective) and c.members > 7]
            assert len(layers) == LAYERS / STAGES
            # The products of the layer before are in between: all but the first of the graph wait for nothing.
            assert [products_beside(graph, n) >= 7 for n in layers] == [False, True]


@pytest.mark.parametrize(("schedule", "kind"), [("1f1b", BACKWARD), ("zb-h1", WEIGHT)])
def test_gradients_are_reduced_beside_the_last_microbatch(schedule: str, kind: str) -> None:
    program, plan = planned(schedule)
    cutting = graphs(plan, program)
    for stage in range(STAGES):
        last = cutting.last_graph(stage, kind)
        assert not collectives(cutting.microbatch_graph(stage, kind), "reduce_scatter")
        scatters = collectives(last, "reduce_scatter")
        # A layer's go together, and before the products of the next one.
        assert LAYERS / STAGES <= len(scatters) <= LAYERS / STAGES + 3
        place = {n: i for i, n in enumerate(last.nodes)}
        # Tiny sums are over after a few kernels.
        layers = [n for n in scatters if (c := info(n).collective) and c.members > 7]
        assert len(layers) == LAYERS / STAGES
        assert all(place[waits_for(n)[0]] - place[n] > 3 for n in layers)
        products = [i for n, i in place.items() if n.target is torch.ops.aten.mm.default]
        assert sum(place[n] < products[-1] for n in scatters) >= LAYERS / STAGES - 1


@pytest.mark.slow
def test_sums_are_complete_when_they_are_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """One microbatch too early, the last gradients are missing."""
    program, plan = planned("1f1b")
    assert error(program, plan) < BOUND
    monkeypatch.setattr(StageRun, "last", property(lambda self: 2, lambda self, value: None), raising=False)
    assert error(program, plan) > 1e-3


@pytest.mark.deep
@pytest.mark.parametrize("per_use", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved"])
def test_the_simulated_step_is_shorter(schedule: str, per_use: bool) -> None:
    program, plan = planned(schedule, per_use)
    steps = [simulate(plan_tasks(rewrite(program, p), p)).step_seconds
             for p in (plan, replace(plan, overlap=False))]  # fmt: skip
    assert steps[0] < steps[1]


@pytest.mark.slow
def test_what_is_in_flight_must_fit() -> None:
    program, plan = planned("1f1b")
    local = {on: graphs(replace(plan, overlap=on), program) for on in (False, True)}
    alone, ahead = (
        max(sum(p.values()) for p in peaks(memory_of_stages(local[on], plan.inner, False), order_of(plan)))
        for on in (False, True)
    )
    assert ahead > alone
    counted = [recosted(program, replace(plan, overlap=on)).predicted for on in (False, True)]
    assert [sum(p.peak_bytes.values()) for p in counted] == [alone, ahead]


@pytest.mark.parametrize("memory", ["1GiB", pytest.param(None, marks=pytest.mark.deep)])
def test_stages_are_searched_as_they_overlap(memory: str | None) -> None:
    program, _ = planned("1f1b")
    pins = {"stages": STAGES, "stage_axis": "stage", "microbatches": 4, "schedule": "1f1b", "recompute": "none"}
    search = Search(recipe="fsdp", pins=pins, cache=False)
    plan = solve(program, AXES, "h100", memory=memory, search=search, deterministic=True)
    local = rewrite(program, plan, passes=DETERMINISTIC_PASSES)
    held = peaks(memory_of_stages(StageGraphs(local, STAGES), plan.inner, False), order_of(plan))
    assert sum(plan.predicted.peak_bytes.values()) == max(sum(p.values()) for p in held)
    step = simulate(plan_tasks(local, plan)).step_seconds
    assert plan.overlap
    assert plan.certificate.objective == plan.predicted.step_seconds == pytest.approx(step)
    assert plan.certificate.lower_bound <= step
    assert "hidden behind" in plan.certificate.space


@pytest.mark.deep
def test_a_deep_model_keeps_its_stages() -> None:
    """Three of its layers are captured, and the peak is that of the stages that were found."""
    from autopar.compiler import plan as plan_model

    model, batch = zoo.llama(layers=9, batch=8)
    pins = {"stages": 2, "stage_axis": "stage", "microbatches": 4, "schedule": "1f1b"}
    search = Search(recipe="fsdp", pins=pins)
    found = plan_model(model, batch, cluster="h100", axes=AXES, search=search)
    assert found.overlap
    program = program_of(model, batch)
    local = rewrite(program, found)
    held = peaks(memory_of_stages(StageGraphs(local, 2), found.inner, False), order_of(found))
    most = max(sum(each.values()) for each in held)
    assert sum(found.predicted.peak_bytes.values()) == pytest.approx(most, rel=0.02)
    step = simulate(plan_tasks(local, found)).step_seconds
    assert found.overlap
    assert found.predicted.step_seconds == pytest.approx(step, rel=0.05)


def random_table(draw: Random, stages: int, microbatches: int, devices: int) -> str:
    """Any schedule that comes to an end: a device does anything that it has what it takes for."""
    rows: list[list[Step]] = [[] for _ in range(devices)]
    done: set[tuple[int, str, int]] = set()
    open_: list[Step] = []
    for stage in range(stages):
        for n in range(microbatches):
            open_ += [(stage, k, n) for k in (("F", "I", "W") if draw.randrange(2) else ("F", "B"))]

    def is_ready(stage: int, kind: str, n: int) -> bool:
        own = {"F": None, "B": "F", "I": "F", "W": "I"}[kind]
        behind = (stage - 1, "F", n) if kind == "F" else (stage + 1, "I", n)
        neighbor = kind == "W" or not 0 <= behind[0] < stages or behind in done
        return neighbor and (own is None or (stage, own, n) in done)

    while open_:
        stage, kind, n = draw.choice([step for step in open_ if is_ready(*step)])
        open_.remove((stage, kind, n))
        rows[stage % devices].append((stage, kind, n))
        done.add((stage, "I" if kind == "B" else kind, n))
    return text_of(rows)


@pytest.mark.slow
@settings(max_examples=2 if settings().max_examples < 1000 else 200)  # a plan takes a second
@given(st.integers(0, 2**32 - 1))
def test_random_plans_and_schedules(seed: int) -> None:
    draw = Random(seed)
    name = draw.choice(("mlp", "cnn", "unet", "encoder"))
    virtual, microbatches = draw.choice((1, 2)), draw.choice((2, 4))
    table = random_table(draw, 2 * virtual, microbatches, 2)
    pins = {"stages": 2, "stage_axis": "stage", "virtual": virtual, "microbatches": microbatches, "schedule": table}
    if name == "mlp":
        pins["virtual"], pins["schedule"] = 1, random_table(draw, 2, microbatches, 2)
    search = Search(pins={**pins, "recompute": "search"}, recipe="random", seed=draw.randrange(1000))
    program = program_of(*example(name))
    axes = draw.choice((AXES, {"a": 2, "stage": 2, "b": 2}))
    plan = solve(program, axes, draw.choice(("cpu", "h100")), search=search, deterministic=True)
    plan = replace(plan, overlap=True)
    local = rewrite(program, plan, passes=DETERMINISTIC_PASSES)
    report = compare(program, local, plan, global_values(program, *example(name)), torch.float64)
    assert report.max_error < BOUND, f"{report.worst}: {report.max_error}, seed {seed}"
