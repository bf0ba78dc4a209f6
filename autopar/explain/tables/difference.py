"""How two plans differ: figures, layouts and modules, as plain data and as tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autopar.costs.memory import format_bytes
from autopar.ir.layout import Layout
from autopar.ir.plan import Plan
from autopar.ir.plan_table import figures, format_seconds, render

MODULES = 12
"""Rows of the table of modules, the largest differences first."""

_KINDS = {"parameters": "parameter", "batch": "batch", "results": "result"}


def difference(first: Plan, second: Plan) -> dict[str, Any]:
    """Everything in which two plans differ, as pairs of the first plan's value and the second's.

    Returns:
        ``same`` (whether mesh, layouts and strategies are equal), ``about`` (axes, cluster, optimizer, graph),
        ``figures`` (seconds and bytes, equal ones, too), ``layouts`` (those of repeated blocks joined), ``operators``
        (how many layer classes of operators have another strategy or consumer layout; None for two graphs) and
        ``modules``.
    """
    one, other = _about(first), _about(second)
    about = {key: (one[key], other[key]) for key in one if one[key] != other[key]}
    layouts = _layouts(first, second)
    operators = _operators(first, second)
    return {
        # Figures may differ for equal plans: versions of autopar predict differently.
        "same": not (about or layouts or operators),
        "about": about,
        "figures": _figures(first, second),
        "layouts": layouts,
        "operators": operators,
        "modules": _modules(first, second),
    }


def difference_table(first: Plan, second: Plan, names: tuple[str, str], width: int = 100) -> str:
    """The same as text, at most ``width`` columns wide; the plans go by ``names``."""
    found = difference(first, second)
    parts: list[RenderableType] = []
    if found["about"]:
        parts.append(_pairs("planned for", names, ((key, *pair) for key, pair in found["about"].items())))
    parts.append(_pairs("", names, _figure_rows(found["figures"]), "right"))
    if found["layouts"]:
        rows = ((_counted(row), *(_placements(each) for each in row["layouts"])) for row in found["layouts"])
        parts.append(_pairs("layouts that differ", names, rows))
    if found["modules"]:
        parts.append(_module_table(found["modules"], names))
    return render([*parts, figures([("", ""), ("operators", _verdict(found))])], width)


def _verdict(found: Mapping[str, Any]) -> str:
    if found["operators"] is None:
        return "not compared: the plans are for different graphs"
    return "the same layouts" if found["same"] else f"{found['operators']} classes of operators with another strategy"


def _about(plan: Plan) -> dict[str, str]:
    """What a plan is for."""
    return {
        "axes": ", ".join(f"{name}={size}" for name, size in plan.axes),
        "cluster": f"{plan.cluster.name} ({plan.cluster.fingerprint()})",
        "optimizer": plan.optimizer,
        "graph": plan.fingerprint,
        "stages": str(len(plan.stages)),
    }


def _figures(first: Plan, second: Plan) -> dict[str, Any]:
    both = (first, second)
    axes = dict.fromkeys((*first.axis_names, *second.axis_names))
    return {
        "step_seconds": [plan.predicted.step_seconds for plan in both],
        "compute_seconds": [plan.predicted.compute_seconds for plan in both],
        "lower_bound": [plan.certificate.lower_bound for plan in both],
        "memory_bytes": [sum(plan.predicted.memory_bytes.values()) for plan in both],
        "communication_bytes": {
            axis: [plan.predicted.communication_bytes.get(axis, 0.0) for plan in both] for axis in axes
        },
    }


def _layouts(first: Plan, second: Plan) -> list[dict[str, Any]]:
    """Tensors whose layouts differ; repeated blocks with the same pair of layouts are joined."""
    pairs = [
        (kind, name, *(_text(plan, getattr(plan, field).get(name), name) for plan in (first, second)))
        for field, kind in _KINDS.items()
        for name in dict.fromkeys((*getattr(first, field), *getattr(second, field)))
    ]
    # By pattern and both layouts: a table of all layers of a deep model would be unreadable.
    joined: dict[tuple[str, str, str], list[str]] = {}
    for kind, name, one, other in pairs:
        if one != other:
            full = name if kind == "parameter" else f"{kind}.{name}"
            # Numbers of batch.N and result.N tell tensors apart; those within a parameter's path are of its block.
            key = re.sub(r"(?<=\.)\d+(?=\.)", "*", full) if kind == "parameter" else full
            joined.setdefault((key, one, other), []).append(full)
    return [
        {"name": key if len(names) > 1 else names[0], "instances": len(names), "layouts": pair}
        for (key, *pair), names in joined.items()
    ]


def _text(plan: Plan, layout: Layout | None, name: str) -> str:
    """One placement for each axis, and the padded shape; empty for a tensor that the plan does not have."""
    if layout is None:
        return ""
    padded = "x".join(map(str, plan.padding.get(name, ())))
    placements = " ".join(f"{p}@{axis}" for p, axis in zip(layout, plan.axis_names, strict=True))
    return placements + (f" padded to {padded}" if padded else "")


def _operators(first: Plan, second: Plan) -> int | None:
    """How many layer classes of operators have another strategy or consumer layout; None for two graphs."""
    if first.fingerprint != second.fingerprint:
        return None
    # A consumer layout is named "node output": its operator counts once, whatever of it differs.
    changed = {
        name.rpartition(" ")[0] if table is first.consumer_layouts else name
        for table, other in ((first.choices, second.choices), (first.consumer_layouts, second.consumer_layouts))
        for name in {**table, **other}
        if table.get(name) != other.get(name)
    }
    return len(changed)


def _modules(first: Plan, second: Plan) -> list[dict[str, Any]]:
    """Modules whose time or traffic differs, the largest difference first."""
    tables = [{row.path: row for row in plan.modules} for plan in (first, second)]
    found: list[dict[str, Any]] = []
    for path in dict.fromkeys(path for table in tables for path in table):
        rows = [table.get(path) for table in tables]
        seconds = [row.seconds if row else 0.0 for row in rows]
        sent = [sum(row.communication_bytes.values()) if row else 0.0 for row in rows]
        # Sums of floats in another order differ in the last bits.
        if abs(seconds[0] - seconds[1]) > 1e-9 * max(seconds) or sent[0] != sent[1]:
            instances = max(row.instances for row in rows if row)
            found.append({"path": path, "instances": instances, "seconds": seconds, "communication_bytes": sent})
    return sorted(found, key=lambda row: -abs(row["seconds"][0] - row["seconds"][1]))


def _figure_rows(values: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    for key, name in (("step_seconds", "predicted step"), ("compute_seconds", "compute"), ("lower_bound", "bound")):
        yield (name, *map(format_seconds, values[key]))
    for axis, pair in values["communication_bytes"].items():
        yield (f"sent along {axis}", *map(format_bytes, pair))
    yield ("memory per device", *map(format_bytes, values["memory_bytes"]))


def _pairs(title: str, names: Sequence[str], rows: Iterable[Sequence[str]], justify: Any = "left") -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column(title, overflow="fold")
    for name in names:
        table.add_column(name, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _module_table(modules: Sequence[Mapping[str, Any]], names: tuple[str, str]) -> Table:
    rows = []
    for row in modules[:MODULES]:
        both = zip(row["seconds"], row["communication_bytes"], strict=True)
        cells = (f"{format_seconds(seconds)}, sends {format_bytes(sent)}" for seconds, sent in both)
        rows.append((_counted({**row, "name": row["path"] or "(model)"}), *cells))
    table = _pairs("modules that differ", names, rows, "right")
    if len(modules) > MODULES:
        table.caption = Text(f"and {len(modules) - MODULES} more modules", style="none")
    return table


def _counted(row: Mapping[str, Any]) -> str:
    name: str = row["name"]
    return name + (f" x{row['instances']}" if row["instances"] > 1 else "")


def _placements(text: str) -> str:
    return text or "(none)"
