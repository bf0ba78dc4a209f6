"""Answers to "why not?": a tensor's other placements, and what each would cost or why it is impossible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from autopar.costs.memory import format_bytes
from autopar.explain.tables.difference import difference, difference_table
from autopar.explain.why_not import Answer
from autopar.ir.plan import Plan
from autopar.ir.plan_table import figures, format_seconds, render


def answers_dict(name: str, layout: str, found: Plan, answers: Sequence[Answer]) -> dict[str, Any]:
    """Plain data: the layout that was chosen, and for each other one its cost or why it is impossible."""
    rows: list[dict[str, Any]] = []
    for answer in answers:
        row: dict[str, Any] = {"wanted": dict(answer.wanted)}
        if answer.plan is None:
            row["blocked"] = answer.reason
        else:
            row["ratio"] = _ratio(found, answer.plan)
            row["difference"] = difference(found, answer.plan)
        if answer.note:
            row["note"] = answer.note
        rows.append(row)
    certificate = found.certificate
    return {
        "name": name,
        "layout": layout,
        "step_seconds": found.predicted.step_seconds,
        "memory_bytes": sum(found.predicted.memory_bytes.values()),
        "gap": certificate.gap,
        "space": certificate.space,
        "answers": rows,
    }


def answers_table(name: str, layout: str, found: Plan, answers: Sequence[Answer], width: int = 100) -> str:
    """The same as text: a row for each answer; a single one gets the whole difference of the two plans."""
    seconds, memory = found.predicted.step_seconds, sum(found.predicted.memory_bytes.values())
    gap = f"{100 * found.certificate.gap:.3g}% at most above the best of: {found.certificate.space}"
    head = [
        (name, layout),
        ("predicted step", f"{format_seconds(seconds)}, {format_bytes(memory)} per device"),
        ("gap", gap),
        *(("note", note) for note in dict.fromkeys(answer.note for answer in answers) if note),
    ]
    if len(answers) == 1:
        (answer,) = answers
        placement = _wanted(answer)
        if answer.plan is None:
            return render([figures([*head, (f"with {placement}", f"blocked: {answer.reason}")])], width)
        times = f"{_ratio(found, answer.plan):.4g} times as long; what differs:"
        return (
            render([figures([*head, (f"with {placement}", times)])], width)
            + "\n"
            + difference_table(found, answer.plan, ("this plan", f"with {placement}"), width)
        )
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("instead", no_wrap=True)
    for title in ("step", "times this plan", "memory per device"):
        table.add_column(title, justify="right", no_wrap=True)
    for answer in answers:
        if answer.plan is not None:
            predicted = answer.plan.predicted
            cells = (format_seconds(predicted.step_seconds), f"{_ratio(found, answer.plan):.4g}")
            table.add_row(*map(Text, (_wanted(answer), *cells, format_bytes(sum(predicted.memory_bytes.values())))))
    blocked = [(_wanted(answer), answer.reason) for answer in answers if answer.plan is None]
    return render([figures(head), table, *([figures([("blocked", ""), *blocked])] if blocked else [])], width)


def _wanted(answer: Answer) -> str:
    return ", ".join(f"{placement}@{axis}" for axis, placement in answer.wanted.items())


def _ratio(found: Plan, plan: Plan) -> float:
    return plan.predicted.step_seconds / max(found.predicted.step_seconds, 1e-300)
