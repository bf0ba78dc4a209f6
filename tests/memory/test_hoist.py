"""What all microbatches share is made once a step: numbers, collectives, memory; mistakes are noticed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.compiler import program_of, rewrite, solve
from autopar.costs.cluster import Cluster
from autopar.errors import PassError
from autopar.explain.activations import activations
from autopar.ir.layout import Replicate, Split
from autopar.ir.node_info import info, set_info
from autopar.ir.plan import EVERY, Plan
from autopar.ir.precision import Precision
from autopar.ir.program import Program, is_hoisted
from autopar.memory.liveness import memory_points, peak_memory
from autopar.parallelize import parallelize
from autopar.passes import PASSES
from autopar.passes.hoist_invariants import hoist_invariants
from autopar.runtime.step.microbatch_step import cut_microbatches
from autopar.search.microbatch.split import microbatch_program
from autopar.search.options import Search
from autopar.search.predict import predict
from autopar.search.random_plan import random_plan
from autopar.sharding.dims import analyze
from autopar.simulate.graph_tasks import emitted
from autopar.verify.verify import compare, global_values
from tests import models as zoo

BOUND = 1e-10
COUNT = 4

UNJOINED = tuple(p for p in PASSES if p.__name__ != "bucket_collectives")


def runs(program: Program) -> dict[str, int]:
    """How often a step makes each kind of collective, along the axis ``a``."""
    found: Counter[str] = Counter()
    for node in program.graph.graph.nodes:
        if info(node).collective is not None:
            found[info(node).collective.kind] += program.runs(node)
    return dict(found)


def fsdp() -> Search:
    return Search(recipe="fsdp", pins={"microbatches": COUNT})


def test_a_kept_gather_is_made_once() -> None:
    model, batch = zoo.mlp()
    program = program_of(model, batch)
    plan = solve(program, {"a": 2}, "h100", search=fsdp())
    local = rewrite(program, plan, passes=UNJOINED)
    split = sum(Split(0) in layout or Split(1) in layout for layout in plan.parameters.values())
    assert runs(local) == plan.predicted.collectives["a"]
    assert runs(local)["all_gather"] == split
    tasks = [t.name for t in emitted(local, plan)]
    for node in local.graph.graph.nodes:
        if info(node).collective is not None and is_hoisted(node):
            assert tasks.count(node.name) == 1
    report = compare(program, local, plan, global_values(program, model, batch), torch.float64)
    assert report.max_error < BOUND, report.worst


@pytest.mark.slow
def test_short_memory_takes_gathers_for_a_step_a_microbatch_and_a_use() -> None:
    """Less memory, more gathers: each plan is what it is counted as, fits, and computes the same."""
    program, _, values = zoo.captured("mlp")
    free = solve(program, {"a": 2}, "h100", memory="1GiB", search=fsdp())
    most = sum(free.predicted.peak_bytes.values())
    gathers, seconds = [free.predicted.collectives["a"]["all_gather"]], [free.predicted.step_seconds]
    for share in (0.95, 0.85, 0.75):
        plan = solve(program, {"a": 2}, "h100", memory=share * most, search=fsdp())
        assert plan.certificate.objective == pytest.approx(plan.predicted.step_seconds)
        assert sum(plan.predicted.peak_bytes.values()) <= share * most
        assert runs(rewrite(program, plan, passes=UNJOINED)) == plan.predicted.collectives["a"]
        report = compare(program, rewrite(program, plan), plan, values, torch.float64)
        assert report.max_error < BOUND, report.worst
        gathers.append(plan.predicted.collectives["a"]["all_gather"])
        seconds.append(plan.predicted.step_seconds)
    # Several in one message may cost less than fewer that are on their own.
    assert seconds == sorted(seconds)
    assert len(set(gathers)) >= 3 and gathers[0] == min(gathers) and gathers[-1] == max(gathers)
    last = rewrite(program, plan)
    found = [(last.runs(n), n) for n in last.graph.graph.nodes if info(n).collective is not None]
    assert {times for times, n in found if info(n).collective.kind == "all_gather"} == {1, COUNT}


@pytest.mark.parametrize("seed", range(4))
def test_random_plans_run_what_is_counted(seed: int) -> None:
    program, _, values = zoo.captured("mlp")
    part = microbatch_program(program, COUNT)
    dims = analyze(part)
    plan = random_plan(part, dims, {"a": 2}, Cluster.preset("cpu"), seed, recompute=seed > 0)
    plan = predict(part, dims, replace(plan, fingerprint=program.fingerprint, microbatches=COUNT))
    every = tuple(p for p in UNJOINED if p.__name__ != "eliminate_dead_code")  # what nothing takes is counted, too
    assert runs(rewrite(program, plan, passes=every)) == plan.predicted.collectives["a"]
    assert compare(program, rewrite(program, plan), plan, values, torch.float64).max_error < BOUND


def casted() -> tuple[Program, list[torch.Tensor]]:
    """A program whose parameters are cast before they are used."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    batch = (torch.randn(8, 16),)
    program = program_of(
        model, batch, loss_fn=lambda output, batch: output.square().mean(), precision=Precision.resolve("bf16")
    )
    return program, global_values(program, model, batch)


