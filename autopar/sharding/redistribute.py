"""Redistribution: the cheapest sequence of single-axis moves from one layout of a tensor to another.

Moves are all-gather, reduce-scatter, all-reduce, all-to-all (also of rows by their experts), and local ones: a slice,
the rows of a device's own experts, and these put where they were among the others. Axes that split one factor nest in
mesh order, so only the innermost of them can be moved. All pairs are found at once:
Floyd-Warshall over the tensor's layouts (R. W. Floyd, "Algorithm 97: Shortest path", 1962), in numpy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.costs.cluster import Device, Link
from autopar.costs.collectives import COLLECTIVES
from autopar.costs.kernels import host_wait_seconds
from autopar.costs.outer_exchange import dequantizing, quantized_bytes, quantizing
from autopar.ir.layout import (
    ByExpert,
    Factor,
    Layout,
    Partial,
    Placement,
    Replicate,
    Split,
    TensorType,
    TokensStay,
    imbalance_of,
    item_bytes,
    owner_parts,
)
from autopar.ir.ops.collectives import Collective
from autopar.ir.quantized.axes import GRADIENTS, WEIGHTS, QuantizedAxis
from autopar.rules.remembered import remembered
from autopar.sharding.candidates import layouts, split_parts

Kinds = frozenset[str]
"""Kinds of moves."""

PIECES, MOST_UNITS = 8, 64
"""A sum over devices may be cut anywhere: into so many pieces, or fewer where rows do not divide. Of more units than
the second no chunks are looked for: each would be sent in a message of its own."""

SLICE, OWN_ROWS, PLACE_ROWS = "slice", "own_rows", "place_rows"
LOCAL_MOVES = (SLICE, OWN_ROWS, PLACE_ROWS)
"""Kinds of moves that send nothing."""

WIRE = {"bool": "uint8", "int16": "int32"}
"""What dtypes are sent as that Gloo does not support; complex ones are sent as pairs."""


@dataclass(frozen=True)
class Machine:
    """A mesh on a cluster: everything that a cost depends on.

    Attributes:
        names: of the axes, outermost first.
        sizes: devices along each axis.
        links: the link that a collective along each axis uses.
        device: what each device can do.
        quantized: along which axes messages are in few bits.
        load: of experts, see `autopar.ir.layout.imbalance_of`.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    links: tuple[Link, ...]
    device: Device
    quantized: tuple[QuantizedAxis, ...] = ()
    load: tuple[float, ...] = ()

    def bits(self, axis: int, what: str) -> int:
        """Of each number of such messages along an axis; 0: whole numbers."""
        return next((q.bits(what) for q in self.quantized if q.axis == self.names[axis]), 0)

    def seconds(self, made: Collective) -> float:
        """Seconds of a collective, its launch and what kernels wait for it besides included."""
        axis, link = self.names.index(made.axis), self.links[self.names.index(made.axis)]
        return float(COLLECTIVES[made.kind](made.bytes, self.sizes[axis], link)) + self.device.launch + link.wait


@dataclass(frozen=True)
class Move:
    """One single-axis step of a redistribution.

    Attributes:
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all`` (to and from experts, too), or one of
            `LOCAL_MOVES`.
        axis: index of the mesh axis.
        source: layout before.
        target: layout after.
        bits: of each number that is sent; 0: all of them. Terms of a sum are then exchanged, and added up afterwards.
    """

    kind: str
    axis: int
    source: Layout
    target: Layout
    bits: int = 0

    @property
    def collective(self) -> str:
        """The kind of the collective."""
        return "all_to_all" if self.bits and self.kind == "reduce_scatter" else self.kind


def exchanges(source: Placement, target: Placement) -> bool:
    """Whether rows go between tokens and experts, or counts of them."""
    return isinstance(source, ByExpert) != isinstance(target, ByExpert)


