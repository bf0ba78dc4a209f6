"""What the pieces of a pipeline take: every operator counts once, in the stage that runs it."""

from __future__ import annotations

import pytest

from autopar.compiler import program_of, rewrite, solve
from autopar.ir.node_info import info
from autopar.pipeline.schedules import device_of, order_of
from autopar.pipeline.stage_graphs import StageGraphs, free_nodes
from autopar.search.options import Search
from autopar.search.pipeline.stage_times import busiest, sent_inside, times_of_stages
from autopar.simulate.graph_tasks import node_seconds
from autopar.verify.emulate import census
from tests.pipeline.test_pipelines import example

AXES = {"stage": 2, "other": 2}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_every_operator_counts_once(schedule: str) -> None:
    """And not in every piece that takes its result."""
    program = program_of(*example("mlp"))
    search = Search(pins={"stages": 2, "stage_axis": "stage", "microbatches": 4, "schedule": schedule})
    plan = solve(program, AXES, "cpu", search=search)
    local = rewrite(program, plan)
    seconds, apart = node_seconds(local, plan.inner), local.per_step | free_nodes(local)
    assert not any(seconds.get(n.name) for n in free_nodes(local))  # what each stage has of its own
    each = sum(seconds.get(n.name, 0.0) for n in local.graph.graph.nodes if n not in apart)
    taken = times_of_stages(StageGraphs(local, 2), plan.inner, plan.cluster.axis_links["stage"], schedule == "zb-h1")
    parts = schedule == "zb-h1"
    work = max(
        t.before + 4 * (t.forward + t.for_input + t.for_weights) + t.after_parts
        if parts else t.before + 4 * (t.forward + t.backward) + t.after
        for t in taken
    )  # fmt: skip
    assert busiest(taken, order_of(plan)) == pytest.approx(work)
    assert work < plan.predicted.step_seconds
    assert sum(t.forward + t.backward for t in taken) == pytest.approx(each)
    assert [t.for_input > 0 for t in taken] == [False, parts]  # the first returns no gradient
    assert [t.for_input + t.for_weights for t in taken] == pytest.approx([t.backward * parts for t in taken])


@pytest.mark.deep
def test_collectives_are_those_of_the_graphs() -> None:
    """Of the device with the most; both have as many in all as a step of the whole graph."""
    program = program_of(*example("llama"))
    search = Search(pins={"stages": 2, "stage_axis": "stage", "microbatches": 4}, recipe="megatron")
    plan = solve(program, AXES, "cpu", search=search)
    local = rewrite(program, plan)
    taken = times_of_stages(StageGraphs(local, 2), plan.inner, plan.cluster.axis_links["stage"], False)
    counted = census(local)["other"]
    runs = {kind: 0 for kind in counted}
    for node in local.graph.graph.nodes:
        if info(node).collective is not None:
            runs[info(node).collective.kind] += info(node).collective.members * local.runs(node)
    assert {k: sum(t.collectives.get(("other", k), 0) for t in taken) for k in runs} == runs
    sizes, kinds = sent_inside(taken, device_of(order_of(plan)))
    assert plan.predicted.collectives == kinds
    assert plan.predicted.communication_bytes["other"] == sizes["other"] == max(t.inside["other"] for t in taken)
    assert kinds["other"]["all_reduce"] == max(t.collectives["other", "all_reduce"] for t in taken)
