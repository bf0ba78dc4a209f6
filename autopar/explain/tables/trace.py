"""What `autopar trace` prints: the simulated step beside the measured one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from autopar.ir.plan_table import format_seconds, render
from autopar.simulate.tasks import COMMUNICATION, COMPUTE
from autopar.simulate.timeline import Timeline

ROWS = 10
"""Nodes in the table, those whose seconds differ the most."""


def trace_facts(simulated: Timeline, measured: Timeline) -> dict[str, Any]:
    """Seconds of two timelines of one device, as plain data: of the step, by category, and of each node."""
    nodes = {
        name: {"simulated": one, "measured": other}
        for name, (one, other) in _pairs(_by_node(simulated), _by_node(measured)).items()
    }
    figures = {
        "step": (_end(simulated), _end(measured)),
        "computes": (_sum(simulated, COMPUTE), _sum(measured, COMPUTE)),
        "communicates": (_sum(simulated, COMMUNICATION), _sum(measured, COMMUNICATION)),
        "communication beside no computation": (
            simulated.exposed_communication.get(0, 0.0), measured.exposed_communication.get(0, 0.0)),
    }  # fmt: skip
    return {
        "seconds": {name: {"simulated": a, "measured": b} for name, (a, b) in figures.items()},
        "nodes": nodes,
    }


def trace_table(facts: Mapping[str, Any], width: int = 100) -> str:
    """The figures as plain text, and the nodes that differ the most."""
    nodes = sorted(facts["nodes"].items(), key=lambda x: -abs(x[1]["simulated"] - x[1]["measured"]))[:ROWS]
    tables = []
    for title, rows in (("", facts["seconds"].items()), ("nodes that differ the most", nodes)):
        table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
        table.add_column(title)
        for name in ("simulated", "measured"):
            table.add_column(name, justify="right")
        for name, pair in rows:
            table.add_row(*map(Text, (name, format_seconds(pair["simulated"]), format_seconds(pair["measured"]))))
        tables.append(table)
    return render(tables, width)


def _end(timeline: Timeline) -> float:
    return timeline.step_seconds


def _sum(timeline: Timeline, category: str) -> float:
    return sum(task.seconds for task in timeline.tasks if task.category == category)


def _by_node(timeline: Timeline) -> dict[str, float]:
    """Seconds of each node, over all microbatches; waits, which depend on others, are left out."""
    found: dict[str, float] = defaultdict(float)
    for task in timeline.tasks:
        if task.category in (COMPUTE, COMMUNICATION):
            found[task.name] += task.seconds
    return found


def _pairs(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    return {name: (one[name], other[name]) for name in one if name in other}
