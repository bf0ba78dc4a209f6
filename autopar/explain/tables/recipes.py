"""A plan compared with the recipes: what each is predicted to take, and why some do not apply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from autopar.costs.memory import format_bytes
from autopar.explain.recipes import Comparison
from autopar.ir.plan import Plan
from autopar.ir.plan_table import figures, format_seconds, render


def comparison_list(found: Plan, rows: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Plain data of each recipe: seconds, bytes and how many times as long as ``found`` it takes, or why not."""
    return [
        {"recipe": row.recipe, "recomputing": row.recomputing, "reason": row.reason}
        if row.plan is None
        else {
            "recipe": row.recipe,
            "recomputing": row.recomputing,
            "step_seconds": row.plan.predicted.step_seconds,
            "memory_bytes": sum(row.plan.predicted.memory_bytes.values()),
            "peak_bytes": sum((row.plan.predicted.peak_bytes or row.plan.predicted.memory_bytes).values()),
            "ratio": _ratio(found, row.plan),
        }
        for row in rows
    ]


def comparison_table(found: Plan, rows: Sequence[Comparison], width: int = 100) -> str:
    """The same as text; recipes without a plan are listed below the table, with the reason."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("compared with recipes", no_wrap=True)
    for name in ("step", "times this plan", "memory per device"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, plan in [("this plan", found), *((row.label, row.plan) for row in rows)]:
        if plan is not None:
            memory = format_bytes(sum(plan.predicted.memory_bytes.values()))
            seconds = format_seconds(plan.predicted.step_seconds)
            table.add_row(*map(Text, (name, seconds, f"{_ratio(found, plan):.3g}", memory)))
    left_out = [(row.label, row.reason) for row in rows if row.plan is None]
    return render([table, *([figures([("not applicable", ""), *left_out])] if left_out else [])], width)


def _ratio(found: Plan, plan: Plan) -> float:
    return plan.predicted.step_seconds / max(found.predicted.step_seconds, 1e-300)
