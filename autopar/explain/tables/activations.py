"""What is kept for the backward pass, and where, and what is made again, as a table: costs, and what decides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from autopar.costs.memory import format_bytes
from autopar.ir.plan import Plan
from autopar.ir.plan_table import format_seconds, price_text, render


class Tensor(Protocol):
    """What is read of an `autopar.explain.activations.Tensor`."""

    @property
    def name(self) -> str:
        """Of module and operator."""

    @property
    def node(self) -> str:
        """Of the first one in the graph."""

    @property
    def state(self) -> str:
        """Kept, made again, ..."""

    @property
    def count(self) -> int:
        """How many are alike."""

    @property
    def size(self) -> float:
        """Bytes on a device."""

    @property
    def seconds(self) -> float:
        """To make one again."""

    @property
    def copied(self) -> float:
        """To send it to the host and back."""

    @property
    def worth(self) -> float:
        """Of its bytes, in seconds."""

    @property
    def why(self) -> str:
        """What decides."""


def activations_dict(name: str, plan: Plan, tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Plain data: the price of memory in seconds a byte, and every tensor of what the name speaks of."""
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


def activations_table(plan: Plan, tensors: Sequence[Tensor], width: int = 100) -> str:
    """The same as text; without a price of memory, without what bytes are worth."""
    priced = plan.certificate.memory_price > 0
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("in the forward pass", overflow="fold", max_width=width // 2)
    table.add_column("a device", justify="right", no_wrap=True)
    table.add_column("for the backward pass", overflow="fold")
    for tensor in tensors:
        name = tensor.name + (f" x{tensor.count}" if tensor.count > 1 else "")
        table.add_row(*map(Text, (name, format_bytes(tensor.size), _sentence(tensor, priced))))
    price = [Text(f"price of memory: {price_text(plan)}")] if priced else []
    return render([*price, table], width)


def _sentence(tensor: Tensor, priced: bool) -> str:
    takes, worth = format_seconds(tensor.seconds), format_seconds(tensor.worth)
    again = f"making it again takes {takes}; " if math.isfinite(tensor.seconds) else ""
    sending = f"sending it there and back takes {format_seconds(tensor.copied)}"
    if tensor.state == "passing":
        return f"passing: {tensor.why}"
    if tensor.state == "on the host":
        return f"on the host: {sending}{f', its bytes are worth {worth}' if priced else ''}; {again}{tensor.why}"
    if tensor.state == "kept":
        return f"kept: {f'worth {worth}; ' if priced else ''}{again}{tensor.why}"
    return f"{tensor.state}: takes {takes}{f', its bytes are worth {worth}' if priced else ''}; {tensor.why}"
