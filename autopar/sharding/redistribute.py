"""Redistribution: the cheapest sequence of single-axis moves from one layout of a tensor to another.

Moves are all-gather, reduce-scatter, all-reduce, all-to-all (also of rows by their experts) and a local slice. Axes
that split one factor nest in mesh order, so only the innermost of them can be moved. All pairs are found at once:
Floyd-Warshall over the tensor's layouts (R. W. Floyd, "Algorithm 97: Shortest path", 1962), in numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.costs.cluster import Device, Link
from autopar.costs.collectives import COLLECTIVES
from autopar.ir.layout import ByExpert, Factor, Layout, Partial, Placement, Replicate, Split, TensorType, item_bytes
from autopar.ir.ops.collectives import Collective
from autopar.rules.remembered import remembered
from autopar.sharding.candidates import layouts, split_parts

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
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    links: tuple[Link, ...]
    device: Device

    def seconds(self, made: Collective) -> float:
        """Seconds of a collective, its launch included."""
        axis = self.names.index(made.axis)
        return float(COLLECTIVES[made.kind](made.bytes, self.sizes[axis], self.links[axis])) + self.device.launch


@dataclass(frozen=True)
class Move:
    """One single-axis step of a redistribution.

    Attributes:
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all`` (to and from experts, too), ``slice``.
        axis: index of the mesh axis.
        source: layout before.
        target: layout after.
    """

    kind: str
    axis: int
    source: Layout
    target: Layout


def exchanges(source: Placement, target: Placement) -> bool:
    """Whether rows go between tokens and experts, or counts of them."""
    return isinstance(source, ByExpert) != isinstance(target, ByExpert)


def move_kind(source: Placement, target: Placement) -> str | None:
    """The collective that turns one placement into another on one axis; None if there is none."""
    if exchanges(source, target):
        return "all_to_all"
    # Nothing becomes Partial: whoever takes the terms would only have to add them up again.
    if isinstance(source, Split):
        return {Replicate: "all_gather", Split: "all_to_all"}.get(type(target))
    if isinstance(source, Partial):
        return {Replicate: "all_reduce", Split: "reduce_scatter"}.get(type(target))
    return "slice" if isinstance(target, Split) else None


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


def moved_bytes(type_: TensorType, move: Move, sizes: Sequence[int]) -> float:
    """Bytes by which the move's collective is charged: the larger of the local tensors before and after."""
    # Terms are cast to the dtype of the sum before they are sent.
    whole = type_.numel * item_bytes(sum_dtype(type_) if reduces(move.kind) else type_.dtype)
    return whole / min(split_parts(move.source, sizes), split_parts(move.target, sizes))


