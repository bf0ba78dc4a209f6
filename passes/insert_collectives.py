"""insert_collectives: between the layout that a value has and the one that a user needs, the moves of the plan.

Before::

    mm = aten.mm(x, w)                 # [batch, hidden{model}], [hidden{model}, ffn] -> [batch, ffn] +sum{model}
    relu = aten.relu(mm)               # needs [batch, ffn]

After::

    mm = aten.mm(x, w)
    all_reduce = _c10d_functional.all_reduce(mm, "sum", "model")
    wait = _c10d_functional.wait_tensor(all_reduce)
    relu = aten.relu(wait)

Each move of a value is emitted once, in front of the first user that needs it, or as soon as the value is there if it
leaves the graph: gradients that wait to be scattered would be held whole. ``"model"`` is the mesh axis; a rank puts in
its own group.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.assignment import machine_of
from autopar.collective import Collective, axis_index, c10d
from autopar.layout import Layout, Split, TensorType, local_dims, local_shape
from autopar.origin import inherit_origin
from autopar.plan import Plan
from autopar.program import Program, is_operator, is_steady, producer, replace_tensor_arguments, tensor_arguments
from autopar.redistribute import Machine, Move, Tables, moved_bytes, reduces, sum_dtype

aten = torch.ops.aten


def insert_collectives(program: Program, plan: Plan) -> Program:
    """Redistribute every argument into the layout that its user takes."""
    graph = program.graph.graph
    tables = Tables(machine_of(plan))
    placed: dict[tuple[fx.Node, Layout], fx.Node] = {}
    shared = True
    for node in list(graph.nodes):
        if shared and node.op != "placeholder" and not is_steady(node):  # what all microbatches take has been made
            shared = False
            for value, layout in _steady_relays(graph):
                _bring(graph, node, value, layout, tables, placed, False, steady=True)
        if is_operator(node):
            wanted = node.meta["input_layouts"]
            values = [
                _bring(graph, node, a, layout, tables, placed, False)
                for a, layout in zip(tensor_arguments(node), wanted, strict=True)
            ]
            node.args, node.kwargs = replace_tensor_arguments(node, values)
    output = program.output_node
    finals = [
        None if value is None else _bring(graph, output, value, layout, tables, placed, spec.kind == "gradient")
        for spec, value, layout in zip(
            program.outputs, program.output_values, output.meta["input_layouts"], strict=True
        )
    ]
    output.args = (finals,)
    program.graph.meta["invariants"] = ("layouts", "placed")
    return program


def _steady_relays(graph: fx.Graph) -> list[tuple[fx.Node, Layout]]:
    """Values that are moved once for all microbatches, and where to."""
    found = []
    for value in graph.nodes:
        source, index = producer(value)
        if index in source.meta.get("steady_relays", ()) and "val" in value.meta:
            several = isinstance(value.meta["val"], tuple | list)  # whose outputs speak for themselves
            found += [] if several else [(value, source.meta["relays"][index])]
    return found


def _bring(
    graph: fx.Graph,
    user: fx.Node,
    value: fx.Node,
    target: Layout,
    tables: Tables,
    placed: dict[tuple[fx.Node, Layout], fx.Node],
    gradient: bool,
    steady: bool = False,
) -> fx.Node:
    """The value in layout ``target``, by the moves that are not there yet."""
    source, index = producer(value)
    type_, made = source.meta["types"][index], source.meta["layouts"][index]
    start = source.meta["relays"].get(index, made)
    if index in source.meta.get("held", ()) and start not in (made, target) and not user.meta.get("as_made"):
        value = _bring(graph, user, value, start, tables, placed, gradient, steady)
        return _bring(graph, user, value, target, tables, placed, gradient, steady)
    placed.setdefault((value, made), value)
    table = tables.of(type_)
    for begin, end in ((made, start), (start, target)) if target != made else ():
        if (value, end) in placed:
            continue
        for move in table.path(begin, end):
            if (value, move.target) in placed:
                continue
            # What leaves the graph is moved at once: gradients that wait to be reduced would take memory.
            place = user if user.op != "output" else _next_operator(placed[value, move.source])
            with graph.inserting_before(place):
                emitter = _Emitter(graph, value, user, type_, move, tables.machine, gradient, steady or is_steady(user))
                moved = placed[value, move.target] = emitter.emit(placed[value, move.source])
                moved.meta["away"] = value.meta.get("away_moved", False) and move.target == start
    return placed[value, target]


def _next_operator(node: fx.Node) -> fx.Node:
    """The first node behind this one that is no placeholder, nor one of several outputs of a node."""
    node = node.next
    while node.op == "placeholder" or node.target is operator.getitem:
        node = node.next
    return node


@dataclass
class _Emitter:
    """Emits the nodes of one move on local tensors."""

    graph: fx.Graph
    value: fx.Node
    user: fx.Node
    type: TensorType
    move: Move
    machine: Machine
    gradient: bool
    steady: bool

    def emit(self, local: fx.Node) -> fx.Node:
        apart = reduces(self.move.kind) and sum_dtype(self.type) != self.type.dtype
        local = self._cast(local, sum_dtype(self.type)) if apart else local
        result: fx.Node = getattr(self, f"_{self.move.kind}")(local)
        result = self._cast(result, self.type.dtype) if apart else result
        result.meta.update(types=(self.type,), layouts=(self.move.target,), relays={}, internal=False)
        return result

    @property
    def _axis(self) -> str:
        return self.machine.names[self.move.axis]

    @property
    def _parts(self) -> int:
        return self.machine.sizes[self.move.axis]

    def _call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        # A forward value that only the backward pass wants elsewhere is moved in the backward pass.
        owner = self.value if self.user.op == "output" else self.user
        inherit_origin(node, owner)
        node.meta["steady"] = self.steady
        return node

    def _cast(self, local: fx.Node, dtype: str) -> fx.Node:
        node = self._call(aten._to_copy.default, local)
        node.kwargs = {"dtype": getattr(torch, dtype)}
        return node

    def _communicate(self, target: Any, *args: Any) -> fx.Node:
        node = self._call(target, *args, self._axis)
        size = moved_bytes(self.type, self.move, self.machine.sizes)
        node.meta["collective"] = Collective(self.move.kind, self._axis, size, gradient=self.gradient)
        return self._call(c10d.wait_tensor.default, node)

    def _sides(self, layout: Layout, position: Split) -> tuple[int, int, int]:
        """Local elements before, in and behind the factor at a position."""
        flat = [n for dim in local_dims(self.type, layout, self.machine.sizes) for n in dim]
        at = sum(len(dim) for dim in self.type.dims[: position.dim]) + position.factor
        return math.prod(flat[:at]), flat[at], math.prod(flat[at + 1 :])

    def _shape(self, layout: Layout) -> list[int]:
        return list(local_shape(self.type, layout, self.machine.sizes))

    def _contiguous(self, local: fx.Node, shape: list[int]) -> fx.Node:
        return self._call(aten.contiguous.default, self._call(aten.reshape.default, local, shape))

    def _to_front(self, local: fx.Node, before: int, rest: int) -> fx.Node:
        """``[before, parts, rest] -> [parts * before, rest]``: one block for each device, contiguous."""
        blocks = self._call(aten.reshape.default, local, [before, self._parts, rest])
        swapped = self._call(aten.permute.default, blocks, [1, 0, 2])
        return self._contiguous(swapped, [self._parts * before, rest])

    def _from_front(self, blocks: fx.Node, before: int, rest: int) -> fx.Node:
        """``[parts * before, rest] -> [before, parts, rest]``, in the shape of the target."""
        parted = self._call(aten.reshape.default, blocks, [self._parts, before, rest])
        swapped = self._call(aten.permute.default, parted, [1, 0, 2])
        return self._contiguous(swapped, self._shape(self.move.target))

    def _all_gather(self, local: fx.Node) -> fx.Node:
        position = self.move.source[self.move.axis]
        assert isinstance(position, Split)
        before, size, behind = self._sides(self.move.source, position)
        flat = self._contiguous(local, [before, size * behind])
        gathered = self._communicate(c10d.all_gather_into_tensor.default, flat, self._parts)
        return self._from_front(gathered, before, size * behind)

    def _reduce_scatter(self, local: fx.Node) -> fx.Node:
        position = self.move.target[self.move.axis]
        assert isinstance(position, Split)
        before, size, behind = self._sides(self.move.source, position)
        blocks = self._to_front(local, before, size // self._parts * behind)
        mine = self._communicate(c10d.reduce_scatter_tensor.default, blocks, "sum", self._parts)
        return self._call(aten.reshape.default, mine, self._shape(self.move.target))

    def _all_reduce(self, local: fx.Node) -> fx.Node:
        return self._communicate(c10d.all_reduce.default, local, "sum")

    def _all_to_all(self, local: fx.Node) -> fx.Node:
        out, into = self.move.source[self.move.axis], self.move.target[self.move.axis]
        assert isinstance(out, Split)
        assert isinstance(into, Split)
        before, size, behind = self._sides(self.move.source, into)
        blocks = self._to_front(local, before, size // self._parts * behind)
        counts = [before] * self._parts
        swapped = self._communicate(c10d.all_to_all_single.default, blocks, counts, counts)
        # Each received block lies as the source does, but for the factor that is split now.
        between = tuple(p if a != self.move.axis else into for a, p in enumerate(self.move.source))
        flat = [n for dim in local_dims(self.type, between, self.machine.sizes) for n in dim]
        at = sum(len(dim) for dim in self.type.dims[: out.dim]) + out.factor
        flat[at] //= self._parts  # this factor is whole again only after the blocks are joined
        before, rest = math.prod(flat[:at]), math.prod(flat[at:])
        return self._from_front(swapped, before, rest)

    def _slice(self, local: fx.Node) -> fx.Node:
        position = self.move.target[self.move.axis]
        assert isinstance(position, Split)
        before, size, behind = self._sides(self.move.source, position)
        blocks = self._call(aten.reshape.default, local, [before, self._parts, size // self._parts * behind])
        index = self._call(axis_index, self._axis)
        mine = self._call(aten.select.int, blocks, 1, index)
        return self._contiguous(mine, self._shape(self.move.target))
