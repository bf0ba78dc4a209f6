"""What the backward pass saves, offloads or recomputes, as a table: costs, and what decided."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from autopar.costs.memory import format_bytes
from autopar.explain.activations import NOT_SAVED, OFFLOADED, SAVED, Activation
from autopar.ir.plan import Plan
from autopar.ir.plan_table import format_seconds, price_text, render


def activations_dict(name: str, plan: Plan, tensors: Sequence[Activation]) -> dict[str, Any]:
    """Plain data: the shadow price of memory in seconds per byte, and every tensor that the name stands for."""
    fields = ("name", "node", "state", "count", "size", "seconds", "copied", "worth", "why")
    rows = [{field: getattr(tensor, field) for field in fields} for tensor in tensors]
    for row in rows:
        for field in ("seconds", "copied"):
            row[field] = row[field] if math.isfinite(row[field]) else None  # JSON has no infinity
    return {
        "name": name,
        "step_seconds": plan.predicted.step_seconds,
        "memory_price": plan.certificate.memory_price,
        "tensors": rows,
    }


def activations_table(plan: Plan, tensors: Sequence[Activation], width: int = 100) -> str:
    """The same as text; where memory has no price, what bytes are worth is left out."""
    priced = plan.certificate.memory_price > 0
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("in the forward pass", overflow="fold", max_width=width // 2)
    table.add_column("per device", justify="right", no_wrap=True)
    table.add_column("for the backward pass", overflow="fold")
    for tensor in tensors:
        name = tensor.name + (f" x{tensor.count}" if tensor.count > 1 else "")
        table.add_row(*map(Text, (name, format_bytes(tensor.size), _sentence(tensor, priced))))
    price = [Text(f"shadow price of memory: {price_text(plan)}")] if priced else []
    return render([*price, table], width)


def _sentence(tensor: Activation, priced: bool) -> str:
    seconds, worth = format_seconds(tensor.seconds), format_seconds(tensor.worth)
    recompute = f"recomputing it takes {seconds}; " if math.isfinite(tensor.seconds) else ""
    bytes_worth = f", its bytes are worth {worth}" if priced else ""
    if tensor.state == NOT_SAVED:
        return f"{tensor.state}: {tensor.why}"
    if tensor.state == OFFLOADED:
        copies = f"copying it to the host and back takes {format_seconds(tensor.copied)}"
        return f"{tensor.state}: {copies}{bytes_worth}; {recompute}{tensor.why}"
    if tensor.state == SAVED:
        return f"{tensor.state}: {f'worth {worth}; ' if priced else ''}{recompute}{tensor.why}"
    return f"{tensor.state}: takes {seconds}{bytes_worth}; {tensor.why}"
