"""What a mask looks up in a table: a number of each head for a query and a key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.passes.canonicalize.masks.constants import value_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Lookup:
    """Rows ``[..., queries, keys]`` of a table ``[rows, heads]``, which is below ``offset`` rows of others."""

    table: fx.Node
    rows: fx.Node
    offset: int


def lookup_of(node: fx.Node) -> tuple[fx.Node, fx.Node, bool] | None:
    """The table of `look_up`, its rows, and whether these may be negative; None: a node is something else."""
    args: Any = node.args
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
    return (table, rows, wraps) if [d % (n + 1) for d in order] == [*range(n - 2), n, n - 2, n - 1] else None
