"""bucket_collectives: gradients are reduced together, everything else on its own."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
import torch

from autopar.compiler import rewrite, solve
from autopar.costs.cluster import Link
from autopar.ir.check import check
from autopar.ir.graph import copy_graph
from autopar.ir.node_info import info
from autopar.ir.ops.accumulate import accumulate
from autopar.ir.ops.collectives import ALL_REDUCES, Collective, c10d
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes import PASSES
from autopar.passes.collectives.bucket_collectives import bucket_collectives
from autopar.search.options import Search
from autopar.search.predict import predict
from autopar.sharding.dims import Dims
from autopar.verify.emulate import census
from autopar.verify.verify import compare
from tests import models
from tests.distributed.models import slow_devices
from tests.plans import follow_plan, show, tiny

bucketing = import_module("autopar.passes.collectives.bucket_collectives")  # whose name its function has in the package

AT = PASSES.index(bucket_collectives)


def data_parallel(axes: dict[str, int]) -> tuple[Program, Dims, list[torch.Tensor], Plan]:
    """The MLP with whole parameters and a batch split over every axis."""
    program, dims, values = models.captured("mlp")
    row = " ".join(["S(0)"] * len(axes))
    return program, dims, values, follow_plan(program, axes, batch={"0": row, "1": row})


def reductions(program: Program) -> list[Collective]:
    return [i for n in program.graph.graph.nodes if (i := info(n).collective) and i.gradient]


@pytest.mark.parametrize("axes", [{"a": 4}, {"a": 2, "b": 2}])
def test_one_bucket_an_axis(axes: dict[str, int]) -> None:
    program, _, values, plan = data_parallel(axes)
    before = rewrite(program, plan, passes=PASSES[:AT])
    after = rewrite(program, plan, passes=PASSES[: AT + 1])
    single = reductions(before)
    assert len(single) == 4 * len(axes)
    assert len(reductions(after)) == len(axes)
    assert sum(c.members for c in reductions(after)) == len(single)
    assert sum(c.bytes for c in reductions(after)) == sum(c.bytes for c in single)
    assert census(after) == census(before)
    assert compare(program, after, plan, values, torch.float64).max_error < 1e-12


def test_small_buckets_start_as_soon_as_they_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    program, _, values, plan = data_parallel({"a": 4})
    monkeypatch.setattr(bucketing, "LARGEST", 1)
    after = rewrite(program, plan)
    assert [c.members for c in reductions(after)] == [1] * 4
    order = list(after.graph.graph.nodes)
    starts = [i for i, n in enumerate(order) if (c := info(n).collective) and c.gradient]
    waits = [order.index(next(iter(order[i].users))) for i in starts]
    assert all(order[i].target is c10d.wait_tensor.default for i in waits)
    last = max(i for i, n in enumerate(order) if n.target is torch.ops.aten.mm.default)
    assert sum(i < last for i in starts) == 2  # the second layer's, while the backward pass goes on
    assert min(waits) > last
    assert compare(program, after, plan, values, torch.float64).max_error < 1e-12


def test_size_of_a_bucket() -> None:
    def size(latency: float, bandwidth: float) -> float:
        return bucketing.bucket_bytes(8, Link("link", bandwidth, latency))

    assert size(1e-9, 1e9) == bucketing.SMALLEST
    assert size(1.0, 1e12) == bucketing.LARGEST
    assert size(5e-6, 50e9) == 8 * 5e-6 * 50e9 / bucketing.LATENCY_SHARE


def test_census_counts_members() -> None:
    program, dims, _, plan = data_parallel({"a": 4})
    counts = {axis: {k: n for k, (n, _) in found.items()} for axis, found in census(rewrite(program, plan)).items()}
    predicted = predict(program, dims, plan).predicted.collectives
    assert counts == {a: dict(k) for a, k in predicted.items() if k}


def test_before_and_after() -> None:
    program, _ = tiny(True)
    plan = follow_plan(program, {"a": 2}, batch={"0": "S(0)"}, results={"0": "S(0)"})
    alone = show(rewrite(program, plan, passes=PASSES[: AT + 1]))
    assert "permute(batch0, [1, 0])" in alone
    assert alone.splitlines()[-3:] == [
        "all_reduce = all_reduce(mm.1, 'sum', 'a')  # all_reduce on a: 128 bytes",
        "wait_tensor = wait_tensor(all_reduce)  # f32[w.0, w.1]",
        "return [relu, wait_tensor]",
    ]
    program, _, _, plan = data_parallel({"a": 4})
    lines = show(rewrite(program, plan, passes=PASSES[: AT + 1])).splitlines()
    (bucket,) = [line for line in lines if "together" in line]
    assert bucket.endswith("'sum', 'a')  # all_reduce on a: 4288 bytes, 4 together")
    assert lines[-1].count("reshape") == 4


def test_what_is_cut_down_does_not_wait() -> None:
    """Its whole sum would be held until the end of the step."""
    program, _, values = models.captured("mlp")
    sharded = {n.name: "S(0)" for n in program.inputs if n.kind == "parameter" and n.name.startswith("up.")}
    plan = follow_plan(program, {"a": 8}, batch={"0": "S(0)", "1": "S(0)"}, parameters=sharded)
    # Among 8 a tree's sum has fewer steps than scattering in a ring: it is all-reduced, then cut down.
    far = replace(plan.cluster, links=(Link("far", 1e12, 1.0, ("ring", "tree")),), group_sizes=())
    plan = replace(plan, cluster=far)
    after = rewrite(program, plan)
    order = {n: i for i, n in enumerate(after.graph.graph.nodes)}
    ends = {o.name: v for o, v in zip(after.outputs, after.output_values, strict=True) if o.kind == "gradient"}
    cut = [ends[name] for name in sharded]
    assert all(order[v] < max(order[w] for w in ends.values() if w) - 3 for v in cut if v)
    sums = [n for n in order if n.target in ALL_REDUCES and order[next(iter(n.users))] == order[n] + 1]
    assert len(sums) >= len(sharded)
    assert compare(program, after, plan, values, torch.float64).max_error < 1e-12


@pytest.mark.slow
def test_what_runs_once_a_step_is_apart() -> None:
    """A gradient that is reduced after the last microbatch, beside those that each microbatch reduces and adds up."""

    program, _, _ = models.captured("gpt2", batch=16)
    plan = solve(program, {"a": 2}, slow_devices(), search=Search(recipe="fsdp", pins={"microbatches": 2}))
    local = rewrite(program, plan)
    nodes = list(local.graph.graph.nodes)
    scatters = [n for n in nodes if (i := info(n).collective) and i.kind == "reduce_scatter"]
    assert {n in local.per_step for n in scatters} == {True, False}
    assert not any(n.target is accumulate for n in local.per_step)


def test_a_sum_of_sums_is_refused() -> None:
    """Only the last microbatch would count: the graph of each has no such node."""
    program, _, _ = models.captured("mlp")
    graph = copy_graph(program.graph)
    term = next(n for n in graph.graph.nodes if n.op == "placeholder")
    with graph.graph.inserting_before(graph.graph.output_node()):
        once = graph.graph.call_function(accumulate, (term,))
        graph.graph.call_function(accumulate, (graph.graph.call_function(torch.ops.aten.neg.default, (once,)),))
    with pytest.raises(ValueError, match="adds up over microbatches what is computed once"):
        check(replace(program, graph=graph), follow_plan(program, {"a": 2}))