class Redistributions:
    """All moves of one type of tensor on one machine."""

    def __init__(self, type_: TensorType, machine: Machine) -> None:
        """Enumerate layouts; costs are computed when they are asked for."""
        self.type = type_
        self.machine = machine
        self.layouts = layouts(type_, machine.sizes)
        self.index = {layout: i for i, layout in enumerate(self.layouts)}

    def moves(self) -> list[Move]:
        """Every legal single-axis move between two layouts."""
        placements = tuple(dict.fromkeys(p for layout in self.layouts for p in layout))
        every = (
            (source, axis, other) for source in self.layouts for axis in range(len(source)) for other in placements
        )
        return [move for source, axis, other in every if (move := self._move(source, axis, other)) is not None]

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
        return Move(kind, axis, source, target)

    @cached_property
    def parts(self) -> NDArray[np.int64]:
        """Into how many blocks each layout cuts the tensor."""
        return np.array([split_parts(layout, self.machine.sizes) for layout in self.layouts], dtype=np.int64)

    def move_seconds(self, moves: Sequence[Move]) -> NDArray[np.float64]:
        """Time of each move: what `autopar.sharding.emit.MoveEmitter` emits, collective and kernels, with launches."""
        return self.local_seconds(moves) + self.sent_seconds(moves)

    def sent_seconds(self, moves: Sequence[Move]) -> NDArray[np.float64]:
        """The part of each move that its collective takes."""
        device, seconds = self.machine.device, np.zeros(len(moves))
        groups: dict[tuple[str, int], list[int]] = {}
        for i, move in enumerate(moves):
            groups.setdefault((move.kind, move.axis), []).append(i)
        size = np.array([moved_bytes(self.type, m, self.machine.sizes) for m in moves])
        for (kind, axis), members in groups.items():
            # Along an axis of one device nothing is emitted; no move is free, or plans could make it at will.
            if self.machine.sizes[axis] == 1:
                seconds[members] += device.launch
            elif kind != "slice":
                ring = COLLECTIVES[kind](size[members], self.machine.sizes[axis], self.machine.links[axis])
                seconds[members] += ring + device.launch
        return seconds

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
        seconds = moved / (device.bandwidth * device.streaming) + (2 * (cast > 0) + before + after) * device.launch
        # Along an axis of one device nothing is emitted.
        return np.asarray(np.where([self.machine.sizes[m.axis] > 1 for m in moves], seconds, 0.0), dtype=np.float64)

    def _items(self, move: Move) -> tuple[int, int]:
        """Bytes of an element as it is copied before a move, and as it is read and written by a cast; 0 for no cast."""
        own, sent = self.type.dtype, sum_dtype(self.type) if reduces(move.kind) else self.type.dtype
        if sent != own:
            return item_bytes(sent), item_bytes(own) + item_bytes(sent)
        wired = own in WIRE and not reduces(move.kind) and move.kind != "slice"
        return item_bytes(own), item_bytes(own) + item_bytes(WIRE[own]) if wired else 0

    def _copies_before(self, move: Move) -> int:
        """Copies of what is moved: the factor that is split comes first, and all is row-major."""
        into = move.target[move.axis]
        if exchanges(move.source[move.axis], into):  # back into the order in which rows came
            return int(not isinstance(into, ByExpert))
        if move.kind in ("reduce_scatter", "all_to_all") and self._outer(move.source, into) > 1:
            return 1
        return int(self.type.relaid > 0 and move.kind != "all_reduce")

    def _copies_after(self, move: Move) -> int:
        """Copies of the result: the factor that was split comes back to its place; a slice is one, or two."""
        kind, out, into = move.kind, move.source[move.axis], move.target[move.axis]
        count = int(self.type.relaid > 1)
        if exchanges(out, into):  # into the order of experts
            return count + isinstance(into, ByExpert)
        if kind in ("all_gather", "all_to_all"):
            count += self._outer(move.source if kind == "all_gather" else move.target, out) > 1
        if kind == "slice":
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
    def apart(self) -> NDArray[np.float64]:
        """``[1 + axes, layouts, layouts]``: seconds of kernels, and of collectives on each axis, along each path."""
        distance, step, arcs = self._solved
        count, axes = len(self.layouts), len(self.machine.sizes)
        hops = np.zeros((1 + axes, count, count))
        moves = list(arcs.values())
        both = zip(self.local_seconds(moves), self.sent_seconds(moves), strict=True)
        for (a, b), move, (kernels, sent) in zip(arcs, moves, both, strict=True):
            hops[0, a, b], hops[1 + move.axis, a, b] = kernels, sent
        found = np.zeros_like(hops)
        target = np.tile(np.arange(count), (count, 1))
        at = np.where(np.isfinite(distance), target.T, target)
        while (at != target).any():
            following = step[at, target]
            found += np.where(at == target, 0.0, hops[:, at, following])
            at = np.where(at == target, at, following)
        return found

    def priced(
        self, rows: NDArray[np.int64], columns: NDArray[np.int64], prices: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Seconds from some layouts to others, each kind at a price; inf where there is no way.

        Args:
            rows: numbers of layouts, [A].
            columns: numbers of layouts, [B].
            prices: of kernels, and of collectives on each axis, for each column, [B, 1 + axes].
        """
        chosen = np.ix_(rows, columns)
        seconds: NDArray[np.float64] = self.seconds[chosen]
        if (prices == prices[:, :1]).all():
            return seconds * prices[:, 0]
        apart = self.apart[:, chosen[0], chosen[1]]
        return np.where(np.isfinite(seconds), np.einsum("kab,bk->ab", apart, prices), np.inf)

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


class Tables:
    """Redistribution tables on one machine, one for each type of tensor."""

    def __init__(self, machine: Machine) -> None:
        """Tables are made when they are asked for."""
        self.machine = machine

    def of(self, type_: TensorType) -> Redistributions:
        """The table of a type; types that differ in names or padding only share one."""
        # Names and padding change no cost. With them left out, thousands of tensors need a few tables.
        plain = tuple(tuple(Factor("", f.size) for f in dim) for dim in type_.dims)
        return _table(replace(type_, dims=plain, used=(), drawn=False), self.machine)


@remembered(256)
def _table(type_: TensorType, machine: Machine) -> Redistributions:
    return Redistributions(type_, machine)
