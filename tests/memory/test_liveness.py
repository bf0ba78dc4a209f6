"""What a device holds, predicted from the graph, is what tensors take when the graph is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx

from autopar.compiler import peak_of, program_to_plan, rewrite, solve
from autopar.costs.cluster import Cluster
from autopar.ir.graph import map_nodes, values_of
from autopar.ir.node_info import info
from autopar.ir.ops.accumulate import GradientAccumulator
from autopar.ir.program import Program
from autopar.ir.shards import take
from autopar.memory.liveness import memory_points, peak_memory
from autopar.search.microbatch.split import microbatch_program
from autopar.search.options import Search
from autopar.search.random_plan import random_plan
from autopar.sharding.dims import analyze
from tests import models as zoo
from tests.capture.test_repeat import deep


def measured_peak(program: Program, inputs: Sequence[Tensor], held: Sequence[Tensor] = ()) -> float:
    """Most bytes of the storages that are alive at once, each value dropped after its last user, inputs kept."""
    graph: fx.Graph = program.graph.graph
    values: dict[fx.Node, object] = dict(zip(program.placeholders, inputs, strict=True))
    last = {a: n for n in graph.nodes for a in n.all_input_nodes}
    peak = 0
    for node in graph.nodes:
        if node.op == "call_function":
            args, kwargs = map_nodes((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        storages = {}
        for value in (*values.values(), *held):
            for part in value if isinstance(value, tuple | list) else (value,):
                if isinstance(part, Tensor):
                    storages[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
        peak = max(peak, sum(storages.values()))
        for used in node.all_input_nodes:
            if last[used] is node and used.op != "placeholder":
                del values[used]
        if node.op == "call_function" and node not in last:
            del values[node]
    return peak


@pytest.mark.parametrize("name", ["mlp", "encoder", "cnn"])
@pytest.mark.parametrize("again", [False, True])
def test_predicted_peak_is_measured(name: str, again: bool) -> None:
    program, dims, values = zoo.captured(name)
    cpu = Cluster.preset("cpu")
    cpu = replace(cpu, device=replace(cpu.device, copies=0.0))  # what a library has besides is no storage of the graph
    plan = random_plan(program, dims, {}, cpu, 1, recompute=again)
    local = rewrite(program, plan)
    held = peak_memory(local, plan)
    predicted = sum(held.values()) - held["optimizer"]
    with torch.no_grad():
        assert measured_peak(local, values) == pytest.approx(predicted, rel=0.02)


@pytest.mark.parametrize("name", ["mlp", "encoder"])
def test_predicted_peak_of_a_microbatch_is_measured(name: str) -> None:
    whole, _, values = zoo.captured(name)
    program = microbatch_program(whole, 2)
    plan = random_plan(program, analyze(program), {}, Cluster.preset("cpu"), 1, recompute=True)
    local = rewrite(whole, replace(plan, fingerprint=whole.fingerprint, microbatches=2))
    held = peak_memory(local, plan)
    named = {(i.kind, i.name): v for i, v in zip(whole.inputs, values, strict=True)}
    inputs = []
    for node, spec in zip(local.placeholders, local.inputs, strict=True):
        value = named.get((spec.kind, spec.name), torch.ones_like(node.meta["val"], device="cpu"))
        inputs.append(
            take(value, 0, 1, 2, 0).clone() if spec.kind == "batch" and spec.name in program.part.rows else value
        )
    totals = GradientAccumulator()
    with torch.no_grad():
        with totals.microbatch():
            measured_peak(local, inputs)
        with totals.microbatch():
            measured = measured_peak(local, inputs, totals.sums)
    rest = sum(i.nbytes for i, spec in zip(inputs, local.inputs, strict=True) if spec.name in program.part.rows
               and spec.kind == "batch")  # fmt: skip
    results = sum(v.meta["val"].nbytes for o, v in zip(local.outputs, local.output_values, strict=True)
                  if v is not None and o.kind == "result" and o.name in program.part.results)  # fmt: skip
    assert measured + rest + results == pytest.approx(sum(held.values()) - held["optimizer"], rel=0.02)


def test_what_is_held_returns_to_inputs_results_and_gradients() -> None:
    program, _, _ = zoo.captured("encoder")
    plan = solve(program, {"a": 2}, "cpu")
    last = memory_points(rewrite(program, plan), plan)[-1]
    rest = {k: v for k, v in last.held.items() if k in ("activations", "transient", "communication")}
    assert all(v == 0 for v in rest.values()), rest
    assert last.held["gradients"] > 0


@pytest.mark.deep
def test_blocks_left_out_are_counted() -> None:
    """Of six blocks three are captured; their peak is that of the whole."""
    model, batch = deep(6)
    short = program_to_plan(model, batch)
    whole = program_to_plan(model, batch, search=Search(tie_layers=False))
    assert short.repeat is not None
    assert whole.repeat is None
    plan = solve(short, {"a": 2}, "cpu")
    expected = sum(peak_of(whole, plan).values())
    assert sum(peak_of(short, plan).values()) == pytest.approx(expected, rel=0.02)
    tight = solve(short, {"a": 2}, "cpu", memory=0.8 * expected, search=Search(time_limit=10, pins={"microbatches": 1}))
    assert tight.recompute
    assert sum(peak_of(whole, tight).values()) <= 0.8 * expected * 1.05


def test_what_the_library_copies_is_held_until_it_is_done() -> None:
    """Gloo copies what an all-gather makes and what a reduce-scatter takes."""
    program, _, _ = zoo.captured("mlp")
    cpu = Cluster.preset("cpu")
    without = replace(cpu, links=(replace(cpu.links[0], copies=0.0),))
    plan = replace(solve(program, {"a": 4}, cpu, search=Search(recipe="fsdp")), overlap=False)
    local = rewrite(program, plan)
    each = [
        (with_copies.operator, with_copies.total - alone.total)
        for with_copies, alone in zip(
            memory_points(local, plan), memory_points(local, replace(plan, cluster=without)), strict=True
        )
    ]
    copied = [(n, c) for n in local.graph.graph.nodes if (c := info(n).collective) and n.op == "call_function"]
    whole = [
        max(sum(v.nbytes for a in side for v in values_of(a) if v is not None) for side in ([n], n.all_input_nodes))
        for n, c in copied
        if c.kind in ("all_gather", "reduce_scatter")
    ]
    seen = [more for operator, more in each if "all_gather" in operator or "reduce_scatter" in operator]
    assert len(seen) == len(whole) > 4
    assert all(more >= size for more, size in zip(seen, whole, strict=True))
    assert each[0][1] == each[-1][1] == 0  # nothing before the first, and all is given back
