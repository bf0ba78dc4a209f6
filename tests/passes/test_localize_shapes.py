"""localize_shapes: sizes become local, numbers that are not sizes stay."""

from __future__ import annotations

import torch
from torch import nn

from autopar.compiler import program_of, rewrite
from autopar.ir.node_info import graph_info
from autopar.ir.program import Program
from autopar.passes import PASSES
from autopar.passes.localize_shapes import localize_shapes
from autopar.sharding.candidates import letter_parts, strategies
from tests import models
from tests.plans import hand_plan, show

UNTIL = PASSES[: PASSES.index(localize_shapes) + 1]


class Mean(nn.Module):
    """The mean over groups of a product's columns."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.view(8, 8) @ self.w).view(2, 4, 2, 2).mean((1, 3))


def program_of_mean() -> Program:
    return program_of(Mean(), (torch.ones(2, 4, 8),), training=False)


def test_before_and_after() -> None:
    program = program_of_mean()
    plan = hand_plan(
        program, {"a": 2},
        {"view": "a.0", "mm": "m.0", "view_1": "a.0", "sum_dim_int_list": "a.0", "mean": "a.0"},
        batch={"0": "S(0)"}, results={"0": "S(0)"},
    )  # fmt: skip
    assert (
        show(rewrite(program, plan, passes=UNTIL))
        == """\
w  # f32[w.0, (w.1.0 w.1.1)]
batch0  # f32[batch{a}, seq, w.0]
reshape = reshape(batch0, [4, 8])  # f32[(batch{a} seq), w.0]
mm = mm(reshape, w)  # f32[(batch{a} seq), (w.1.0 w.1.1)]
reshape.1 = reshape(mm, [1, 4, 2, 2])  # f32[batch{a}, seq, w.1.0, w.1.1]
sum.dim_IntList = sum.dim_IntList(reshape.1, [1, 3], False)  # f32[batch{a}, w.1.0]
div.Scalar = div.Scalar(sum.dim_IntList, 8)  # f32[batch{a}, w.1.0]
return [div.Scalar]"""
    )


def test_every_node_gets_its_local_value() -> None:
    program = program_of_mean()
    plan = hand_plan(program, {"a": 2, "b": 2}, {"view": "a.0 b.0", "mm": "m.0 m.1"}, batch={"0": "S(0) S(1)"})
    after = rewrite(program, plan, passes=UNTIL)
    shapes = {n.name: tuple(n.meta["val"].shape) for n in after.graph.graph.nodes if n.op != "output"}
    assert shapes["view"] == (2, 8)
    assert shapes["mm"] == (2, 4)
    assert graph_info(after.graph).invariants == ("layouts", "placed", "local")
    assert all("val" not in n.meta or n.meta["val"].shape[0] == 8 for n in program.graph.graph.nodes if n.name == "mm")


def test_parts_of_letters() -> None:
    assert letter_parts(("a.0", "b.1", "a.0", "R", "P0"), "a", (2, 3, 4, 5, 7)) == 8
    assert letter_parts(("a.0", "b.1", "R", "R", "R"), "ab", (2, 3, 4, 5, 7)) == 6


def test_sizes_counted_along_a_split_letter() -> None:
    """GPT-2 cuts its fused projection in three by numbers of columns; split by heads, each device counts its own."""
    program, dims, _ = models.captured("gpt2", seq=4)
    node, operator = next((n, o) for n, o in dims.operators.items() if "split" in str(n.target) and o.rule.scaled)
    (letters,) = operator.rule.scaled.values()
    name = next(s.name for s in strategies(operator) if s.factor and s.factor[0] in letters)
    after = rewrite(program, hand_plan(program, {"a": 2}, {node.name: name}), passes=UNTIL)
    local = next(n for n in after.graph.graph.nodes if n.name == node.name)
    assert (node.args[1], local.args[1]) == (32, 16)
    assert [tuple(v.shape) for v in local.meta["val"]] == [(8, 4, 16)] * 3