def move_kind(source: Placement, target: Placement) -> str | None:
    """The collective that turns one placement into another on one axis; None if there is none."""
    if isinstance(target, TokensStay):
        return OWN_ROWS
    if isinstance(source, TokensStay):
        return PLACE_ROWS
    if exchanges(source, target):
        return "all_to_all"
    # Nothing becomes Partial: whoever takes the terms would only have to add them up again.
    if isinstance(source, Split):
        return {Replicate: "all_gather", Split: "all_to_all"}.get(type(target))
    if isinstance(source, Partial):
        return {Replicate: "all_reduce", Split: "reduce_scatter"}.get(type(target))
    return SLICE if isinstance(target, Split) else None


def innermost(layout: Layout, axis: int) -> bool:
    """Whether no later axis splits the factor that ``axis`` splits, so that its blocks are contiguous."""
    # Blocks of experts are contiguous whichever tokens they are of.
    if isinstance(layout[axis], ByExpert):
        return not any(isinstance(p, ByExpert) for p in layout[axis + 1 :])
    return layout[axis] not in layout[axis + 1 :]


def reduces(kind: str) -> bool:
    """Whether a kind of move adds terms up."""
    return kind in ("all_reduce", "reduce_scatter")


def sum_dtype(type_: TensorType) -> str:
    """In which dtype the tensor's Partial terms are added up."""
    return type_.reduce or type_.dtype


def held_parts(layout: Layout, sizes: Sequence[int], load: Sequence[float] = ()) -> float:
    """What a tensor's size is divided by on the device that holds most of it under a layout."""
    return split_parts(layout, sizes) / imbalance_of(load, owner_parts(layout, sizes))


def moved_bytes(type_: TensorType, move: Move, sizes: Sequence[int], load: Sequence[float] = ()) -> float:
    """Bytes by which the move's collective is charged: the larger of the local tensors before and after."""
    if move.bits:
        return sizes[move.axis] * quantized_bytes(shard_of(type_, move, sizes), move.bits)
    return _sent_whole(type_, move) / min(held_parts(layout, sizes, load) for layout in (move.source, move.target))


def _sent_whole(type_: TensorType, move: Move) -> float:
    """Bytes of the whole tensor, as a move sends it: terms are cast to the dtype of the sum before they are sent."""
    return type_.numel * item_bytes(sum_dtype(type_) if reduces(move.kind) else type_.dtype)


def shard_of(type_: TensorType, move: Move, sizes: Sequence[int]) -> int:
    """Elements of the smaller of the local tensors before and after a move."""
    return type_.numel // max(split_parts(move.source, sizes), split_parts(move.target, sizes))


_QUANTIZED = {"all_gather": WEIGHTS, "reduce_scatter": GRADIENTS}
"""Kinds of moves that may be in few bits, and what they are of then."""


