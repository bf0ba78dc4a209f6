"""eliminate_dead_code: what nothing uses goes."""

from __future__ import annotations

from dataclasses import replace

from autopar.compiler import rewrite
from autopar.ir.node_info import info, set_info
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes import PASSES
from autopar.passes.eliminate_dead_code import eliminate_dead_code
from tests.plans import hand_plan, show, tiny


def test_before_and_after() -> None:
    program, _ = tiny()
    plan = hand_plan(program, {"a": 2})

    def litter(program: Program, plan: Plan) -> Program:
        import torch

        from autopar.ir.ops.collectives import axis_index

        graph = program.graph.graph
        mm = next(n for n in graph.nodes if n.name == "mm")
        with graph.inserting_after(mm):
            index = graph.call_function(axis_index, ("a",))
        with graph.inserting_after(index):
            unused = graph.call_function(torch.ops.aten.mul.Tensor, (mm, index))
        for node in (index, unused):
            set_info(node, replace(info(node), internal=True))
        return program

    passes = (*PASSES[:-1], litter)
    assert (
        show(rewrite(program, plan, passes=passes))
        == """\
w  # f32[w.0, w.1]
batch0  # f32[batch, w.0]
mm = mm(batch0, w)  # f32[batch, w.1]
axis_index = axis_index('a')
mul.Tensor = mul.Tensor(mm, axis_index)
relu = relu(mm)  # f32[batch, w.1]
return [relu]"""
    )
    assert (
        show(rewrite(program, plan, passes=(*passes, eliminate_dead_code)))
        == """\
w  # f32[w.0, w.1]
batch0  # f32[batch, w.0]
mm = mm(batch0, w)  # f32[batch, w.1]
relu = relu(mm)  # f32[batch, w.1]
return [relu]"""
    )


def test_placeholders_stay() -> None:
    program, _ = tiny(True)
    graph = rewrite(program, hand_plan(program, {"a": 2})).graph.graph
    assert len([n for n in graph.nodes if n.op == "placeholder"]) == len(program.inputs)
