"""lengthen_rows: what is computed of most rows of a dim, and put back into one of its length, is computed of all.

Before::

    now = aten.slice(x, 1, 1, 16); last = aten.slice(x, 1, 0, 15)                       # x [2, 16, 8]
    y = aten.slice_scatter(x, aten.sub(now, last), 1, 1, 16)                            # y[:, 1:] -= x[:, :-1]

After::

    moved = aten.constant_pad_nd(x, [0, 0, 1, -1], 0)
    y = aten.where(aten.arange(16) >= 1, aten.sub(x, moved), x)

So are padding, joining with rows before and behind, gradients of slices, and sums. A dim of 15 rows is another factor
than that of 16, which no split of the sequence reaches; a shift is a few rows of a neighbor. Rows that are computed in
vain may be anything: none is read.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar._torch_compat import FakeTensor
from autopar.ir.graph import computed, copy_graph, inherit_origin, insert_call, is_operator, map_nodes
from autopar.ir.ops.sequence.halo import pads
from autopar.ir.program import Program

aten = torch.ops.aten


def lengthen_rows(program: Program) -> Program:
    """Compute rows that a slice leaves out, where these are few and come back; computes the same."""
    if not any(n.target is aten.slice.Tensor for n in program.graph.graph.nodes):
        return program
    graph = copy_graph(program.graph)
    found = [made for node in graph.graph.nodes if (made := _sink(node)) is not None]
    long = _Long(graph.graph)
    for sink in _closed(found):
        _replace(graph.graph, sink, long)
    return program.with_graph(graph)


@dataclass(frozen=True)
class _Sink:
    """An operator that puts short parts into a dim, or adds them up.

    Attributes:
        node: the operator.
        dim: along which.
        size: of the dim.
        parts: short tensors, and where the first row of each is put.
        starts: of what these are computed of, which row of all is the first one; None: all rows are alike.
    """

    node: fx.Node
    dim: int
    size: int
    parts: tuple[tuple[fx.Node, int], ...]
    starts: dict[fx.Node, int | None] = field(default_factory=dict)

    def follows(self) -> bool:
        """Whether all that the parts are computed of can be computed of all rows; notes where it begins."""
        if any(_value(n).is_complex() for n, _ in self.parts):
            return False
        largest = max(self.rows(n) for n, _ in self.parts)
        few = len(self.parts) == 1 and 2 * largest <= self.size and self.node.target is not aten.sum.dim_IntList
        if largest == self.size or not (few or 2 * largest > self.size):
            return False
        if not all(self._follow(n) and self.reaches(n, start) for n, start in self.parts):
            return False
        # Of a few rows one operator is computed of all at most: a loop over rows would compute all for each.
        if few and (8 * largest > self.size or sum(_begins(n, self.dim) is None for n in self.starts) > 1):
            return False
        return self.node.target is aten.slice_scatter.default or any(
            _begins(n, self.dim) is not None for n in self.starts
        )

    def rows(self, node: fx.Node) -> int:
        """How many rows a part has."""
        return _value(node).shape[self.dim]

    def reaches(self, node: fx.Node, start: int | None) -> bool:
        """Whether rows can be moved so far: `constant_pad_nd` has no shift of more than half of a dim."""
        own = self.starts.get(node)
        return own is None or start is None or 2 * abs(start - own) <= self.size

    def _follow(self, node: fx.Node) -> bool:
        if node in self.starts:
            return True
        begins = _begins(node, self.dim)
        if begins is not None:
            if _value(node.args[0]).shape[self.dim] == self.size:
                self.starts[node] = begins
                return True
        elif node.target is aten.full.default or (
            node.target is aten.expand.default and _has_one(node.args[0], _value(node).ndim, self.dim)
        ):
            self.starts[node] = None
            return True
        elif _is_pointwise(node) and self._follow_arguments(node):
            return True
        return self.rows(node) == 1  # which stands for all rows as it is

    def _follow_arguments(self, node: fx.Node) -> bool:
        ndim = _value(node).ndim
        short = [n for n in node.all_input_nodes if not _has_one(n, ndim, self.dim) or self.rows(node) == 1]
        if not all(_value(n).ndim == ndim and self._follow(n) for n in short):
            return False
        begins = [b for n in short if (b := self.starts.get(n)) is not None]
        first = begins[0] if begins else None
        if not all(self.reaches(n, first) for n in short):
            return False
        if any(n in self.starts for n in short):
            self.starts[node] = first
        return True


def _value(node: Any) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value


def _begins(node: fx.Node, dim: int) -> int | None:
    """Of a slice along a dim, or of a padding that takes rows away, which row is its first; None: it is another."""
    args: Any = node.args
    if node.target is aten.slice.Tensor and args[1] == dim and args[4] == 1:
        return int(args[2])
    if node.target is not aten.constant_pad_nd.default:
        return None
    at = 2 * (_value(node).ndim - 1 - dim)
    own, others = args[1][at : at + 2], args[1][:at] + args[1][at + 2 :]
    return -own[0] if own and not any(others) and max(own) <= 0 else None


def _has_one(node: Any, ndim: int, dim: int) -> bool:
    """Whether what is broadcast to ``ndim`` dims has one row along one of them, or none."""
    value = _value(node)
    at = dim - (ndim - value.ndim)
    return at < 0 or value.shape[at] == 1


def _is_pointwise(node: fx.Node) -> bool:
    """Whether each element is computed of those in its place."""
    if not is_operator(node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    target: Any = node.target
    if target is aten._to_copy.default:
        return set(node.kwargs) <= {"dtype"}
    drawn = torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable
    return torch.Tag.pointwise in target.tags and not drawn and not node.kwargs


def _sink(node: fx.Node) -> _Sink | None:
    """What an operator puts together, if all of it can be computed of all rows."""
    args: Any = node.args
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    found = None
    if node.target is aten.slice_scatter.default and args[5] == 1:
        found = _Sink(node, args[2], _value(node).shape[args[2]], ((args[1], args[3]),))
    if node.target is aten.slice_backward.default and args[5] == 1:
        found = _Sink(node, args[2], args[1][args[2]], ((args[0], args[3]),))
    if node.target is aten.constant_pad_nd.default:
        last = _value(node).ndim - 1
        pairs = {last - i: (args[1][2 * i], args[1][2 * i + 1]) for i in range(len(args[1]) // 2)}
        padded = {d: ends for d, ends in pairs.items() if any(ends)}
        if len(padded) == 1 and min(map(min, padded.values())) >= 0:
            ((dim, (low, _)),) = padded.items()
            found = _Sink(node, dim, _value(node).shape[dim], ((args[0], low),))
    if node.target is aten.cat.default:
        dim, start, parts = args[1] if len(args) > 1 else 0, 0, []
        for part in args[0]:
            parts.append((part, start))
            start += _value(part).shape[dim]
        found = _Sink(node, dim, start, tuple(parts))
    if node.target is aten.sum.dim_IntList and args[0].target is not aten.slice.Tensor:
        found = _added(node)
    if found is None or any(_value(n).dtype != _value(node).dtype for n, _ in found.parts):
        return None
    return found if found.follows() else None


def _added(node: fx.Node) -> _Sink | None:
    """A sum, whose result does not tell how many rows there were before a slice."""
    source: Any = node.args[0]
    dims: Any = node.args[1]
    for dim in dims:
        pending, seen = [source], set[fx.Node]()
        while pending:
            n = pending.pop()
            if n in seen or _value(n).ndim != _value(source).ndim:
                continue
            seen.add(n)
            if (begins := _begins(n, dim)) is not None:
                return _Sink(node, dim, _value(n.args[0]).shape[dim], ((source, begins),))
            pending += n.all_input_nodes if _is_pointwise(n) else []
    return None


def _closed(sinks: list[_Sink]) -> list[_Sink]:
    """Those all of whose parts nothing else reads, which would compute them twice."""
    while True:
        nodes = {s.node for s in sinks}
        within = {n for s in sinks for n in s.starts}
        read = {n for n in within if _is_pointwise(n) and any(u not in within | nodes for u in n.users)}
        left = [s for s in sinks if not read & set(s.starts)]
        if len(left) == len(sinks):
            return left
        sinks = left


class _Long:
    """Makes, once each, what short tensors are parts of."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._made: dict[tuple[fx.Node, int, int], fx.Node] = {}

    def put(self, sink: _Sink, part: fx.Node, start: int) -> fx.Node:
        """All rows, a part's where the operator puts them."""
        return self._moved(sink, part, start, sink.node)

    def inside(self, sink: _Sink, part: fx.Node, start: int) -> fx.Node:
        """Which rows are a part's, as many dims as the result of the operator has."""
        like, node = _value(part), sink.node
        end = start + sink.rows(part)
        count = self._graph.call_function(aten.arange.default, (sink.size,), {"device": like.device})
        inherit_origin(count, node)
        with like.fake_mode if isinstance(like, FakeTensor) else nullcontext():
            count.meta["val"] = torch.arange(sink.size, device=like.device)
        bounds = [(aten.ge.Scalar, start)] * (start > 0) + [(aten.lt.Scalar, end)] * (end < sink.size)
        found = [insert_call(self._graph, node, target, count, bound) for target, bound in bounds]
        both = found[0] if len(found) == 1 else insert_call(self._graph, node, aten.logical_and.default, *found)
        behind = like.ndim - 1 - sink.dim
        return (
            insert_call(self._graph, node, aten.reshape.default, both, [sink.size] + [1] * behind) if behind else both
        )

    def _moved(self, sink: _Sink, node: fx.Node, start: int | None, before: fx.Node) -> fx.Node:
        long, own = self._of(sink, node), sink.starts.get(node)
        if own is None or start is None or own == start:
            return long
        with self._graph.inserting_before(before):
            numbers = pads(_value(long).ndim, sink.dim, start - own, own - start)
            return insert_call(self._graph, before, aten.constant_pad_nd.default, long, numbers, 0)

    def _of(self, sink: _Sink, node: fx.Node) -> fx.Node:
        key = (node, sink.dim, sink.size)
        if node not in sink.starts:
            return node
        if key not in self._made:
            self._made[key] = self._make(sink, node)
        return self._made[key]

    def _make(self, sink: _Sink, node: fx.Node) -> fx.Node:
        if _begins(node, sink.dim) is not None:
            return node.args[0]  # type: ignore[return-value]
        shape = list(_value(node).shape)
        shape[sink.dim] = sink.size
        args: Any = node.args
        if node.target is aten.full.default:
            args = (shape, *args[1:])
        elif node.target is aten.expand.default:
            args = (args[0], shape)
        else:
            start = sink.starts[node]
            args = map_nodes(args, lambda n: self._moved(sink, n, start, node))
        with self._graph.inserting_before(node):
            made = self._graph.call_function(node.target, args, node.kwargs)  # type: ignore[arg-type]
        made.meta = dict(node.meta)
        inherit_origin(made, node)
        plain = made.all_input_nodes and not made.kwargs
        made.meta["val"] = computed(made) if plain else _value(node).new_empty(shape)
        return made


