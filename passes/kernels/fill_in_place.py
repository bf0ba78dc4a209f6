"""fill_in_place: padding rows are filled where they are, if nothing else needs the tensor as it was.

Before::

    outside = aten.reshape(aten.expand(aten.ge(aten.arange(16), 15), [4, 16]), [64, 1])
    filled = aten.masked_fill(grad, outside, 0)                                        # grad [64, 50000]

After::

    filled = fill_rows_(grad, 0, 4, 15, 0)                                             # 4 rows

It saves a copy of the tensor, and going through all of it for a few rows. Of a dim that is split, which rows these are
is known on each device only when it runs; the mask stays there, and where memory may not be overwritten
(`autopar.memory.overwritable`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.ir.node_info import graph_info, info, set_graph_info, set_info
from autopar.ir.ops.rows import fill_rows_
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.memory.overwritable import Memory
from autopar.rules.shapes.local_shapes import propagate

aten = torch.ops.aten


class _Rows(NamedTuple):
    """The elements behind the first ``start`` of each of ``blocks`` of a dim."""

    dim: int
    blocks: int
    start: int


def fill_in_place(program: Program, plan: Plan) -> Program:
    """Fill padding rows of tensors that nothing else needs where they are."""
    found = {n: rows for n in program.graph.graph.nodes if (rows := _filled_rows(n)) is not None}
    if program.part.count > 1 or not found or any(info(n).stage is not None for n in found):
        return program
    memory = Memory(program)
    dying = [n for n in found if memory.may_overwrite(n)]
    for node in dying:
        args: Any = node.args
        source, mask, number = args
        node.target, node.args = fill_rows_, (source, *found[node], number)
        # No operator of the plan any more: it costs what its few rows do.
        set_info(node, replace(info(node), operator=None, strategy=(), input_layouts=info(node).input_layouts[:1]))
        _erase_unused(mask)
    if dying:
        propagate(program, plan, everything=True)  # results share their arguments' memory from here on
        set_graph_info(program.graph, replace(graph_info(program.graph), storages_known=True))
        program.graph.recompile()
    return program


def _filled_rows(node: fx.Node) -> _Rows | None:
    """The rows that a node fills, if it does, and they are the same in every run."""
    if node.target is not aten.masked_fill.Scalar:
        return None
    args: Any = node.args
    whole, mask = args[0].meta["val"], args[1]
    sizes = list(mask.meta["val"].shape)
    long = [d for d, n in enumerate(sizes) if n > 1]
    if node.meta["val"].shape != whole.shape or len(long) != 1:
        return None
    (at,) = long
    blocks, at = 1, at + whole.ndim - len(sizes)
    mask = _reshaped(mask)
    if mask.target is aten.expand.default and mask.args[0].meta["val"].ndim == 1:
        blocks, mask = mask.meta["val"].shape[0], mask.args[0]
    if mask.target is not aten.ge.Scalar or mask.args[0].target is not aten.arange.default:
        return None
    (size,), start = mask.args[0].args, mask.args[1]
    return _Rows(at, blocks, start) if blocks * size == whole.shape[at] and 0 <= start <= size else None


def _reshaped(node: fx.Node) -> Any:
    return node.args[0] if node.target is aten.reshape.default else node


def _erase_unused(node: Any) -> None:
    """Erase a node that nothing uses, and what was for it alone."""
    sources = node.all_input_nodes
    if not node.users and node.op == "call_function":
        node.graph.erase_node(node)
        for source in sources:
            _erase_unused(source)
