"""cut_tables: a table that is cut to the length of a sequence says nothing of how the sequence can be split.

Before (the buffer has 64 positions, the batch 48)::

    at = aten.slice.Tensor(positions, 1, 0, 48)
    grad = aten.slice_backward.default(g, [64, 8], 0, 0, 48, 1)     # of a learned table

After::

    at = aten.narrow.default(positions, 1, 0, 48)
    grad = aten.pad.default(g, [0, 0, 0, 16], "constant", 0.0)

A slice is free within the longest pieces of its bounds, here 16, and the sequence would be 3 of these, which no axis
of 4 splits. Slices of fused weights, which rely on their pieces, and of values that come from the batch stay.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import copy_graph, is_operator
from autopar.ir.program import Program

aten = torch.ops.aten

_VIEWS = (aten.reshape.default, aten.permute.default, aten.expand.default, aten._to_copy.default)


def cut_tables(program: Program) -> Program:
    """Cut tables with operators that share no factor with them; computes the same."""
    targets = {n.target for n in program.graph.graph.nodes}
    if not targets & {aten.slice.Tensor, aten.slice_backward.default}:
        return program
    graph = copy_graph(program.graph)
    known, weights = set[fx.Node](), set[fx.Node]()
    placeholders = dict(zip((n for n in graph.graph.nodes if n.op == "placeholder"), program.inputs, strict=True))
    cuts, learned = defaultdict[tuple[fx.Node, int], set[tuple[int, int]]](set), set[tuple[int, ...]]()
    for node in graph.graph.nodes:
        kind = placeholders[node].kind if node in placeholders else None
        sources = node.all_input_nodes
        if kind == "buffer" or node.op == "get_attr" or (is_operator(node) and known.issuperset(sources)):
            known.add(node)
        elif kind == "parameter" or (node.target in _VIEWS and weights.issuperset(sources)):
            weights.add(node)
        if node.target is aten.slice.Tensor:
            cuts[sources[0], node.args[1]].add(node.args[2:4])
    for (source, dim), bounds in cuts.items():
        if source not in known and (source not in weights or len(bounds) > 1):
            continue
        for node in [u for u in source.users if u.target is aten.slice.Tensor and u.args[1] == dim]:
            numbers: Any = node.args[2:]
            start, end, step = numbers
            if step == 1 and _in_pieces(_shape(source)[dim], start, end):
                node.target, node.args = aten.narrow.default, (source, dim, start, end - start)
                if source in weights:
                    learned.add((*_shape(source), dim, start, end))
    for node in graph.graph.nodes:
        if node.target is aten.slice_backward.default:
            _pad_gradient(node, learned)
    graph.graph.lint()
    graph.recompile()
    return replace(program, graph=graph)


def _in_pieces(size: int, start: int, end: int) -> bool:
    """Whether a slice is of several pieces of more than one element."""
    return 1 < math.gcd(size, start, end - start) < end - start


def _pad_gradient(node: fx.Node, learned: set[tuple[int, ...]]) -> None:
    """The gradient of a weight that has been cut, by its numbers: one of a slice like it is the same all the same."""
    args: Any = node.args
    grad, shape, dim, start, end, step = args
    if step == 1 and (*shape, dim, start, end) in learned:
        numbers = [0, 0] * (len(shape) - 1 - dim) + [start, shape[dim] - end]
        node.target, node.args = aten.pad.default, (grad, numbers, "constant", 0.0)


def _shape(node: fx.Node) -> torch.Size:
    found: torch.Size = node.meta["val"].shape
    return found
