"""`list_rules`: the written rules with the number of calls that prove them, and those discovered for a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from torch import fx

from autopar.compiler import program_of
from autopar.explain.tables.rules import DISCOVERED
from autopar.ir.signature.outputs import Loss
from autopar.rules.discover.search import discovered
from autopar.rules.rule import registered
from autopar.sharding.dims import analyze

Row = dict[str, Any]


def list_rules(task: tuple[Any, Any, Any, Loss] | None = None, only: str = "") -> list[Row]:
    """A row for each rule: ``family``, ``operator``, ``equations`` and ``samples``, how many calls prove it.

    Discovered rules were proven in this process, written ones by the tests of autopar; None: a rule of yours.

    Args:
        task: model, batch, loss function and loss (or None), to list what is discovered for it, and equations.
        only: part of an operator's name.
    """
    # First: to analyze a model discovers rules, which are listed below.
    equations = _equations(task) if task else {}
    proven = json.loads(resources.files("autopar.strategies").joinpath("proven.json").read_text())
    rows = [
        _row(_family(function.__module__), name, equations.get(name, ()), proven.get(name))
        for name, function in ((str(target), function) for target, function in registered().items())
    ]
    found: dict[str, tuple[list[str], int]] = {}
    for d in discovered():
        texts, samples = found.get(d.target, ([], 0))
        # An operator may have been discovered for several kinds of calls, each with its own equation.
        found[d.target] = ([*texts, d.rule.equation], samples + d.samples)
    rows += [_row(DISCOVERED, name, texts, samples) for name, (texts, samples) in found.items()]
    return [row for row in rows if only in row["operator"]]


def _family(module: str) -> str:
    """The operator family that a rule is of: our module, or package; of a rule of yours the module."""
    own = module.removeprefix("autopar.strategies.")
    return module.rpartition(".")[2] if own == module else own.partition(".")[0]


def _row(family: str, operator: str, equations: Sequence[str], samples: int | None) -> Row:
    return {"family": family, "operator": operator, "equations": list(dict.fromkeys(equations)), "samples": samples}


def _equations(task: tuple[Any, Any, Any, Loss]) -> dict[str, list[str]]:
    """Equations of each operator's calls in a model's graph."""
    model, batch, loss_fn, loss = task
    program = program_of(model, batch, loss_fn=loss_fn, loss=loss)
    found: dict[str, list[str]] = {}
    operators: dict[fx.Node, Any] = analyze(program).operators
    for node, operator in operators.items():
        found.setdefault(str(node.target), []).append(operator.rule.equation)
    return found
