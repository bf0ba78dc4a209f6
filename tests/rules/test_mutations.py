"""The checks catch what they are there for: each mistake, made on purpose, is noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar.compiler import program_of, rewrite
from autopar.errors import InvalidRuleError, PassError
from autopar.ir.node_info import info
from autopar.ir.ops.collectives import ALL_REDUCES, axis_index
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes import PASSES
from autopar.rules import rule as strategy
from autopar.rules.oracle.sharding import check_rule
from autopar.rules.rule import Rule, Spec
from autopar.verify.verify import compare
from tests.plans import follow_plan, hand_plan, tiny

aten = torch.ops.aten
Saboteur = Callable[[Program, Plan], Program]
X, W, TANGENT = torch.arange(32.0).view(4, 8) / 7, torch.linspace(-1, 1, 32).view(8, 4), torch.ones(4, 4)


def error(program: Program, plan: Plan, values: list[Tensor], *saboteurs: Saboteur) -> float:
    """Largest error of the plan's program once it has been sabotaged; infinite if a check stops it."""
    try:
        local = rewrite(program, plan, passes=(*PASSES, *saboteurs))
    except PassError:
        return float("inf")
    return compare(program, local, plan, values, torch.float64).max_error


def caught(program: Program, plan: Plan, values: list[Tensor], saboteur: Saboteur) -> bool:
    assert error(program, plan, values) < 1e-10  # right without the mistake
    return error(program, plan, values, saboteur) > 1e-6


def drop_reductions(*, gradient: bool) -> Saboteur:
    """Users take what an all-reduce would have reduced."""

    def drop(program: Program, plan: Plan) -> Program:
        dropped = 0
        for node in list(program.graph.graph.nodes):
            if node.target in ALL_REDUCES and info(node).collective.gradient == gradient:
                (wait,) = node.users
                wait.replace_all_uses_with(node.args[0])
                for gone in (wait, node):
                    program.graph.graph.erase_node(gone)
                dropped += 1
        assert dropped == 1
        return program

    return drop


def swap_axes(program: Program, plan: Plan) -> Program:
    """Blocks are counted along the axes in the wrong order."""
    found = [n for n in program.graph.graph.nodes if n.target is axis_index]
    assert {n.args[0] for n in found} == {"a", "b"}
    for node in found:
        node.args = ("b" if node.args == ("a",) else "a",)
    return program


def test_a_dropped_all_reduce() -> None:
    program, _ = tiny()
    plan = follow_plan(program, {"a": 2}, batch={"0": "S(1)"}, parameters={"w": "S(0)"})
    assert caught(program, plan, [W, X], drop_reductions(gradient=False))


def test_a_missing_gradient_reduction() -> None:
    program, _ = tiny(True)
    plan = follow_plan(program, {"a": 2}, batch={"0": "S(0)"}, results={"0": "S(0)"})
    assert caught(program, plan, [W, X, TANGENT], drop_reductions(gradient=True))


def test_axes_in_the_wrong_order() -> None:
    program, _ = tiny()
    choices = {"mm": "m.0 m.0", "relu": "a.0 a.0"}
    plan = hand_plan(program, {"a": 2, "b": 2}, choices, results={"0": "S(0) S(0)"})
    assert caught(program, plan, [W, X], swap_axes)


class Rows(nn.Module):
    """Softmax of ``x * w``."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(1, 2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x * self.w, 1)


def false_softmax(x: Spec, dim: int, half_to_float: bool) -> Rule:
    return Rule("ab->ab")


def test_a_false_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    call = (aten._softmax.default, (torch.randn(4, 8, dtype=torch.float64), 1, False), {})
    check_rule(*call)
    with pytest.raises(InvalidRuleError, match="_softmax"):
        check_rule(*call, rule=Rule("ab->ab"))

    program = program_of(Rows(), (X,), training=False)
    assert (
        error(program, follow_plan(program, {"a": 2}, batch={"0": "S(1)"}, results={"0": "S(1)"}), [W[:, 0], X]) < 1e-10
    )
    monkeypatch.setitem(strategy._RULES, aten._softmax.default, false_softmax)
    program = replace(program)  # what is remembered of it was found with the right rule
    plan = follow_plan(program, {"a": 2}, batch={"0": "S(1)"}, results={"0": "S(1)"})
    assert error(program, plan, [W[:, 0], X]) > 1e-6