def _replace(graph: fx.Graph, sink: _Sink, long: _Long) -> None:
    """Write one operator of all rows."""
    node, args = sink.node, list[Any](sink.node.args)
    made = [long.put(sink, part, start) for part, start in sink.parts]
    with graph.inserting_before(node):
        inside = [long.inside(sink, part, start) for part, start in sink.parts]
        if node.target is aten.slice_scatter.default:
            new: tuple[Any, ...] = (aten.where.self, inside[0], made[0], args[0])
        elif node.target is aten.cat.default:
            found = made[-1]
            for within, part in zip(inside[-2:0:-1], made[-2:0:-1], strict=True):
                found = insert_call(graph, node, aten.where.self, within, part, found)
            new = (aten.where.self, inside[0], made[0], found)
        else:
            outside = insert_call(graph, node, aten.logical_not.default, inside[0])
            padded = node.target is aten.constant_pad_nd.default and len(args) > 2
            fill = args[2] if padded and _value(node).is_floating_point() else int(args[2]) if padded else 0
            new = (aten.masked_fill.Scalar, made[0], outside, fill)
        if node.target is aten.sum.dim_IntList:
            node.args = (insert_call(graph, node, *new), *args[1:])
            return
    node.target, node.args, node.kwargs = new[0], new[1:], {}
