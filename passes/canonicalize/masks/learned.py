"""Gradients of tables that masks look up: attention's own, in the place of those of biases.

Before (the biases of two layers are one)::

    *_, g = autopar.attention_backward(d, q, k, v, bias, ..., True)              # [1, heads, queries, keys]
    of_table = aten.embedding_dense_backward(aten.permute(aten.squeeze(g + other, 0), [1, 2, 0]), rows, ...)

After::

    *_, g = autopar.attention_masked_backward(d, q, k, v, leaves, ..., table, None, "infinity", True)
    of_table = g + other                                                         # [rows, heads]

Whatever autograd computes between is linear in the gradients of biases. So the sum behind a lookup is that of what each
attention has a part in, if nothing else comes in between, and nothing else goes out.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import insert_call
from autopar.passes.canonicalize.masks.constants import SAME, VIEWS, Constants, value_of
from autopar.passes.canonicalize.masks.lookups import Lookup

aten = torch.ops.aten

_UNARY = (
    *SAME, *VIEWS, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.permute.default, aten.neg.default,
    aten.transpose.int, aten.t.default, aten.sum.dim_IntList,
)  # fmt: skip
_ZEROS = (aten.new_zeros.default, aten.zeros_like.default, aten.zeros.default)
_PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)


@dataclass(frozen=True)
class Sums:
    """Gradients of biases that are added up, and the gradients of tables behind: these, and the rows of each."""

    biases: frozenset[fx.Node]
    ends: tuple[tuple[fx.Node, fx.Node], ...]


def sums_of(graph: fx.Graph, biases: Iterable[fx.Node], known: Constants) -> list[Sums]:
    """What is made of gradients of biases, where that is nothing but gradients of tables."""
    group: dict[fx.Node, set[fx.Node]] = {g: {g} for g in biases}
    ends: dict[fx.Node, fx.Node] = {}
    refused: list[set[fx.Node]] = []
    for node in graph.nodes:
        inputs = [n for n in node.all_input_nodes if n in group]
        if not inputs or node in group or node.target in _ZEROS:
            continue
        rows = _rows(node, inputs)
        joined = set().union(*(group[n] for n in inputs))
        if rows is not None:
            ends[node] = rows
        elif not _is_linear(node, inputs, known):
            refused.append(joined)
            continue
        # All that lead here are one sum, what was made of them before too.
        group[node] = joined
        for other in [n for n, members in group.items() if members & joined]:
            joined |= group[other]
        for other in [n for n, members in group.items() if members & joined]:
            group[other] = joined
        if rows is not None:
            del group[node]
    found = {frozenset(members) for members in group.values()}
    of = {end: next(iter(n for n in end.all_input_nodes if n in group)) for end in ends}
    return [
        Sums(members, tuple((end, rows) for end, rows in ends.items() if group[of[end]] == members))
        for members in found
        if not any(members & other for other in refused)
    ]


def _rows(node: fx.Node, inputs: Sequence[fx.Node]) -> fx.Node | None:
    """The rows of a table whose gradient a node is; None: it is something else."""
    args: Any = node.args
    if node.target is aten.embedding_dense_backward.default and args[0] in inputs:
        found: fx.Node = args[1]
        return found if args[3] < 0 and not args[4] else None
    if node.target is aten.index_put.default and args[2] in inputs and args[0] not in inputs:
        plain = len(args) > 3 and args[3] and len(args[1]) in (1, 2) and None not in args[1]
        rows: fx.Node = args[1][-1]
        return rows if plain and args[0].target in _ZEROS else None
    return None


def _is_linear(node: fx.Node, inputs: Sequence[fx.Node], known: Constants) -> bool:
    """Whether a node is linear in gradients, all of its arguments that are any."""
    args: Any = node.args
    if node.target in _UNARY:
        return True
    if node.target is aten.add.Tensor:
        return not node.kwargs and all(isinstance(a, fx.Node) and a in inputs for a in args)
    if node.target in _PRODUCTS:
        return (args[0] in inputs and args[1] not in inputs) or (
            args[1] in inputs and node.target is aten.mul.Tensor and args[0] not in inputs
        )
    if node.target is aten.masked_fill.Scalar:
        return args[0] in inputs and args[1] not in inputs and args[2] == 0
    if node.target is aten.where.self:
        return args[0] not in inputs and all(a in inputs or known.number(a) == 0 for a in args[1:])
    return False


def end_of(lookups: Sequence[Lookup], end: fx.Node, rows: fx.Node) -> Lookup | None:
    """Which lookup has this gradient; None: none, or nobody can tell."""
    found = [x for x in lookups if x.rows is rows and value_of(x.table).shape == value_of(end).shape]
    return found[0] if len({x.table for x in found}) == 1 else None


def give_gradients(graph: fx.Graph, sums: Sums, lookups: Mapping[fx.Node, Sequence[Lookup]]) -> None:
    """Put attention's own gradients of tables in the place of those behind the gradients of biases.

    Args:
        graph: in which attention's backward has become that under a mask's function.
        sums: what is replaced.
        lookups: of each gradient of a bias, those of its attention.
    """
    for end, rows in sums.ends:
        total: fx.Node | None = None
        with graph.inserting_before(end):
            for g in graph.nodes:
                lookup = end_of(lookups[g], end, rows) if g in sums.biases else None
                if lookup is None:
                    continue
                size, term = lookup.shape[0], g
                if value_of(g).shape[0] != size:
                    term = insert_call(graph, end, aten.slice.Tensor, g, 0, lookup.offset, lookup.offset + size)
                if lookup.turned:
                    term = insert_call(graph, end, aten.permute.default, term, [1, 0])
                total = term if total is None else insert_call(graph, end, aten.add.Tensor, total, term)
        assert total is not None
        end.replace_all_uses_with(total)


def gradient_of_bias(node: fx.Node) -> fx.Node | None:
    """What attention's backward gives of its bias."""
    return next((u for u in node.users if u.target is operator.getitem and u.args[1] == 3), None)