def test_casts_of_parameters_are_shared() -> None:
    program, values = casted()
    plan = solve(program, {"a": 2}, "h100", search=Search(recipe="fsdp", pins={"microbatches": 2}))
    local = rewrite(program, plan)
    casts = [n for n in local.graph.graph.nodes if is_hoisted(n) and "_to_copy" in str(n.target)]
    assert len(casts) >= 4
    cut = cut_microbatches(local)
    assert cut.hoisted is not None
    assert not any(n.name in {c.name for c in casts} for n in cut.forward.graph.nodes if n.op == "call_function")
    assert compare(program, local, plan, values, torch.float64).max_error < BOUND


def test_what_is_shared_is_held_to_the_end() -> None:
    """The gathered weight of a plan that keeps it is there all the time; recomputed it is not."""
    program, _, _ = zoo.captured("mlp")
    # One weight at a time: gathered together they take as much while they are used.
    plan = replace(solve(program, {"a": 2}, "h100", search=fsdp()), overlap=False)
    part = microbatch_program(program, COUNT)
    each = replace(
        plan, recompute=dict.fromkeys([*plan.choices, *(f"consumer {key}" for key in plan.consumer_layouts)], EVERY)
    )
    kept, again = (rewrite(program, p) for p in (plan, each))
    assert sum(peak_memory(kept, plan).values()) > sum(peak_memory(again, each).values())
    shared, rest = (
        sum(memory_points(p, q)[-1].held.get(name, 0.0) for name in ("activations", "communication", "transient"))
        for p, q in ((kept, plan), (again, each))
    )
    assert shared > rest == 0.0
    counted = predict(part, analyze(part), each).predicted.collectives["a"]["all_gather"]
    assert counted >= COUNT * plan.predicted.collectives["a"]["all_gather"] / 2
    tensors = activations(part, plan, next(iter(plan.parameters)))
    assert "saved" in {t.state for t in tensors}


def one_microbatch_for_all(program: Program, plan: Plan) -> Program:
    """The first operator on the batch runs once, as if all microbatches took the same rows."""
    (given, *_) = [n for n, i in zip(program.placeholders, program.inputs, strict=True) if i.kind == "batch"]
    waiting = [min(given.users)]
    while waiting:
        node = waiting.pop()
        set_info(node, replace(info(node), hoisted=True))
        waiting += node.all_input_nodes
    return hoist_invariants(program, plan)


def test_mistakes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    program, _, values = zoo.captured("mlp")
    plan = solve(program, {"a": 2}, "cpu", search=Search(pins={"microbatches": 2}))

    def of_a_microbatch(program: Program, plan: Plan) -> Program:
        """An operator of one microbatch is said to be shared, and what it takes is not."""
        node = next(n for n in program.graph.graph.nodes if n.op == "call_function" and not is_hoisted(n))
        set_info(node, replace(info(node), hoisted=True))
        return program

    assert compare(program, rewrite(program, plan), plan, values, torch.float64).max_error < BOUND
    with pytest.raises(PassError, match=r"runs before the first microbatch and takes .*, which is of one"):
        rewrite(program, plan, passes=(*PASSES, of_a_microbatch))
    with pytest.raises(PassError, match=r"runs before the first microbatch and takes primals_\d+, which is of one"):
        rewrite(program, plan, passes=(*PASSES, one_microbatch_for_all))


def test_where_it_is_not_split_nothing_is_shared() -> None:
    program, _, _ = zoo.captured("mlp")
    plan = solve(program, {"a": 2}, "h100", search=Search(recipe="fsdp", pins={"microbatches": 1}))
    assert Replicate() not in plan.parameters[next(iter(plan.parameters))]
    assert not any(is_hoisted(n) for n in rewrite(program, plan).graph.graph.nodes)


def test_the_graph_of_what_is_shared_can_be_seen() -> None:
    torch.manual_seed(0)
    model = parallelize(
        nn.Linear(8, 8), None, loss_fn=lambda output, batch: output.square().mean(),
        search=Search(pins={"microbatches": 2}),
    )  # fmt: skip
    model(torch.randn(4, 8)).backward()
    assert model.hoisted_graph is not None
    shared = {n.name for n in model.hoisted_graph.graph.nodes if n.op == "call_function"}
    assert shared
    assert not shared & {n.name for n in model.forward_graph.graph.nodes if n.op == "call_function"}
