"""Numbers that are looked up by a function of the distance of two positions: the function is computed once a distance.

Before (T5: ``bucket`` is a dozen operators)::

    bias = aten.embedding(table, bucket(of - at))                                # [queries, keys, heads]
    of_table = aten.embedding_dense_backward(g, bucket(of - at), rows, -1, False)

After (``distances`` are all that there are, from ``low`` on)::

    by_distance = aten.embedding(table, bucket(distances))                       # [queries + keys - 1, heads]
    bias = aten.embedding(by_distance, of - at - low)
    of_distances = aten.embedding_dense_backward(g, of - at - low, queries + keys - 1, -1, False)
    of_table = aten.embedding_dense_backward(of_distances, bucket(distances), rows, -1, False)
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar._torch_compat import FakeTensor, OpOverload
from autopar.ir.graph import inherit_origin, insert_call, map_nodes
from autopar.ir.node_info import info, set_info
from autopar.passes.canonicalize.masks.constants import NUMBERS, Constants, value_of

aten = torch.ops.aten


@dataclass(frozen=True)
class _Function:
    """What is computed of distances: the difference, the operators behind it in order, and the least distance."""

    difference: fx.Node
    nodes: tuple[fx.Node, ...]
    low: int
    count: int


def look_up_by_distance(graph: fx.Graph, known: Constants) -> None:
    """Rewrite lookups, and their gradients; computes the same."""
    lookups: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is aten.embedding.default:
            lookups.setdefault(node.args[1], []).append(node)
    order = {n: i for i, n in enumerate(graph.nodes)}
    for rows, found in lookups.items():
        gradients = [n for n in rows.users if n.target is aten.embedding_dense_backward.default and n.args[1] is rows]
        function = _function(rows, known, order) if all(map(_is_plain, (*found, *gradients))) else None
        # Of few positions there are as many distances.
        if function is not None and value_of(rows).numel() > function.count:
            _rewrite(graph, rows, function, found, gradients)


def _is_plain(node: fx.Node) -> bool:
    """Whether all rows of a table have gradients, and these are sums."""
    args: Any = node.args
    padding, others = (args[3], args[4:]) if node.target is not aten.embedding.default else (
        args[2] if len(args) > 2 else -1, args[3:])  # fmt: skip
    return padding < 0 and not any(others) and not node.kwargs


def _function(rows: fx.Node, known: Constants, order: dict[fx.Node, int]) -> _Function | None:
    """Rows of a table as a function of one difference of positions; None: they are something else."""
    pending, found, differences = [rows], set[fx.Node](), set[fx.Node]()
    while pending:
        node = pending.pop()
        if node in found or node in differences or node.target in NUMBERS:
            continue
        if node.target is aten.sub.Tensor and not node.kwargs and _range(node, known) is not None:
            differences.add(node)
            continue
        if not _is_elementwise(node):
            return None
        found.add(node)
        pending += node.all_input_nodes
    if len(differences) != 1 or not found:
        return None
    (difference,) = differences
    ends = _range(difference, known)
    assert ends is not None
    nodes = tuple(sorted(found, key=order.__getitem__))
    if any(value_of(n).shape != value_of(difference).shape for n in nodes):
        return None
    return _Function(difference, nodes, ends[0], ends[1] - ends[0] + 1)


def _is_elementwise(node: fx.Node) -> bool:
    """Whether each element is a function of the same element of the arguments, and of nothing else."""
    target: Any = node.target
    if not isinstance(target, OpOverload) or target._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in target.tags:
        return False
    copies = target is aten._to_copy.default and set(node.kwargs) <= {"dtype", "layout", "device", "pin_memory"}
    return copies or (torch.Tag.pointwise in target.tags and not node.kwargs)


def _range(node: fx.Node, known: Constants) -> tuple[int, int] | None:
    """The least and the largest of differences of positions, one of which is along each of the last two dims."""
    if value_of(node).ndim < 2 or not all(isinstance(a, fx.Node) for a in node.args):
        return None
    values = [known.value(a) for a in node.args]  # type: ignore[arg-type]
    if any(v is None or v.dtype.is_floating_point or v.dtype == torch.bool or not v.numel() for v in values):
        return None
    one, other = (v for v in values if v is not None)
    if max(one.numel(), other.numel()) >= value_of(node).numel():
        return None  # they would have to be computed to be looked at
    return int(one.min()) - int(other.max()), int(one.max()) - int(other.min())


def _rewrite(
    graph: fx.Graph, rows: fx.Node, function: _Function, lookups: list[fx.Node], gradients: list[fx.Node]
) -> None:
    count, low = function.count, function.low
    made: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(rows.next):
        like = value_of(function.difference)
        made[function.difference] = _made(
            graph, rows, aten.arange.start_step, (low, low + count, 1), {"dtype": like.dtype, "device": like.device}
        )
        for node in function.nodes:
            for source in node.all_input_nodes:
                if source not in made:
                    made[source] = _number(graph, rows, source)
            args, kwargs = map_nodes((node.args, dict(node.kwargs)), made.__getitem__)
            made[node] = _made(graph, rows, node.target, args, kwargs)
        of_distances = made[rows]
        place = insert_call(graph, rows, aten.sub.Tensor, function.difference, low)
    for node in lookups:
        with graph.inserting_before(node):
            table = insert_call(graph, node, aten.embedding.default, node.args[0], of_distances)
        node.args = (table, place)
    for node in gradients:
        grad, _, size, *rest = node.args
        with graph.inserting_before(node):
            each = insert_call(graph, node, aten.embedding_dense_backward.default, grad, place, count, *rest)
        node.args = (each, of_distances, size, *rest)


def _number(graph: fx.Graph, rows: fx.Node, node: fx.Node) -> fx.Node:
    """What makes one number, as a tensor of one element."""
    filled = NUMBERS[node.target]
    number = node.args[-1] if filled is None else filled
    like = value_of(node)
    return _made(graph, rows, aten.full.default, ([1], number), {"dtype": like.dtype, "device": like.device})


def _made(graph: fx.Graph, origin: fx.Node, target: Any, args: Any, kwargs: Any) -> fx.Node:
    node = graph.call_function(target, tuple(args), kwargs)
    inherit_origin(node, origin)
    set_info(node, replace(info(node), internal=False))
    args, kwargs = map_nodes((node.args, dict(node.kwargs)), value_of)
    shown = value_of(origin)
    with shown.fake_mode if isinstance(shown, FakeTensor) else nullcontext(), torch.no_grad():
        node.meta["val"] = target(*args, **kwargs)
    return node
