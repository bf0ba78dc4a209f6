"""annotate_layouts: the plan, written on the nodes."""

from __future__ import annotations

import pytest

from autopar.compiler import rewrite
from autopar.errors import PlanError
from autopar.ir.layout import Partial, Replicate, Split
from autopar.ir.node_info import graph_info, info
from autopar.passes.annotate_layouts import annotate_layouts
from tests.plans import hand_plan, layout, show, tiny

AXES = {"data": 2, "model": 2}


def test_before_and_after() -> None:
    program, _ = tiny()
    plan = hand_plan(
        program, AXES, {"mm": "m.0 k.0", "relu": "a.0 R"}, batch={"0": "S(0) S(1)"}, parameters={"w": "R S(0)"},
        results={"0": "S(0) R"},
    )  # fmt: skip
    assert (
        show(program)
        == """\
w
batch0
mm = mm(batch0, w)
relu = relu(mm)
return [relu]"""
    )
    assert (
        show(rewrite(program, plan, passes=(annotate_layouts,)))
        == """\
w  # f32[w.0{model}, w.1]
batch0  # f32[batch{data}, w.0{model}]
mm = mm(batch0, w)  # f32[batch{data}, w.1] +sum{model}
relu = relu(mm)  # f32[batch{data}, w.1]
return [relu]"""
    )


def test_meta() -> None:
    program, _ = tiny()
    plan = hand_plan(program, AXES, {"mm": "m.0 k.0"}, consumer_layouts={"mm": "S(0) S(1)"}, results={"0": "S(1) R"})
    after = rewrite(program, plan, passes=(annotate_layouts,))
    nodes = {n.name: n for n in after.graph.graph.nodes}
    assert info(nodes["mm"]).input_layouts == (layout("S(0) S(1)"), layout("R S(0)"))
    assert info(nodes["mm"]).layouts == ((Split(0), Partial()),)
    assert info(nodes["mm"]).consumer_layouts == {0: layout("S(0) S(1)")}
    assert info(nodes["mm"]).strategy == ("m.0", "k.0")
    assert info(nodes["relu"]).layouts == ((Replicate(), Replicate()),)
    assert info(nodes["output"]).input_layouts == (layout("S(1) R"),)
    assert graph_info(after.graph).axes == AXES
    assert not info(next(n for n in program.graph.graph.nodes if n.name == "mm")).layouts


def test_unequal_parts_name_the_node() -> None:
    program, _ = tiny()
    plan = hand_plan(program, {"data": 3}, {"mm": "m.0"})
    with pytest.raises(PlanError, match=r"unequal parts|splits float32\[batch:4.*aten\.mm\.default \(node mm\)"):
        rewrite(program, plan, passes=(annotate_layouts,))
