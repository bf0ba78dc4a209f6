"""`MoveEmitter`: the nodes of one single-axis move of a value, on local tensors."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import inherit_origin, producer
from autopar.ir.layout import (
    ByExpert,
    Interleaved,
    Layout,
    Replicate,
    Split,
    TensorType,
    imbalance_of,
    local_dims,
    local_shape,
    open_shape,
    owner_parts,
)
from autopar.ir.node_info import info, set_info
from autopar.ir.ops import exchange, routing
from autopar.ir.ops.collectives import Collective, axis_index, c10d
from autopar.ir.quantized.operators import from_blocks, sum_from_blocks, to_blocks
from autopar.rules.rule import PAIRS
from autopar.rules.strides import with_strides
from autopar.sharding.redistribute.moves import (
    OWN_ROWS,
    PLACE_ROWS,
    WIRE,
    Machine,
    Move,
    exchanges,
    moved_bytes,
    reduces,
    shard_of,
    sum_dtype,
)

aten = torch.ops.aten


def _product(*sizes: int) -> int:
    """Of sizes, of which -1 is an open one."""
    return -1 if -1 in sizes else math.prod(sizes)


@dataclass(frozen=True)
class Counts:
    """What is known of the rows of devices that split experts over some axes.

    Attributes:
        own: how many there are of each of a device's own experts.
        sizes: of the messages along the last axis, or of the block of own rows.
        order: of what comes along the last axis; None where tokens stay.
    """

    own: fx.Node
    sizes: fx.Node
    order: fx.Node | None


class Exchanges:
    """What devices tell one another before they exchange rows: how many there are of each expert.

    Attributes:
        sorts: the operator that made the order that a value is in.
        counts: by sort and by the axes over which experts are split, outermost axis first.
        whole: by sort, counts of all experts among a device's own pairs.
    """

    def __init__(self, graph: fx.Graph) -> None:
        """Find the sorts, before moves come between operators."""
        self.sorts: dict[fx.Node, fx.Node] = {}
        self.counts: dict[tuple[fx.Node, tuple[int, ...]], Counts] = {}
        self.whole: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            source, _ = producer(node)
            known = [self.sorts[a] for a in source.all_input_nodes if a in self.sorts]
            if source.target is routing.sort_by_expert:
                self.sorts[node] = source
            elif known and any(t is not None and t.routed is not None for t in info(source).types):
                self.sorts[node] = known[0]


@dataclass(frozen=True)
class MoveEmitter:
    """Emits a move where its graph inserts nodes.

    Attributes:
        graph: on local tensors.
        owner: the node whose module, pass of the step and stage the new nodes have.
        type: of the value.
        move: the move.
        machine: the mesh.
        gradient: whether its only purpose is to bring a gradient into its parameter's layout.
        hoisted: whether it runs once a step, before the first microbatch.
        value: name of the node whose value it is.
        source: that node.
        made: the layout in which it was made.
        exchanges: of the graph; they grow.
    """

    graph: fx.Graph
    owner: fx.Node
    type: TensorType
    move: Move
    machine: Machine
    gradient: bool = False
    hoisted: bool = False
    value: str = ""
    source: fx.Node | None = None
    made: Layout = ()
    exchanges: Exchanges | None = None

    def emit(self, local: fx.Node) -> fx.Node:
        """The value in the move's target layout, from ``local``, which is in its source layout."""
        if self._parts == 1:  # one device has all of it
            result = self._call(aten.reshape.default, local, self._shape(self.move.target))
        else:
            # Sums in 16 bits would round after every device; `TensorType.reduce` says in which dtype to add.
            # Numbers in few bits are added up in float32 anyway.
            widened = reduces(self.move.kind) and not self.move.bits and sum_dtype(self.type) != self.type.dtype
            local = self._cast(local, sum_dtype(self.type)) if widened else local
            result = getattr(self, f"_{self.move.kind}")(local)
            result = self._cast(result, self.type.dtype) if widened else result
        on_the_way = any(isinstance(p, Interleaved) for p in self.move.target)  # no layout of the whole tensor
        known = replace(info(result), types=(self.type,), layouts=(self.move.target,), internal=on_the_way)
        set_info(result, known)
        return result

    @property
    def _axis(self) -> str:
        return self.machine.names[self.move.axis]

    @property
    def _parts(self) -> int:
        return self.machine.sizes[self.move.axis]

    def _call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        inherit_origin(node, self.owner)
        set_info(node, replace(info(node), hoisted=self.hoisted, moved_value=self.value))
        return node

    def _cast(self, local: fx.Node, dtype: str) -> fx.Node:
        node = self._call(aten._to_copy.default, local)
        node.kwargs = {"dtype": getattr(torch, dtype)}
        return node

    def _communicate(self, target: Any, local: fx.Node, *args: Any) -> fx.Node:
        """A collective of a contiguous tensor of one dim at least, sent as numbers that every backend takes."""
        # Reductions add in the tensor's own dtype, or that of its sum; what is copied may be sent as another.
        wire = None if reduces(self.move.kind) else WIRE.get(self.type.dtype)
        pairs = self.type.dtype.startswith("complex")
        local = self._cast(local, wire) if wire else self._as_pairs(local) if pairs else local
        received = self._send(target, local, *args)
        return self._cast(received, self.type.dtype) if wire else self._from_pairs(received) if pairs else received

    def _send(self, target: Any, local: fx.Node, *args: Any) -> fx.Node:
        """A collective of a tensor as it is."""
        node = self._call(target, local, *args, self._axis)
        size = moved_bytes(self.type, self.move, self.machine.sizes, self.machine.load)
        collective = Collective(self.move.collective, self._axis, size, gradient=self.gradient)
        set_info(node, replace(info(node), collective=collective))
        return self._call(c10d.wait_tensor.default, node)

    def _gather_in_blocks(self, local: fx.Node) -> fx.Node:
        """What the bytes of all devices stand for, this one's own included: all compute with the same numbers."""
        count, bits = shard_of(self.type, self.move, self.machine.sizes), self.move.bits
        sent = self._call(to_blocks, local, 1, bits)
        received = self._send(c10d.all_gather_into_tensor.default, sent, self._parts)
        return self._call(from_blocks, received, count, bits, getattr(torch, self.type.dtype))

    def _scatter_in_blocks(self, terms: fx.Node) -> fx.Node:
        """Terms go to the device whose shard they are of, which adds them up; ``terms`` has one block for each."""
        count, bits = shard_of(self.type, self.move, self.machine.sizes), self.move.bits
        sent = self._call(to_blocks, terms, self._parts, bits)
        each = [1] * self._parts
        received = self._send(c10d.all_to_all_single.default, sent, each, each)
        return self._call(sum_from_blocks, received, count, bits, getattr(torch, self.type.dtype))

    def _as_pairs(self, local: fx.Node) -> fx.Node:
        """Complex numbers as real ones, twice as many along the last dim."""
        # Not every backend takes complex numbers, and all want contiguous tensors.
        pairs = self._call(aten.flatten.using_ints, self._call(aten.view_as_real.default, local), -2, -1)
        return self._call(aten.contiguous.default, pairs)

    def _from_pairs(self, received: fx.Node) -> fx.Node:
        # A part of a bucket may begin at any number, and a dim of size 1 have any stride.
        pairs = self._call(with_strides, self._call(aten.unflatten.int, received, -1, [-1, 2]), PAIRS)
        return self._call(aten.view_as_complex.default, pairs)

    def _sides(self, layout: Layout, position: Split) -> tuple[int, int, int]:
        """Local elements of the dims outside, of the factor at a position, and of the dims inside of it; -1 if open."""
        flat = [n for dim in local_dims(self.type, layout, self.machine.sizes) for n in dim]
        at = sum(len(dim) for dim in self.type.dims[: position.dim]) + position.factor
        # How many rows devices have of their experts, only the data say.
        open_dims = [p.dim for p in layout if isinstance(p, ByExpert)]
        outer = -1 if any(d < position.dim for d in open_dims) else math.prod(flat[:at])
        inner = -1 if any(d > position.dim for d in open_dims) else math.prod(flat[at + 1 :])
        return outer, flat[at], inner

    def _shape(self, layout: Layout) -> list[int]:
        return open_shape(self.type, layout, self.machine.sizes)

    def _contiguous(self, local: fx.Node, shape: list[int]) -> fx.Node:
        return self._call(aten.contiguous.default, self._call(aten.reshape.default, local, shape))

    def _view(self, numbers: fx.Node) -> fx.Node:
        """Numbers in the shape of the target."""
        return self._call(aten.reshape.default, numbers, self._shape(self.move.target))

    @staticmethod
    def _is_leading(position: Split, outer: int) -> bool:
        """Whether the devices' blocks of a split are blocks of dim 0, which collectives exchange as they are."""
        return position.dim == 0 and outer == 1

    def _to_front(self, local: fx.Node, outer: int, rest: int) -> fx.Node:
        """``[outer, parts, rest] -> [parts * outer, rest]``: one block for each device, contiguous."""
        blocks = self._call(aten.reshape.default, local, [outer, self._parts, rest])
        # Collectives of torch exchange blocks of dim 0, and the factor may be in any dim.
        swapped = self._call(aten.permute.default, blocks, [1, 0, 2])
        return self._contiguous(swapped, [_product(self._parts, outer), rest])

    def _from_front(self, blocks: fx.Node, outer: int, rest: int) -> fx.Node:
        """``[parts * outer, rest] -> [outer, parts, rest]``, in the shape of the target."""
        parted = self._call(aten.reshape.default, blocks, [self._parts, outer, rest])
        swapped = self._call(aten.permute.default, parted, [1, 0, 2])
        return self._contiguous(swapped, self._shape(self.move.target))

    def _all_gather(self, local: fx.Node) -> fx.Node:
        position = self.move.source[self.move.axis]
        assert isinstance(position, Split)
        outer, size, inner = self._sides(self.move.source, position)
        leading = self._is_leading(position, outer)
        if self.move.bits:
            found = self._gather_in_blocks(local)
            return self._view(found) if leading else self._from_front(found, outer, _product(size, inner))
        if leading:
            ready = self._call(aten.contiguous.default, local)
            return self._communicate(c10d.all_gather_into_tensor.default, ready, self._parts)
        flat = self._contiguous(local, [outer, _product(size, inner)])
        gathered = self._communicate(c10d.all_gather_into_tensor.default, flat, self._parts)
        return self._from_front(gathered, outer, _product(size, inner))

    def _reduce_scatter(self, local: fx.Node) -> fx.Node:
        position = self.move.target[self.move.axis]
        assert isinstance(position, Split)
        outer, size, inner = self._sides(self.move.source, position)
        if isinstance(position, Interleaved):
            # A block of each run: runs are like a factor outside of the one that is split.
            outer, size = outer * position.parts, size // position.parts
        leading = self._is_leading(position, outer)
        if leading and self.move.bits:
            return self._view(self._scatter_in_blocks(local))
        if leading:
            ready = self._call(aten.contiguous.default, local)
            return self._communicate(c10d.reduce_scatter_tensor.default, ready, "sum", self._parts)
        blocks = self._to_front(local, outer, _product(size // self._parts, inner))
        if self.move.bits:
            return self._view(self._scatter_in_blocks(blocks))
        mine = self._communicate(c10d.reduce_scatter_tensor.default, blocks, "sum", self._parts)
        return self._call(aten.reshape.default, mine, self._shape(self.move.target))

    def _all_reduce(self, local: fx.Node) -> fx.Node:
        # A tensor without dims has no last dim to hold the pairs.
        if self.type.dtype.startswith("complex"):
            shape = self._shape(self.move.target)
            # The sizes themselves, where they are known: the graph of one microbatch is analyzed again.
            flat = [-1] if -1 in shape else [math.prod(shape)]
            total = self._communicate(c10d.all_reduce.default, self._contiguous(local, flat), "sum")
            return self._call(aten.reshape.default, total, shape)
        return self._communicate(c10d.all_reduce.default, local, "sum")

    def _all_to_all(self, local: fx.Node) -> fx.Node:
        out, into = self.move.source[self.move.axis], self.move.target[self.move.axis]
        if exchanges(out, into):
            return self._exchange(local)
        assert isinstance(out, Split)
        assert isinstance(into, Split)
        outer, size, inner = self._sides(self.move.source, into)
        blocks = self._to_front(local, outer, _product(size // self._parts, inner))
        # Equal blocks: rows of dim 0 that go to, and come from, each device.
        counts = [outer] * self._parts
        swapped = self._communicate(c10d.all_to_all_single.default, blocks, counts, counts)
        # Each received block has the source's layout, but for the factor that is split now.
        between = tuple(p if a != self.move.axis else into for a, p in enumerate(self.move.source))
        flat = [n for dim in local_dims(self.type, between, self.machine.sizes) for n in dim]
        at = sum(len(dim) for dim in self.type.dims[: out.dim]) + out.factor
        flat[at] //= self._parts  # this factor is whole again only after the blocks are joined
        outer, rest = math.prod(flat[:at]), math.prod(flat[at:])
        return self._from_front(swapped, outer, rest)

    def _slice(self, local: fx.Node) -> fx.Node:
        position = self.move.target[self.move.axis]
        assert isinstance(position, Split)
        outer, size, inner = self._sides(self.move.source, position)
        blocks = self._call(aten.reshape.default, local, [outer, self._parts, _product(size // self._parts, inner)])
        index = self._call(axis_index, self._axis)
        mine = self._call(aten.select.int, blocks, 1, index)
        # A copy: a view would keep the whole value alive for as long as the part, such as a gradient to the end.
        return self._call(aten.clone.default, self._call(aten.reshape.default, mine, self._shape(self.move.target)))

    def _exchange(self, local: fx.Node) -> fx.Node:
        """Rows to the devices that have their experts, or back; or the counts of these."""
        into = self.move.target[self.move.axis]
        owned = self.move.target if isinstance(into, ByExpert) else self.move.source
        # Along an axis of one device nothing is exchanged.
        owners = zip(owned, self.machine.sizes, strict=True)
        axes = tuple(a for a, (p, n) in enumerate(owners) if isinstance(p, ByExpert) and n > 1)
        assert self.exchanges is not None
        assert self.source is not None
        sort = self.exchanges.sorts[self.source]
        if not self.type.routed:
            return self._own_ends(local, sort, axes)
        counts = self._counts(sort, axes)
        rows = self._most_rows(local_shape(self.type, self.move.target, self.machine.sizes)[0], self.move.target)
        if self.move.kind in (OWN_ROWS, PLACE_ROWS):
            take = exchange.own_rows if self.move.kind == OWN_ROWS else exchange.place_rows
            return self._call(take, local, counts.sizes, rows)
        if isinstance(into, ByExpert):
            came = self._communicate(exchange.exchange_rows, local, counts.sizes, False, rows)
            return self._call(aten.index_select.default, came, 0, counts.order)
        back = self._call(aten.index_select.default, local, 0, self._call(aten.argsort.default, counts.order))
        return self._communicate(exchange.exchange_rows, back, counts.sizes, True, rows)

    _own_rows = _place_rows = _exchange

    def _most_rows(self, rows: int, layout: Layout) -> int:
        """So many rows in the mean are so many on the device that has most."""
        return math.ceil(rows * imbalance_of(self.machine.load, owner_parts(layout, self.machine.sizes)))

    def _own_ends(self, local: fx.Node, sort: fx.Node, axes: tuple[int, ...]) -> fx.Node:
        """Where the rows of each of a device's own experts end."""
        pairs = zip(self.move.source, self.made, strict=True)
        if all(now == made or isinstance(now, ByExpert) for now, made in pairs):
            counts = self._counts(sort, axes).own
        else:  # added up over other axes already
            first = self._call(aten.new_zeros.default, local, [1])
            counts = self._call(aten.diff.default, local, 1, -1, first)
            if self.move.kind == OWN_ROWS:
                counts = self._own_counts(counts, self._call(axis_index, self._axis), self._parts)
            else:
                counts = self._communicate(c10d.reduce_scatter_tensor.default, counts, "sum", self._parts)
        return self._cast(self._call(aten.cumsum.default, counts, 0), self.type.dtype)

    def _whole_counts(self, sort: fx.Node) -> fx.Node:
        """How many of a device's pairs are of each expert."""
        assert self.exchanges is not None
        if sort not in self.exchanges.whole:
            # One of its own: a recomputed sort may be read for its order alone, or for its experts later on.
            with self.graph.inserting_after(sort):
                found = self._call(operator.getitem, sort, 0)
            self.exchanges.whole[sort] = self._call(exchange.count_experts, found, sort.args[2])
        return self.exchanges.whole[sort]

    def _own_counts(self, counts: fx.Node, index: fx.Node, parts: int) -> fx.Node:
        """Of counts of experts, those of one of so many devices."""
        return self._call(aten.select.int, self._call(aten.reshape.default, counts, [parts, -1]), 0, index)

    def _counts(self, sort: fx.Node, axes: tuple[int, ...]) -> Counts:
        """What is known of the rows of devices that split experts over some axes."""
        assert self.exchanges is not None
        if (sort, axes) not in self.exchanges.counts:
            # Where all devices sort the same tokens, these stay.
            stay = [a for a in axes if isinstance(info(sort).layout(1)[a], Replicate)]
            sent = self._counts(sort, axes[:-1]).own if len(axes) > 1 else self._whole_counts(sort)
            made = self._count_own(sent, axes[-1]) if axes[-1] in stay else self._count_sent(sent, sort, axes, stay)
            self.exchanges.counts[sort, axes] = made
        return self.exchanges.counts[sort, axes]

    def _count_own(self, counts: fx.Node, axis: int) -> Counts:
        parts, index = self.machine.sizes[axis], self._call(axis_index, self.machine.names[axis])
        own = self._own_counts(counts, index, parts)
        return Counts(own, self._call(exchange.own_block, counts, parts, index), None)

    def _count_sent(self, sent: fx.Node, sort: fx.Node, axes: tuple[int, ...], stay: list[int]) -> Counts:
        sizes = self.machine.sizes
        axis, parts = self.machine.names[axes[-1]], sizes[axes[-1]]
        size = self.type.experts // math.prod(sizes[a] for a in axes)
        told = self._call(c10d.all_to_all_single.default, sent, [size] * parts, [size] * parts, axis)
        set_info(told, replace(info(told), collective=Collective("all_to_all", axis, 8.0 * size * parts)))
        received = self._call(c10d.wait_tensor.default, told)
        split = [n for p, n in zip(info(sort).layout(1), sizes, strict=True) if isinstance(p, Split)]
        rows = sort.meta["val"][1].numel() // math.prod([*split, *(sizes[a] for a in stay)])
        rows = math.ceil(rows * imbalance_of(self.machine.load, math.prod(sizes[a] for a in axes)))
        order = self._call(exchange.arrivals, received, parts, rows)
        counted = self._call(exchange.message_sizes, sent, received, parts)
        return Counts(self._call(exchange.owned_counts, received, parts), counted, order)
