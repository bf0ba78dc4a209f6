"""A plan, rule or pass that is wrong on purpose: `EquivalenceReport.first_difference` names where, and how it lies."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar import compiler
from autopar.compiler import program_of, solve
from autopar.ir.node_info import info
from autopar.ir.ops.collectives import c10d
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes import DETERMINISTIC_PASSES
from autopar.passes.insert_collectives import insert_collectives
from autopar.rules import rule as strategy
from autopar.rules.rule import Rule, Spec
from autopar.search.options import Search
from autopar.verify.first_difference import first_in_rewriting
from tests.plans import follow_plan
from tests.verify.test_verify import tiny_models_pay

module = importlib.import_module("autopar.verify.verify")  # `autopar.verify` is the function
comparison = importlib.import_module("autopar.verify.compare")
aten = torch.ops.aten
X = torch.linspace(-1, 1, 32).view(4, 8).sin()
COLUMNS_THEN_ROWS = {"a.weight": ("S(0)",), "a.bias": ("S(0)",), "b.weight": ("S(1)",), "batch.*": ("R",)}


class Rows(nn.Module):
    """Softmax of ``x * w``."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(1, 2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x * self.w, 1)


class Net(nn.Module):
    """Two layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.b(torch.tanh(self.a(x))))).square().mean()


def false_softmax(x: Spec, dim: int, half_to_float: bool) -> Rule:
    return Rule("ab->ab")


def test_a_false_rule_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(strategy._RULES, aten._softmax.default, false_softmax)
    layouts: dict[str, Any] = {"batch": {"0": "S(1)"}, "results": {"0": "S(1)"}}
    plan = follow_plan(program_of(Rows(), (X,)), {"a": 2}, **layouts)
    report = module.verify(Rows(), (X,), {"a": 2}, plan=plan)
    assert report.max_error > 1e-2
    first = report.first_difference
    assert (first.stage, first.operator, first.backward) == ("rewriting", "aten._softmax.default", False)
    assert first.line.startswith(f"{__file__}:")
    assert "{a}" in first.expected
    assert (first.found, len(first.inputs)) == ("", 1)
    assert "aten._softmax.default" in str(first)
    assert "in no layout" in str(first)


def sabotaged(monkeypatch: pytest.MonkeyPatch, sabotage: Any) -> list[str]:
    """From now on a pass breaks something of what `insert_collectives` has made; the values that it breaks."""
    values: list[str] = []

    def broken(program: Program, plan: Plan) -> Program:
        values.extend(info(node).moved_value for node in sabotage(program))
        assert values
        return program

    at = DETERMINISTIC_PASSES.index(insert_collectives) + 1
    monkeypatch.setattr(
        module, "DETERMINISTIC_PASSES", (*DETERMINISTIC_PASSES[:at], broken, *DETERMINISTIC_PASSES[at:])
    )
    return values


def reductions(program: Program, *, gradient: bool) -> list[Any]:
    nodes = program.graph.graph.nodes
    return [n for n in nodes if n.target is c10d.all_reduce.default and info(n).collective.gradient == gradient]


def largest_instead(program: Program) -> list[Any]:
    found = reductions(program, gradient=False)[:1]
    for node in found:
        node.update_arg(1, "max")
    return found


def not_reduced(program: Program) -> list[Any]:
    found = reductions(program, gradient=True)
    for node in found:
        for wait in list(node.users):
            wait.update_arg(0, node.args[0])
        node.graph.erase_node(node)
    return found


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_wrong_move_is_named_with_its_axis(microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search(pins={**COLUMNS_THEN_ROWS, "microbatches": microbatches})
    plan = solve(program_of(Net(), (X,)), {"a": 2}, tiny_models_pay(), search=search, deterministic=True)
    broken = sabotaged(monkeypatch, largest_instead)
    first = module.verify(Net(), (X,), {"a": 2}, plan=plan).first_difference
    assert first.stage == "rewriting"
    assert first.operator.startswith("all_reduce over a of a")
    assert [first.node] == broken
    assert first.line.startswith(f"{__file__}:")


def test_a_sum_that_is_not_made_lies_as_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = follow_plan(program_of(Net(), (X,)), {"a": 2}, batch={"0": "S(0)"})
    sabotaged(monkeypatch, not_reduced)
    report = module.verify(Net(), (X,), {"a": 2}, plan=plan)
    first = report.first_difference
    assert first.backward
    assert "+sum{a}" not in first.expected
    assert "+sum{a}" in first.found
    assert f"would be right in {first.found}" in str(first)


def test_what_the_canonical_form_changes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = compiler.canonical

    def broken(program: Program) -> Program:
        made = original(program)
        node = next(n for n in made.graph.graph.nodes if n.target is aten.tanh.default)
        node.args, node.target = (node.args[0],), aten.sin.default
        return made

    monkeypatch.setattr(compiler, "canonical", broken)
    first = module.verify(Net(), (X,), {"a": 2}, plan="random").first_difference
    assert first.stage == "canonical form"
    assert first.module in ("", "b")  # the first operator behind it that both graphs have


@pytest.mark.slow
def test_right_plans_have_none_and_it_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []
    original = comparison._locate
    monkeypatch.setattr(comparison, "_locate", lambda *a: looked.append(a) or original(*a))
    for pins in ({}, {"microbatches": 2}, {"stages": 2, "microbatches": 2}):
        report = module.verify(Net(), (X,), {"a": 2}, plan="random", pins=pins, seed=2)
        assert report.max_error < 1e-9
        assert not looked
        assert report.first_difference is None
        assert first_in_rewriting(looked.pop()[0]) is None  # nor does any node differ by itself
        assert report.first_difference is None
        assert not looked
