"""What a mask looks up in a table: a number of each head for a query and a key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.passes.canonicalize.masks.constants import Constants, value_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Lookup:
    """Rows ``[..., queries, keys]`` of a table ``[rows, heads]``, which is below ``offset`` rows of others.

    Attributes:
        table: where numbers are looked up.
        rows: which of its rows.
        wraps: numbers of rows may be negative, and count from the end then.
        turned: the table is ``[heads, rows]``.
        offset: rows of other tables.
    """

    table: fx.Node
    rows: fx.Node
    wraps: bool
    turned: bool = False
    offset: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and of heads."""
        one, other = value_of(self.table).shape
        return (other, one) if self.turned else (one, other)


def lookup_of(node: fx.Node, known: Constants) -> Lookup | None:
    """What is looked up for queries and keys, of each head; None: a node is something else."""
    args: Any = node.args
    if node.target is aten.index.Tensor:
        table, places = args
        if value_of(table).ndim != 2 or len(places) != 2 or None in places:
            return None
        heads, counted = known.value(places[0]), torch.arange(len(value_of(table)), device="cpu")
        counts = heads is not None and heads.shape[-3:] == (len(counted), 1, 1) and value_of(node).ndim == 4
        same = counts and heads is not None and torch.equal(heads.reshape(-1).long(), counted)
        return Lookup(table, places[1], wraps=True, turned=True) if same else None
    if node.target is not aten.permute.default:
        return None
    source, order = args
    table, rows, wraps = None, None, source.target is aten.index.Tensor
    if source.target is aten.embedding.default:
        table, rows, *rest = source.args
        if any(rest[1:]) or source.kwargs or (rest and rest[0] >= 0):
            return None  # gradients of some rows are other ones
    elif wraps and len(source.args[1]) == 1:
        table, (rows,) = source.args
    if table is None or rows is None or value_of(table).ndim != 2 or value_of(rows).dtype == torch.bool:
        return None
    n = value_of(rows).ndim
    fits = [d % (n + 1) for d in order] == [*range(n - 2), n, n - 2, n - 1]
    return Lookup(table, rows, wraps) if fits else None
