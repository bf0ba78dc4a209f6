"""What the plan keeps on the host is there between the passes, and comes back unchanged; mistakes are noticed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autopar.compiler import program_of, rewrite, solve
from autopar.costs.cluster import Cluster
from autopar.errors import PassError
from autopar.ir.graph import is_backward
from autopar.ir.node_info import info
from autopar.ir.ops.host import to_device, to_host
from autopar.ir.ops.random import step_seed
from autopar.ir.plan import EVERY, Plan
from autopar.ir.program import Program
from autopar.memory.liveness import memory_points, peak_memory
from autopar.passes import DETERMINISTIC_PASSES, PASSES
from autopar.runtime.step.bind import bind
from autopar.runtime.step.partition import cut
from autopar.search.microbatch.split import microbatch_program
from autopar.search.options import Search
from autopar.search.predict import predict
from autopar.sharding.dims import analyze
from autopar.sharding.layer_classes import layer_classes
from autopar.simulate.graph_tasks import emitted
from autopar.verify.emulate import emulate
from autopar.verify.verify import compare, global_values
from tests.passes.test_insert_recompute import Dropped

AXES = {"a": 2}
MIDDLE = ("up", "relu", "draw", "native_dropout", "mul")


def linked(name: str = "cpu", bandwidth: float = 1e9) -> Cluster:
    cluster = Cluster.preset(name)
    return replace(cluster, device=replace(cluster.device, host_bandwidth=bandwidth))


@cache
def captured() -> tuple[Program, list[Tensor]]:
    model, batch = Dropped(), (torch.randn(24, 8),)
    program = program_of(model, batch)
    return program, global_values(program, model, batch)


def sent_by(program: Program, plan: Plan, *parts: str) -> Plan:
    """The plan that sends to the host what the operators make whose class has one of these texts in its name."""
    members = layer_classes(program, analyze(program)).members
    asked = {k for k, nodes in members.items() if any(p in k for p in parts) and nodes[0] in program.sources}
    chosen = {k: EVERY for k in asked if not is_backward(members[k][0])}
    return predict(program, analyze(program), replace(plan, offload=chosen))


@cache
def plans() -> tuple[Plan, Plan]:
    """One that keeps everything on the device, and one that sends the middle to the host."""
    program, _ = captured()
    kept = solve(program, AXES, linked())
    return kept, sent_by(program, kept, *MIDDLE)


def targets(program: Program) -> list[Any]:
    return [n.target for n in program.graph.graph.nodes]


def test_the_middle_is_sent_and_its_copy_is_saved() -> None:
    program, values = captured()
    saved = []
    for plan in plans():
        local = rewrite(program, plan)
        step = cut(replace(local, graph=bind(local.graph, {"a": "a"}, {"a": 0})))
        values_saved: Any = step.forward.graph.output_node().args[0]
        saved.append([n for n in values_saved[len(step.outputs) :] if n.op == "call_function"])
    assert not any(n.target is to_host for n in saved[0])
    wide = [n for n in saved[1] if n.meta["val"].ndim == 2 and n.meta["val"].shape[1] == 64]
    assert wide
    assert {n.target for n in wide} == {to_host}
    local = rewrite(program, plans()[1], passes=DETERMINISTIC_PASSES)
    report = compare(program, local, plans()[1], values, torch.float64)
    assert report.max_error < 1e-12


def test_it_comes_back_in_front_of_what_takes_it() -> None:
    program, _ = captured()
    local = rewrite(program, plans()[1])
    nodes = list(local.graph.graph.nodes)
    for node in nodes:
        if node.target is to_device:
            assert is_backward(node)
            assert node.next in node.users or node.next.target is to_device
        if node.target is to_host:
            assert not is_backward(node)
            assert [u.target for u in node.users] == [to_device]
            (value,) = node.all_input_nodes
            assert not any(is_backward(u) for u in value.users)


def test_the_peak_falls_by_what_is_on_the_host() -> None:
    program, _ = captured()
    held = []
    for plan in plans():
        local = rewrite(program, plan)
        begin = next(i for i, m in enumerate(memory_points(local, plan)) if m.backward)
        held.append(memory_points(local, plan)[begin - 1].total)  # as the forward pass ends
    away = plans()[1].predicted.host_bytes
    assert away > 0 == plans()[0].predicted.host_bytes
    assert held[0] - held[1] == pytest.approx(away, rel=0.01)
    assert sum(peak_memory(rewrite(program, plans()[1]), plans()[1]).values()) < sum(
        peak_memory(rewrite(program, plans()[0]), plans()[0]).values()
    )


def test_copies_are_predicted_and_simulated() -> None:
    program, _ = captured()
    kept, sent = (plan.predicted for plan in plans())
    device = linked().device
    local = rewrite(program, plans()[1])
    copied = [n.meta["val"].nbytes for n in local.graph.graph.nodes if n.target in (to_host, to_device)]
    expected = sum(copied) / device.host_bandwidth + len(copied) * device.launch
    assert sent.host_seconds == pytest.approx(expected)
    assert sent.step_seconds - kept.step_seconds == pytest.approx(expected)
    tasks = [t.seconds for t in emitted(local, plans()[1]) if t.category == "copy"]
    assert sum(tasks) == pytest.approx(expected)
    assert sent.collectives == kept.collectives


def test_microbatches_send_what_each_of_them_keeps() -> None:
    program, values = captured()
    part = microbatch_program(program, 3, deterministic=True)
    kept = solve(program, AXES, linked(), search=Search(pins={"microbatches": 3}), deterministic=True)
    sent = replace(sent_by(part, kept, *MIDDLE), fingerprint=program.fingerprint)
    local = rewrite(program, sent, passes=DETERMINISTIC_PASSES)
    assert to_host in targets(local)
    assert compare(program, local, sent, values, torch.float64).max_error < 1e-12
    assert 0 < sent.predicted.host_bytes < plans()[1].predicted.host_bytes / 2


def test_seeded_masks_come_back() -> None:
    program, _ = captured()
    results = []
    for plan in plans():
        with step_seed(5):
            results.append(emulate(rewrite(program, plan), ("a",), (2,), [[v, v] for v in _halves(program, plan)]))
    for kept, back in zip(*results, strict=True):
        assert kept[0] is not None and back[0] is not None
        assert torch.equal(kept[0], back[0])


def _halves(program: Program, plan: Plan) -> list[Tensor]:
    """Any local tensors: only whether two plans of the same layouts agree is asked."""
    local = rewrite(program, plan)
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n.meta["val"].shape, generator=generator) for n in local.placeholders]


def test_what_runs_again_takes_what_has_come_back() -> None:
    """The activation is recomputed from the product, which is offloaded."""
    program, values = captured()
    sent = sent_by(program, plans()[0], "up")
    names = [k for k in sent.choices if "forward" in k and any(p in k for p in ("relu", "draw", "dropout", "mul"))]
    both = replace(sent, recompute={k: EVERY for k in (*names, *(f"consumer {r}" for r in sent.consumer_layouts))})
    local = rewrite(program, both, passes=DETERMINISTIC_PASSES)
    back = next(n for n in local.graph.graph.nodes if n.target is to_device)
    assert any(info(u).recompute_of is not None for u in back.users)
    assert compare(program, local, both, values, torch.float64).max_error < 1e-12


def spoil(change: Any) -> Any:
    """A pass that lets every user of what comes back take something else."""

    def spoiled(program: Program, plan: Plan) -> Program:
        for node in list(program.graph.graph.nodes):
            if node.target is to_device:
                change(program.graph.graph, node)
        return program

    return spoiled


def keep_away(graph: fx.Graph, node: fx.Node) -> None:
    node.replace_all_uses_with(node.args[0])


def send_another(graph: fx.Graph, node: fx.Node) -> None:
    """What is sent is not what the forward pass has used, as if it had been overwritten before."""
    sent: Any = node.args[0]
    with graph.inserting_before(sent):
        changed = graph.call_function(torch.ops.aten.zeros_like.default, sent.args)
    changed.meta = {**sent.meta}
    sent.replace_input_with(sent.args[0], changed)


def test_mistakes_are_noticed() -> None:
    program, values = captured()
    with pytest.raises(PassError, match="in host memory"):
        rewrite(program, plans()[1], passes=(*PASSES, spoil(keep_away)))
    local = rewrite(program, plans()[1], passes=(*DETERMINISTIC_PASSES, spoil(send_another)))
    assert compare(program, local, plans()[1], values, torch.float64).max_error > 1e-3
