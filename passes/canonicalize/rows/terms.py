"""cut_terms: a sum that is cut to a length is the sum of its terms, cut to that length.

Before (gradients of a padded sequence that is read by several windows; x and y have 8 rows)::

    a = aten.slice_backward(x, [10], 0, 0, 8, 1); b = aten.slice_backward(y, [10], 0, 2, 10, 1)
    s = aten.add.Tensor(a, b); c = aten.slice(s, 0, 1, 9)

After, which `merge_windows` makes shifts of ``x`` and ``y``::

    c = aten.add.Tensor(aten.slice(a, 0, 1, 9), aten.slice(b, 0, 1, 9))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.ir.graph import copy_graph, insert_call
from autopar.ir.program import Program

aten = torch.ops.aten

_PAD = aten.constant_pad_nd.default


def cut_terms(program: Program) -> Program:
    """Cut terms, not their sums, where the terms have been as long before; computes the same."""
    if not any(n.target in (aten.slice_backward.default, _PAD) for n in program.graph.graph.nodes):
        return program
    graph = copy_graph(program.graph)
    for node in list(graph.graph.nodes):
        along = _cut_dim(node)
        if along is not None and node.args[0].target is aten.add.Tensor:
            terms = _terms(node.args[0], along, _shape(node))
            if terms is not None and len(terms) > 1:
                _cut_each(graph.graph, node, terms)
    return program.with_graph(graph)


def _shape(node: fx.Node) -> list[int]:
    return list(node.meta["val"].shape)


def _cut_dim(node: fx.Node) -> int | None:
    """The one dim of which a node takes rows away; None if it does something else."""
    args: Any = node.args
    if node.target is aten.slice.Tensor:
        return int(args[1]) if args[4] == 1 else None
    if node.target is not _PAD or any(n > 0 for n in args[1]):
        return None
    cut = [d for d, (n, m) in enumerate(zip(_shape(args[0]), _shape(node), strict=True)) if n != m]
    return cut[0] if len(cut) == 1 else None


def _terms(node: fx.Node, dim: int, shape: list[int]) -> list[fx.Node] | None:
    """Terms of a sum that nothing else reads, all of which have been padded with zeros; None if there are others."""
    args: Any = node.args
    if node.target is aten.add.Tensor:
        if len(node.users) > 1 or node.kwargs or not all(isinstance(a, fx.Node) for a in args):
            return None
        found = [_terms(a, dim, shape) if _shape(a) == _shape(node) else None for a in args]
        return None if None in found else [t for terms in found if terms is not None for t in terms]
    along = args[2] if node.target is aten.slice_backward.default and args[5] == 1 else None
    if node.target is _PAD and (len(args) < 3 or args[2] == 0):
        along = dim
    return [node] if along == dim and _shape(args[0]) == shape else None


def _cut_each(graph: fx.Graph, node: fx.Node, terms: list[fx.Node]) -> None:
    with graph.inserting_before(node):
        cut = [insert_call(graph, node, node.target, term, *node.args[1:]) for term in terms]
        made = cut[0]
        for term in cut[1:-1]:
            made = insert_call(graph, node, aten.add.Tensor, made, term)
    node.target, node.args = aten.add.Tensor, (made, cut[-1])
