"""Coverage on a few of torch's operators; all of them are a benchmark (see benchmarks/RESULTS.md)."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import autopar.strategies  # noqa: F401
from autopar import _torch_compat as compat
from autopar import cli
from autopar.explain.tables.rules import coverage_table
from autopar.rules.rule import _RULES, Rule, Spec
from autopar.verify.coverage.examine import examine
from autopar.verify.coverage.run import figures_of

pytest.importorskip("expecttest")

OPERATORS = {op.formatted_name: op for op in compat.operator_database()}

WRITTEN = ["add", "mm", "softmax", "nn_functional_layer_norm", "cumsum", "nn_functional_gelu", "atan2", "gather"]


@pytest.mark.some(2)
@pytest.mark.parametrize("name", WRITTEN)
def test_operators_with_written_rules(name: str) -> None:
    outcome = examine(OPERATORS[name], torch.float64)
    assert outcome is not None
    assert (outcome.status, outcome.failures) == ("written", ())
    assert outcome.differentiable


@pytest.mark.slow
def test_what_cannot_be_split_says_why() -> None:
    found = {name: examine(OPERATORS[name], torch.float64) for name in ("nonzero", "bernoulli", "trace", "ones_like")}
    assert all(found.values())
    status = {name: (outcome.status, outcome.reason) for name, outcome in found.items() if outcome}
    assert status["nonzero"] == ("not captured", "the shape of its output depends on data")
    assert status["ones_like"][0] == "nothing to split"
    assert json.dumps(figures_of([o for o in found.values() if o]))


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def pointwise(x: Spec, dim: int, **_: Any) -> Rule:
        names = "abc"[: x.ndim] or "."
        return Rule(f"{names}->{names}")

    monkeypatch.setitem(_RULES, torch.ops.aten.cumsum.default, pointwise)
    monkeypatch.setattr(import_module("autopar.verify.coverage.examine"), "_proven", set())
    outcome = examine(OPERATORS["cumsum"], torch.float64)
    assert outcome is not None
    assert any("aten.cumsum.default" in failure for failure in outcome.failures)
    assert "largest difference" in coverage_table(figures_of([outcome]))


def test_the_command() -> None:
    result = CliRunner().invoke(cli.app, ["ops", "--coverage", "--only", "special_i0", "--json"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["by_dtype"]["float64"]["operators"] == figures["by_dtype"]["float32"]["operators"] > 0
    assert figures["traced_overloads"] >= figures["dtensor_overloads"]
