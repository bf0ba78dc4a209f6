"""chunk_collectives: a collective and the product that reads or makes its rows go chunk by chunk, side by side.

Before (activations that are split over ``gpu`` along the sequence, at the beginning and the end of a block)::

    a = all_gather(x, 8, "gpu"); rows = wait(a); h = mm(rows, w1); ...
    y = mm(g, w2); r = reduce_scatter(y, "sum", 8, "gpu"); z = wait(r)

After::

    g1 = gather_rows_(new_rows(x), x[0], 0, 8, "gpu"); r1 = wait(g1); g2 = gather_rows_(r1, x[1], n, 8, "gpu")
    h1 = multiply_rows_(new_rows(h), r1[:n], w1, 0); r2 = wait(g2); h = multiply_rows_(h1, r2[n:], w1, n); ...
    s1 = scatter_rows_(new_rows(z), g[:n] @ w2, 0, 8, "gpu"); y2 = g[n:] @ w2; z1 = wait(s1)
    s2 = scatter_rows_(z1, y2, n, 8, "gpu"); z = wait(s2)

Each chunk is communicated while another is multiplied, which nothing else hides in a forward pass. All write into one
tensor: what is gathered, and what is made of it, lies in memory as it did. So chunks are of dims outside of the one
that is split, such as the sequences of a batch; what an all-reduce sums may be cut anywhere. A wait is for whatever is
on its way into its tensor; thus each chunk is waited for before the next is sent, but for all-reduces that overwrite
their terms: these are waited for together.

The cost model decides how many chunks there are, of which sizes, and whether it pays: each message has its latency,
and products of few rows fill a device less. Collectives that kernels hide already stay whole. It follows
`overlap_collectives`, whose order says what does; and only where the plan overlaps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import inherit_origin, is_backward
from autopar.ir.node_info import ChunkedMove, graph_info, info, set_graph_info, set_info
from autopar.ir.ops.collectives import c10d
from autopar.ir.ops.rows import add_rows_, gather_rows_, new_rows, reduce_rows_, scatter_rows_
from autopar.ir.plan import Plan
from autopar.ir.program import Program, is_hoisted
from autopar.rules.shapes.local_shapes import propagate
from autopar.sharding.assignment import machine_of
from autopar.sharding.chunks.cost import chunks_of, collective_of, part_of
from autopar.sharding.chunks.products import of_rows, others
from autopar.sharding.chunks.sites import GATHER, REDUCE, Site, in_the_way, site_at, views_of
from autopar.sharding.graph_order import gradient_moves, parameter_only, reorder
from autopar.sharding.node_seconds import NodeSeconds

aten = torch.ops.aten


def chunk_collectives(program: Program, plan: Plan) -> Program:
    """Cut collectives and the products of their rows into chunks, where that is faster by the cost model."""
    graph = program.graph.graph
    if not plan.overlap or not any(info(n).collective for n in graph.nodes):
        return program
    machine, seconds = machine_of(plan), NodeSeconds(machine_of(plan))
    others = {*parameter_only(program), *gradient_moves(program), *program.per_step}
    order = {n: i for i, n in enumerate(graph.nodes)}
    replaced, sources = set[fx.Node](), set[fx.Node]()
    chosen: list[tuple[Site, tuple[int, ...]]] = []
    saved: list[ChunkedMove] = []
    for node in order:
        if info(node).collective is None or node in others or is_hoisted(node):
            continue
        site = site_at(node, machine, order)
        # One product may read what is gathered and make what is scattered: it is cut for one of them.
        if site is None or site.source in replaced or site.replaced & (replaced | sources) or in_the_way(site, order):
            continue
        gain, chunks = chunks_of(site, seconds)
        if len(chunks) > 1:
            chosen.append((site, chunks))
            replaced |= site.replaced
            sources.add(site.source)
            saved.append(_saved(site, gain, program.runs(node)))
    if chosen:
        for site, chunks in chosen:
            _Emitter(graph, site, chunks, order).emit()
        # Who reads what is whole later now follows it.
        reorder(graph, {n: float(i) for i, n in enumerate(graph.nodes) if n.op not in ("placeholder", "output")})
        propagate(program, plan)
        set_graph_info(program.graph, replace(graph_info(program.graph), chunked=tuple(saved)))
        program.graph.recompile()
    return program


def _saved(site: Site, gain: float, times: int) -> ChunkedMove:
    made = collective_of(site.collective)
    dropped = tuple(c for n in site.moved if n is not site.collective and (c := info(n).collective) is not None)
    value, backward = info(site.collective).moved_value, is_backward(site.collective)
    assert value is not None
    return ChunkedMove(value, made.axis, backward, gain * times, dropped, times)


@dataclass(frozen=True)
class _Emitter:
    """Emits the chunks of one site and removes what they replace.

    Attributes:
        graph: on local tensors.
        site: as it is before.
        chunks: units of each.
        order: positions of nodes, as they were.
    """

    graph: fx.Graph
    site: Site
    chunks: tuple[int, ...]
    order: Mapping[fx.Node, int]

    def emit(self) -> None:
        """The chunks in the place of the site."""
        (self._gather if self.site.kind == GATHER else self._sum)()

    @property
    def _unit(self) -> int:
        """Rows of a unit."""
        return self.site.rows // self.site.units

    def _spans(self) -> Iterator[tuple[int, int]]:
        """First unit of each chunk, and the first behind it."""
        start = 0
        for units in self.chunks:
            yield start, start + units
            start += units

    def _call(self, like: fx.Node, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        inherit_origin(node, like)
        if like in self.site.moved:
            set_info(node, replace(info(node), moved_value=info(like).moved_value))
        return node

    def _send(self, first: int, units: int, target: Any, *args: Any) -> fx.Node:
        """A collective of some units; the first one of all counts for the whole."""
        node = self._call(self.site.collective, target, *args)
        made = part_of(collective_of(self.site.collective), units, self.site.units)
        set_info(node, replace(info(node), collective=replace(made, members=made.members * (first == 0))))
        return node

    def _wait(self, whole: fx.Node) -> fx.Node:
        return self._call(self.site.collective, c10d.wait_tensor.default, whole)

    def _gather(self) -> None:
        """All chunks are issued while the one before is multiplied, but for the first."""
        site, first = self.site, self.site.products[0]
        rows, depth = first.all_input_nodes[0].meta["val"].shape
        axis = collective_of(site.collective).axis
        with self.graph.inserting_before(site.collective):
            own = self._call(site.collective, aten.contiguous.default, site.source)
            own = self._call(
                site.collective, aten.reshape.default, own, [site.units, rows // site.units // site.parts, depth]
            )
            gathered = self._call(site.collective, new_rows, own, rows, depth)

        def send(gathered: fx.Node, start: int, stop: int) -> fx.Node:
            for unit in range(start, stop):
                part = self._call(site.collective, aten.select.int, own, 0, unit)
                gathered = self._send(unit, 1, gather_rows_, gathered, part, unit * self._unit, site.parts, axis)
            return gathered

        spans = list(self._spans())
        with self.graph.inserting_before(site.collective):
            gathered = send(gathered, *spans[0])
        for operand in (operand for old in site.products for operand in others(old)):
            for view in list(views_of(operand))[-2::-1]:
                if self.order.get(view, -1) > self.order[first]:
                    first.prepend(view)
        with self.graph.inserting_before(first):
            results = [self._room(p, p, rows) for p in site.products]
            for i, (start, stop) in enumerate(spans):
                here = gathered = self._wait(gathered)
                if i + 1 < len(spans):
                    gathered = send(gathered, *spans[i + 1])
                at, count = start * self._unit, (stop - start) * self._unit
                part = self._call(first, aten.narrow.default, here, 0, at, count)
                results = [
                    self._multiply(p, r, part, at, count, at) for p, r in zip(site.products, results, strict=True)
                ]
            self._stand_in(site.value, gathered)
        for old, new in zip(site.products, results, strict=True):
            self._replace(old, new)
        self._erase()

    def _sum(self) -> None:
        """The sum of each chunk is issued when it is multiplied, but not before that of the one before is over."""
        site, old = self.site, self.site.products[0]
        rows = old.meta["val"].shape[0]
        axis, scatters = collective_of(site.collective).axis, site.kind != REDUCE
        # Who else reads the terms of the sum gets them whole; else all-reduces overwrite them.
        kept = len(site.source.users) > 1
        terms: fx.Node | None = None
        with self.graph.inserting_before(site.collective):
            summed = self._room(site.collective, old, rows // (site.parts if scatters else 1))
            if kept:
                terms = self._room(old, old, rows)
            for start, stop in self._spans():
                at, count = start * self._unit, (stop - start) * self._unit
                if not kept and not scatters:
                    summed = self._terms(summed, at, at, count)
                    part = self._call(site.collective, aten.narrow.default, summed, 0, at, count)
                    summed = self._send(start, stop - start, reduce_rows_, summed, part, at, axis)
                    continue
                if terms is None:
                    part = self._terms(self._room(old, old, count), 0, at, count)
                else:
                    terms = self._terms(terms, at, at, count)
                    part = self._call(old, aten.narrow.default, terms, 0, at, count)
                summed = self._wait(summed) if start else summed
                if not scatters:
                    summed = self._send(start, stop - start, reduce_rows_, summed, part, at, axis)
                for unit in range(start, stop) if scatters else ():
                    own = self._call(
                        site.collective, aten.narrow.default, part, 0, (unit - start) * self._unit, self._unit
                    )
                    first = unit * self._unit // site.parts
                    summed = self._send(unit, 1, scatter_rows_, summed, own, first, site.parts, axis)
            if terms is not None:
                self._stand_in(site.source, terms)
        with self.graph.inserting_before(site.wait):
            self._stand_in(site.value, self._wait(summed))
        self._erase()

    def _terms(self, into: fx.Node, place: int, at: int, count: int) -> fx.Node:
        """Write the terms of some rows, from ``at`` on, into rows from ``place`` on."""
        old = self.site.products[0]
        part = self._call(old, aten.narrow.default, old.args[0], 0, at, count)
        terms = self._multiply(old, into, part, at, count, place)
        if self.site.added is None:
            return terms
        total, term = self.site.added
        # Another site's chunks may have replaced it by now.
        (other,) = (n for n in total.all_input_nodes if n is not term)
        flat = self._call(total, aten.reshape.default, other, list(old.meta["val"].shape))
        own = self._call(total, aten.narrow.default, flat, 0, at, count)
        return self._call(total, add_rows_, terms, own, place)

    def _room(self, like: fx.Node, product: fx.Node, rows: int) -> fx.Node:
        """Memory for rows of a product."""
        matrix, value = others(product)[0], product.meta["val"]
        dtype = () if matrix.meta["val"].dtype == value.dtype else (value.dtype,)
        return self._call(like, new_rows, matrix, rows, value.shape[1], *dtype)

    def _multiply(self, product: fx.Node, into: fx.Node, rows: fx.Node, at: int, count: int, place: int) -> fx.Node:
        """Write a product's rows from ``at`` on, the first operand's being there, into rows from ``place`` on."""
        target, given = of_rows(
            product, rows, lambda operand: self._call(product, aten.narrow.default, operand, 0, at, count)
        )
        return self._call(product, target, into, *given, place)

    def _stand_in(self, old: fx.Node, rows: fx.Node) -> None:
        """Let rows, in the shape of a value, stand for it."""
        self._replace(old, self._call(old, aten.reshape.default, rows, list(old.meta["val"].shape)))

    def _replace(self, old: fx.Node, new: fx.Node) -> None:
        """Let a node stand for another, with what is known of that one's value."""
        known = replace(info(old), operator=None, strategy=(), input_layouts=(), collective=None)
        set_info(new, known)
        new.meta["val"] = old.meta["val"]  # later sites read it
        old.replace_all_uses_with(new)

    def _erase(self) -> None:
        """Remove what nothing reads any more: the move, the products, and what is between them."""
        pending, gone = [self.site.source, *self.site.products, self.site.value], set[fx.Node]()
        while pending:
            node = pending.pop()
            if node in gone or node.users or node.op != "call_function":
                continue
            pending += node.all_input_nodes
            gone.add(node)
            self.graph.erase_node(node)
