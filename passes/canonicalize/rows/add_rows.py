"""add_rows: the gradient of rows that are read by indices is what an embedding has for its gradient.

Before::

    y = aten.index.Tensor(table, [ids]); z = aten.zeros([50, 8]); grad = aten.index_put.default(z, [ids], g, True)

After, which adds up over tokens wherever they are, so that tokens may be split along mesh axes and into microbatches::

    at = aten.remainder.Scalar(ids, 50)     # -1 is the last row
    grad = aten.embedding_dense_backward.default(g, at, 50, -1, False)

Several indices are one, of rows of the first dims together. Without a read by the same indices before it, rows that a
table does not have would be an error of `index_put` and none of the embedding's: such calls stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Set
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import copy_graph, insert_call
from autopar.ir.program import Program

aten = torch.ops.aten

_PUT = (aten.index_put.default, aten._unsafe_index_put.default)
_NOTHING = (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)
_FULL = {aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2}


def add_rows(program: Program) -> Program:
    """Add up rows of gradients as embeddings do; computes the same."""
    if not any(n.target in _PUT for n in program.graph.graph.nodes):
        return program
    graph, before = copy_graph(program.graph), set[fx.Node]()
    for node in list(graph.graph.nodes):
        if node.target in _PUT and _adds_rows(node, before):
            _add_as_embedding(graph.graph, node)
        before.add(node)
    return program.with_graph(graph)


def _adds_rows(node: fx.Node, before: Set[fx.Node]) -> bool:
    """Whether a call adds rows to zeros, at indices by which a table of this shape has been read ``before``."""
    args: Any = node.args
    if len(args) < 4 or not args[3] or not _is_zero(args[0]) or not node.meta["val"].is_floating_point():
        return False
    # Numbers of rows of several dims together may not be 32-bit ones.
    whole = (torch.int64, torch.int32) if len(args[1]) == 1 else (torch.int64,)
    if any(not isinstance(i, fx.Node) or i.meta["val"].dtype not in whole for i in args[1]):
        return False
    reads = [n for n in args[1][0].users if n in before and n.target is aten.index.Tensor and n.args[1] == args[1]]
    return any(_shape(n.args[0]) == _shape(node) and _shape(n) == _shape(args[2]) for n in reads)


def _shape(node: Any) -> torch.Size:
    found: torch.Size = node.meta["val"].shape
    return found


def _is_zero(node: fx.Node) -> bool:
    args: Any = node.args
    return node.target in _NOTHING or (node.target in _FULL and args[_FULL[node.target]] == 0)


def _add_as_embedding(graph: fx.Graph, node: fx.Node) -> None:
    args: Any = node.args
    shape, (_, indices, rows) = _shape(node), args[:3]
    first, rest = shape[: len(indices)], shape[len(indices) :]
    with graph.inserting_before(node):
        at = insert_call(graph, node, aten.remainder.Scalar, indices[0], first[0])
        for index, size in zip(indices[1:], first[1:], strict=True):
            within = insert_call(graph, node, aten.remainder.Scalar, index, size)
            at = insert_call(graph, node, aten.mul.Tensor, at, size)
            at = insert_call(graph, node, aten.add.Tensor, at, within)
        count, width = math.prod(first), math.prod(rest)
        if len(rest) != 1:
            rows = insert_call(graph, node, aten.reshape.default, rows, [*_shape(at), width])
        made = insert_call(graph, node, aten.embedding_dense_backward.default, rows, at, count, -1, False)
        if _shape(made) != shape:
            made = insert_call(graph, node, aten.reshape.default, made, list(shape))
    node.replace_all_uses_with(made)
    graph.erase_node(node)
