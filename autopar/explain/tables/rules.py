"""What `autopar ops` prints: the rules, and how much of torch they cover."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autopar.ir.plan_table import figures, render

LONGEST = 25
"""Rows of a list of reasons; the others are counted."""


def operators_table(rows: Sequence[Mapping[str, Any]], width: int = 100) -> str:
    """The rules as plain text.

    Args:
        rows: ``family``, ``operator``, ``equations`` and ``samples`` of each rule.
        width: columns.
    """
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in ("family", "operator", "equation"):
        table.add_column(name, overflow="fold")
    table.add_column("samples", justify="right", no_wrap=True)
    last = ""
    for row in rows:
        family = "" if row["family"] == last else row["family"]
        last = row["family"]
        equations = "\n".join(row["equations"]) or "-"
        table.add_row(*map(Text, (family, row["operator"], equations, str(row["samples"] or "-"))))
    written = sum(row["family"] != DISCOVERED for row in rows)
    found = f"{written} written rules" + (f", {len(rows) - written} discovered" if written < len(rows) else "")
    return render([table, figures([("", found), ("samples", MEANING)])], width)


DISCOVERED = "(discovered)"
MEANING = "calls on which the oracle has proven the rule: shard, run, reassemble, compare"


def coverage_table(figures_: Mapping[str, Any], width: int = 100) -> str:
    """The counts of a coverage run as plain text, at most ``width`` columns wide."""
    parts: list[RenderableType] = []
    for dtype, counts in figures_["by_dtype"].items():
        table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, title=dtype, title_justify="left")
        table.add_column("operators whose graphs are")
        for name in ("all", "differentiable"):
            table.add_column(name, justify="right")
        for status in counts["all"]:
            table.add_row(status, str(counts["all"][status]), str(counts["differentiable"][status]))
        table.add_row("total", *(str(sum(counts[name].values())) for name in ("all", "differentiable")))
        failures = sum(map(len, counts["failures"].values()))
        proven = f"{counts['checks']} strategies on real values; {failures} refuted"
        parts += [table, figures([("proven", proven)])]
        for name in ("blocking", "not_captured"):
            parts += [figures([("", ""), *_reasons(name.replace("_", " "), counts[name])])]
        parts += [figures((name, text) for name, texts in counts["failures"].items() for text in texts)]
    overloads = list(figures_["overloads"].values())
    kinds = ", ".join(f"{overloads.count(k)} {k}" for k in dict.fromkeys(sorted(overloads, reverse=True)))
    traced, known = figures_["traced_overloads"], figures_["dtensor_overloads"]
    parts.append(
        figures(
            [
                ("overloads", f"{len(overloads)} in canonical graphs: {kinds}"),
                ("DTensor", f"has a sharding rule for {known} of the {traced} overloads that were traced"),
            ]
        )
    )
    return render(parts, width)


def _reasons(title: str, counts: Mapping[str, int]) -> list[tuple[str, str]]:
    rows = [(title if i == 0 else "", f"{n} x {reason}") for i, (reason, n) in enumerate(counts.items())]
    more = len(rows) - LONGEST
    return rows[:LONGEST] + ([("", f"and {more} more; --json has all")] if more > 0 else [])