class Redistributions:
    """All moves of one type of tensor on one machine."""

    def __init__(self, type_: TensorType, machine: Machine) -> None:
        """Enumerate layouts; costs are computed when they are asked for."""
        self.type = type_
        self.machine = machine
        self.layouts = layouts(type_, machine.sizes)
        self.index = {layout: i for i, layout in enumerate(self.layouts)}
        self._apart: dict[Kinds, NDArray[np.float64]] = {}

    def moves(self) -> list[Move]:
        """Every legal single-axis move between two layouts."""
        placements = tuple(dict.fromkeys(p for layout in self.layouts for p in layout))
        every = (
            (source, axis, other) for source in self.layouts for axis in range(len(source)) for other in placements
        )
        found = [move for source, axis, other in every if (move := self._move(source, axis, other)) is not None]
        # An all-reduce would get around few bits: where these are asked for it is a reduce-scatter and a gather.
        fewer = {(m.source, m.axis) for m in found if m.bits and m.kind == "reduce_scatter"}
        return [m for m in found if m.kind != "all_reduce" or (m.source, m.axis) not in fewer]

    def _move(self, source: Layout, axis: int, other: Placement) -> Move | None:
        """The move that gives an axis another placement; None if there is none."""
        placement = source[axis]
        if other == placement or not self.type.may_move(placement, other):
            return None
        target = (*source[:axis], other, *source[axis + 1 :])
        kind = move_kind(placement, other)
        if kind and exchanges(placement, other):
            # Rows of tokens are in no order: only the axes that experts are split over nest.
            nested = innermost(source if isinstance(placement, ByExpert) else target, axis)
            return Move(kind, axis, source, target) if nested and target in self.index else None
        # Blocks of an outer axis are not contiguous while an inner axis splits the same factor.
        if isinstance(placement, Split) and not innermost(source, axis):
            return None
        # Such a move tells blocks by their sizes.
        if kind == "all_to_all" and any(isinstance(p, ByExpert) for p in source):
            return None
        if not kind or target not in self.index or not (isinstance(other, Replicate) or innermost(target, axis)):
            return None
        return self._in_few_bits(Move(kind, axis, source, target))

    def _in_few_bits(self, move: Move) -> Move:
        """The move as it is made where its message may be in few bits, if it is smaller then."""
        what = _QUANTIZED.get(move.kind, "")
        if not what or what != self.type.message or self.machine.sizes[move.axis] == 1:
            return move
        if ByExpert in (type(move.source[move.axis]), type(move.target[move.axis])):
            return move
        fewer = replace(move, bits=self.machine.bits(move.axis, what))
        sent, whole = (moved_bytes(self.type, m, self.machine.sizes) for m in (fewer, move))
        return fewer if fewer.bits and sent < whole else move

    @cached_property
    def parts(self) -> NDArray[np.float64]:
        """Into how many blocks each layout cuts the tensor; less where some devices' experts have more rows."""
        sizes, load = self.machine.sizes, self.machine.load
        return np.array([held_parts(layout, sizes, load) for layout in self.layouts], dtype=np.float64)

    def move_seconds(self, moves: Sequence[Move]) -> NDArray[np.float64]:
        """Time of each move: what `autopar.sharding.emit.MoveEmitter` emits, collective and kernels, with launches."""
        return self.local_seconds(moves) + self.sent_seconds(moves) + self.waits(moves)

    def sent_seconds(self, moves: Sequence[Move]) -> NDArray[np.float64]:
        """The part of each move that its collective takes."""
        return self._sent_seconds(moves, self.machine.links, self.machine.device.launch)

    def _sent_seconds(self, moves: Sequence[Move], links: Sequence[Link], launch: float) -> NDArray[np.float64]:
        seconds = np.zeros(len(moves))
        groups: dict[tuple[str, int], list[int]] = {}
        for i, move in enumerate(moves):
            groups.setdefault((move.collective, move.axis), []).append(i)
        size = np.array([self._moved_bytes(move) for move in moves])
        for (kind, axis), members in groups.items():
            # Along an axis of one device nothing is emitted; no move is free, or plans could make it at will.
            if self.machine.sizes[axis] == 1:
                seconds[members] += launch
            elif kind not in LOCAL_MOVES:
                ring = COLLECTIVES[kind](size[members], self.machine.sizes[axis], links[axis])
                seconds[members] += ring + launch
        return seconds

    def _moved_bytes(self, move: Move) -> float:
        """`moved_bytes` by the parts that are known already."""
        if move.bits:
            return moved_bytes(self.type, move, self.machine.sizes, self.machine.load)
        parts = self.parts
        return _sent_whole(self.type, move) / min(
            float(parts[self.index[move.source]]), float(parts[self.index[move.target]])
        )

    def message_seconds(self, moves: Sequence[Move]) -> NDArray[np.float64]:
        """What `sent_seconds` has of latency and launch: values that are sent together take it once."""
        return self.sent_seconds(moves) - self._sent_seconds(moves, tuple(map(_without_latency, self.machine.links)), 0)

    def waits(self, moves: Sequence[Move]) -> NDArray[np.float64]:
        """For how long kernels wait for the collective of each move besides, where it does not hide."""
        sizes, links = self.machine.sizes, self.machine.links
        return np.array([links[m.axis].wait if m.kind not in LOCAL_MOVES and sizes[m.axis] > 1 else 0.0 for m in moves])

    def local_seconds(self, moves: Sequence[Move]) -> NDArray[np.float64]:
        """The part of each move that the device's own kernels take: casts, and copies to and from a collective's order.

        Collectives exchange blocks of the first dim: a factor that has others before it is brought there, or back from
        there, by a copy. A slice is always one. What is not row-major is copied besides, see `TensorType.relaid`.
        """
        if not moves:
            return np.zeros(0)
        device, own = self.machine.device, item_bytes(self.type.dtype)
        sent, cast = (np.array(column, dtype=np.float64) for column in zip(*map(self._items, moves), strict=True))
        before, after = (
            np.array([count(m) for m in moves], dtype=np.float64) for count in (self._copies_before, self._copies_after)
        )
        ends = np.array([(self.index[m.source], self.index[m.target]) for m in moves], dtype=np.int64)
        source, target = (self.type.numel / self.parts[ends]).T
        moved = source * (cast + 2 * sent * before) + target * (cast + 2 * own * after)
        kernels = 2 * (cast > 0) + before + after
        for i, move in enumerate(moves):
            if move.bits:
                moved[i], kernels[i] = self._quantizing(move, int(before[i]), int(after[i]))
        seconds = moved / (device.bandwidth * device.streaming) + kernels * device.launch
        # Counts of experts' rows are moved once for all rows that are sorted together, and the host waits for them.
        if self.type.experts and not self.type.routed:
            waits = [isinstance(m.target[m.axis], ByExpert) for m in moves]
            seconds = seconds + host_wait_seconds(device) * np.array(waits, dtype=np.float64)
        # Along an axis of one device nothing is emitted.
        return np.asarray(np.where([self.machine.sizes[m.axis] > 1 for m in moves], seconds, 0.0), dtype=np.float64)

    def _quantizing(self, move: Move, before: int, after: int) -> tuple[float, int]:
        """Bytes that kernels move where a message is in few bits, and how many kernels there are.

        Args:
            move: the move.
            before: copies of what is moved.
            after: copies of the result.
        """
        own, parts = item_bytes(self.type.dtype), self.machine.sizes[move.axis]
        shard = shard_of(self.type, move, self.machine.sizes)
        if move.kind == "all_gather":
            ways, copied = (quantizing(shard, own, move.bits), dequantizing(parts * shard, own, move.bits)), after
        else:
            whole = parts * shard
            ways = quantizing(whole, own, move.bits), dequantizing(whole, own, move.bits, rows=parts)
            copied = before
        moved, kernels = (sum(column) for column in zip(*ways, strict=True))
        return moved + 2 * own * parts * shard * copied, int(kernels) + before + after

    def _items(self, move: Move) -> tuple[int, int]:
        """Bytes of an element as it is copied before a move, and as it is read and written by a cast; 0 for no cast."""
        own, sent = self.type.dtype, sum_dtype(self.type) if reduces(move.kind) else self.type.dtype
        if sent != own:
            return item_bytes(sent), item_bytes(own) + item_bytes(sent)
        wired = own in WIRE and not reduces(move.kind) and move.kind not in LOCAL_MOVES
        return item_bytes(own), item_bytes(own) + item_bytes(WIRE[own]) if wired else 0

    def _copies_before(self, move: Move) -> int:
        """Copies of what is moved: the factor that is split comes first, and all is row-major."""
        into = move.target[move.axis]
        if move.kind in (OWN_ROWS, PLACE_ROWS):
            return int(move.kind == PLACE_ROWS)
        if exchanges(move.source[move.axis], into):  # back into the order in which rows came
            return int(not isinstance(into, ByExpert))
        if move.kind in ("reduce_scatter", "all_to_all") and self._outer(move.source, into) > 1:
            return 1
        return int(self.type.relaid > 0 and move.kind != "all_reduce")

    def _copies_after(self, move: Move) -> int:
        """Copies of the result: the factor that was split comes back to its place; a slice is one, or two."""
        kind, out, into = move.kind, move.source[move.axis], move.target[move.axis]
        count = int(self.type.relaid > 1)
        if kind in (OWN_ROWS, PLACE_ROWS):
            return 1
        if exchanges(out, into):  # into the order of experts
            return count + isinstance(into, ByExpert)
        if kind in ("all_gather", "all_to_all"):
            count += self._outer(move.source if kind == "all_gather" else move.target, out) > 1
        if kind == SLICE:
            assert isinstance(into, Split)
            # Before its own there is another one where blocks of other factors of its dim do not follow one another.
            outer, end = self._outer(move.target, into), self._outer(move.target, Split(into.dim + 1))
            count += 1 + (end > outer > self._outer(move.target, Split(into.dim)))
        return count

    def _outer(self, layout: Layout, position: Placement) -> int:
        """Local elements of the dims and factors before the one at a position."""
        assert isinstance(position, Split)
        return int(self._before[self.index[layout], self._column[position.dim, position.factor]])

    @cached_property
    def _column(self) -> dict[tuple[int, int], int]:
        every = [(d, j) for d, dim in enumerate(self.type.dims) for j in range(max(1, len(dim)))]
        every.append((len(self.type.dims), 0))  # after the last dim
        return {position: i for i, position in enumerate(every)}

    @cached_property
    def _before(self) -> NDArray[np.int64]:
        """``[layouts, factors + 1]``: local elements of all factors before each, and of all."""
        sizes = [f.size for dim in self.type.dims for f in (dim or (Factor("", 1),))]
        local = np.tile(np.array(sizes, dtype=np.int64), (len(self.layouts), 1))
        for i, layout in enumerate(self.layouts):
            for placement, n in zip(layout, self.machine.sizes, strict=True):
                if isinstance(placement, Split):
                    local[i, self._column[placement.dim, placement.factor]] //= n
        return np.cumprod(np.concatenate([np.ones((len(local), 1), dtype=np.int64), local], axis=1), axis=1)

    @cached_property
    def _solved(self) -> tuple[NDArray[np.float64], NDArray[np.int64], dict[tuple[int, int], Move]]:
        count = len(self.layouts)
        distance = np.full((count, count), np.inf)
        np.fill_diagonal(distance, 0.0)
        step = np.tile(np.arange(count), (count, 1))  # first hop from row towards column
        moves = self.moves()
        arcs = {(self.index[m.source], self.index[m.target]): m for m in moves}
        for (a, b), seconds in zip(arcs, self.move_seconds(moves), strict=True):
            distance[a, b] = seconds
        # Floyd-Warshall, all rows and columns at once: paths through the first k layouts.
        for k in range(count):
            through = distance[:, k, None] + distance[None, k, :]
            # Strictly shorter only: among equal paths the first one found stays, in every process.
            better = through < distance
            if better.any():
                np.copyto(distance, through, where=better)
                np.copyto(step, step[:, k, None], where=better)
        return distance, step, arcs

    @property
    def seconds(self) -> NDArray[np.float64]:
        """``[layouts, layouts]``: time from row to column; inf where there is none (nothing becomes Partial)."""
        return self._solved[0]

    @cached_property
    def sliced(self) -> NDArray[np.bool_]:
        """``[layouts, layouts]``: whether nothing is sent along the path from row to column."""
        distance, step, arcs = self._solved
        local = np.eye(len(self.layouts), dtype=bool)
        for end, move in arcs.items():
            local[end] = move.kind == "slice"
        at, target = step, np.arange(len(self.layouts))[None, :]
        found: NDArray[np.bool_] = np.isfinite(distance) & np.take_along_axis(local, at, 1)
        while (at != target).any():
            following = np.where(np.isfinite(distance), step[at, target], target)
            found &= local[at, following]
            at = following
        return found

    def apart(self, chunks: Kinds = frozenset()) -> NDArray[np.float64]:
        """``[2 + 3 axes, layouts, layouts]``: along each path seconds as `chunked_seconds` tells them apart."""
        if chunks in self._apart:
            return self._apart[chunks]
        distance, step, arcs = self._solved
        count = len(self.layouts)
        own = self.chunked_seconds(list(arcs.values()), chunks)
        hops = np.zeros((len(own), count, count))
        ends = np.array(list(arcs), dtype=np.int64).reshape(-1, 2)
        hops[:, ends[:, 0], ends[:, 1]] = own
        # What two moves in a row take less than each by itself, if these are the next on the way to a target.
        less = np.zeros_like(hops)
        for (a, b), (_, c) in self._pairs(arcs, chunks):
            together = self.chunked_seconds([arcs[a, b], arcs[b, c]], chunks).sum(1)
            targets = (step[a] == b) & (step[b] == c) & np.isfinite(distance[a])
            less[:, a, targets] = (together - hops[:, a, b] - hops[:, b, c])[:, None]
        found = np.zeros_like(hops)
        target = np.tile(np.arange(count), (count, 1))
        at = np.where(np.isfinite(distance), target.T, target)
        while (at != target).any():
            following = step[at, target]
            found += np.where(at == target, 0.0, hops[:, at, following] + less[:, at, target])
            at = np.where(at == target, at, following)
        self._apart[chunks] = found
        return found

    def _pairs(
        self, arcs: Mapping[tuple[int, int], Move], chunks: Kinds
    ) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """Moves in a row that chunks make one of."""
        kinds = {"all_to_all": "all_gather", "reduce_scatter": "all_to_all"}
        following: dict[tuple[int, int, str], list[tuple[int, int]]] = {}
        for end, move in arcs.items() if chunks else ():
            if move.kind in kinds.values():
                following.setdefault((end[0], move.axis, move.kind), []).append(end)
        for first, move in arcs.items() if following else ():
            for then in following.get((first[1], move.axis, kinds.get(move.kind, "")), ()):
                if self._joined_units(move, arcs[then], chunks):
                    yield first, then

    def chunked_seconds(self, moves: Sequence[Move], chunks: Kinds = frozenset()) -> NDArray[np.float64]:
        """``[2 + 3 axes, moves]``: at least what moves of a value take, one after the other, told apart.

        Seconds of kernels, then of what collectives send on each axis, then on each axis of those that chunks of a
        product hide at the most: all but the first chunk. Chunks need no exchange that only makes another dim the
        first, nor copies. Then of messages on each axis, see `message_seconds`, which are among what is sent where
        there are chunks; and in the end of waits.

        Args:
            moves: in their order.
            chunks: kinds of collectives beside which there is a product of their rows.
        """
        axes = len(self.machine.sizes)
        found = np.zeros((2 + 3 * axes, len(moves)))
        found[0], found[-1] = self.local_seconds(moves), self.waits(moves)
        sent, messages = self.sent_seconds(moves), self.message_seconds(moves)
        for i, move in enumerate(moves):
            found[1 + move.axis, i], found[1 + 2 * axes + move.axis, i] = sent[i] - messages[i], messages[i]
        if not chunks:
            return found
        units = [self._units(move, chunks) for move in moves]
        gone: set[int] = set()
        for i, (move, then) in enumerate(itertools.pairwise(moves)):
            joined = self._joined_units(move, then, chunks)
            if joined:
                exchange = i if move.kind == "all_to_all" else i + 1
                gone.add(exchange)
                units[2 * i + 1 - exchange] = joined
        for i, move in enumerate(moves):
            if i in gone:
                found[:, i] = 0
            elif units[i] > 1:
                size, link = self._moved_bytes(move), self.machine.links[move.axis]
                first = float(COLLECTIVES[move.collective](size / units[i], self.machine.sizes[move.axis], link))
                first = min(first + self.machine.device.launch, float(sent[i]))
                found[1 + axes + move.axis, i] = sent[i] - first
                found[0, i], found[1 + move.axis, i], found[1 + 2 * axes + move.axis, i] = 0, first, 0
        return found

    def _units(self, move: Move, chunks: Kinds) -> int:
        """Into how many pieces chunks may cut a move's collective; 0: it stays whole."""
        if move.kind not in chunks or self.machine.sizes[move.axis] == 1:
            return 0
        return PIECES if move.kind == "all_reduce" else self._blocks(move.source, move.target, move.axis)

    def _joined_units(self, move: Move, then: Move, chunks: Kinds) -> int:
        """The same of two moves, one of which only exchanges blocks for the other, which is then left out."""
        gathers = (move.kind, then.kind) == ("all_to_all", "all_gather")
        if move.axis != then.axis or move.target != then.source or self.machine.sizes[move.axis] == 1:
            return 0
        if not gathers and (move.kind, then.kind) != ("reduce_scatter", "all_to_all"):
            return 0
        kind = then.kind if gathers else move.kind
        return self._blocks(move.source, then.target, move.axis) if kind in chunks else 0

    def _blocks(self, source: Layout, target: Layout, axis: int) -> int:
        """Local blocks of what is outside of the factor that an axis splits before or after a move."""
        split, layout = (source[axis], source) if isinstance(source[axis], Split) else (target[axis], target)
        others = [p for i, p in enumerate(layout) if i != axis and self.machine.sizes[i] > 1 and isinstance(p, Split)]
        if type(split) is not Split or any(type(p) is not Split or p == split for p in others):
            return 0
        blocks = self._outer(layout, split)
        # Of one axis alone, which stands for a mesh of several: others may split the blocks.
        return min(blocks, MOST_UNITS) if 2 <= blocks <= MOST_UNITS or len(layout) == 1 else 0

    def priced(
        self,
        rows: NDArray[np.int64],
        columns: NDArray[np.int64],
        prices: NDArray[np.float64],
        chunks: Kinds = frozenset(),
    ) -> NDArray[np.float64]:
        """Seconds from some layouts to others, each kind at a price; inf where there is no way.

        Args:
            rows: numbers of layouts, [A].
            columns: numbers of layouts, [B].
            prices: of what `chunked_seconds` tells apart, for each column, [B, 2 + 3 axes].
            chunks: kinds of collectives that chunks of products may hide.
        """
        chosen = np.ix_(rows, columns)
        seconds: NDArray[np.float64] = self.seconds[chosen]
        if (prices == prices[:, :1]).all():
            return seconds * prices[:, 0]
        # Prices differ by when a value is moved, so that they are few: each prices all layouts in one product.
        different, which = np.unique(prices, axis=0, return_inverse=True)
        apart = self.apart(chunks)
        priced = (different @ apart.reshape(len(apart), -1)).reshape(-1, *apart.shape[1:])
        return np.where(np.isfinite(seconds), priced[which[None, :], chosen[0], chosen[1]], np.inf)

    def path(self, source: Layout, target: Layout) -> tuple[Move, ...]:
        """The cheapest moves from ``source`` to ``target``.

        Raises:
            ValueError: there are none.
        """
        distance, step, arcs = self._solved
        a, b = self.index[source], self.index[target]
        if not np.isfinite(distance[a, b]):
            raise ValueError(f"no way to redistribute {self.type} from {source} to {target}")
        found = []
        while a != b:
            hop = int(step[a, b])
            found.append(arcs[a, hop])
            a = hop
        return tuple(found)


def _without_latency(link: Link) -> Link:
    return replace(link, latency=1e-30)


class Tables:
    """Redistribution tables on one machine, one for each type of tensor."""

    def __init__(self, machine: Machine) -> None:
        """Tables are made when they are asked for."""
        self.machine = machine

    def of(self, type_: TensorType) -> Redistributions:
        """The table of a type; types that differ in names or padding only share one."""
        # Names and padding change no cost. With them left out, thousands of tensors need a few tables.
        plain = tuple(tuple(Factor("", f.size) for f in dim) for dim in type_.dims)
        message = type_.message if self.machine.quantized else ""
        return _table(replace(type_, dims=plain, used=(), drawn=False, message=message), self.machine)


@remembered(256)
def _table(type_: TensorType, machine: Machine) -> Redistributions:
    return Redistributions(type_, machine)
