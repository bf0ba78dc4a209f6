"""Seconds of moves: of collectives, of the kernels around them, and of what chunks of a product hide."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.costs.cluster import Link
from autopar.costs.collectives import COLLECTIVES
from autopar.costs.kernels import host_wait_seconds
from autopar.costs.outer_exchange import dequantizing, quantizing
from autopar.ir.layout import (
    ByExpert,
    Factor,
    Interleaved,
    Layout,
    Placement,
    Split,
    TensorType,
    item_bytes,
)
from autopar.sharding.candidates import layouts
from autopar.sharding.redistribute.moves import (
    LOCAL_MOVES,
    OWN_ROWS,
    PLACE_ROWS,
    SLICE,
    WIRE,
    Machine,
    Move,
    exchanges,
    held_parts,
    moved_bytes,
    reduces,
    sent_whole,
    shard_of,
    sum_dtype,
)

Kinds = frozenset[str]
"""Kinds of moves."""

PIECES, MOST_UNITS = 8, 64
"""A sum over devices may be cut anywhere: into so many pieces, or fewer where rows do not divide. Of more units than
the second no chunks are looked for: each would be sent in a message of its own."""


class MoveSeconds:
    """What each move of one type of tensor on one machine takes."""

    def __init__(self, type_: TensorType, machine: Machine) -> None:
        """Enumerate layouts; costs are computed when they are asked for."""
        self.type = type_
        self.machine = machine
        self.layouts = layouts(type_, machine.sizes)
        self.index = {layout: i for i, layout in enumerate(self.layouts)}

    def _number(self, layout: Layout) -> int:
        """Of a layout, or of the one with as large blocks where it is one on the way only."""
        plain = tuple(Split(p.dim, p.factor) if isinstance(p, Interleaved) else p for p in layout)
        return self.index[plain]

    @cached_property
    def parts(self) -> NDArray[np.float64]:
        """Into how many blocks each layout cuts the tensor; less where some devices' experts have more rows."""
        sizes, load = self.machine.sizes, self.machine.load
        return np.array([held_parts(layout, sizes, load) for layout in self.layouts], dtype=np.float64)

    def move_seconds(self, moves: Sequence[Move]) -> NDArray[np.float64]:
        """Time of each move: what `autopar.sharding.emit.MoveEmitter` emits, collective and kernels, with launches."""
        found: NDArray[np.float64] = self.apart_seconds(moves).sum(0)
        return found

    def _sent_seconds(
        self, moves: Sequence[Move], size: NDArray[np.float64], links: Sequence[Link], launch: float
    ) -> NDArray[np.float64]:
        """The part of each move that its collective takes."""
        seconds = np.zeros(len(moves))
        groups: dict[tuple[str, int], list[int]] = {}
        for i, move in enumerate(moves):
            groups.setdefault((move.collective, move.axis), []).append(i)
        for (kind, axis), members in groups.items():
            # Along an axis of one device nothing is emitted; no move is free, or plans could make it at will.
            if self.machine.sizes[axis] == 1:
                seconds[members] += launch
            elif kind not in LOCAL_MOVES:
                ring = COLLECTIVES[kind](size[members], self.machine.sizes[axis], links[axis])
                seconds[members] += ring + launch
        return seconds

    def _moved_bytes(self, moves: Sequence[Move], ends: NDArray[np.int64]) -> NDArray[np.float64]:
        """`moved_bytes` of each move, by the parts that are known already."""
        kinds = {move.kind: sent_whole(self.type, move) for move in moves}
        found: NDArray[np.float64] = np.array([kinds[move.kind] for move in moves]) / self.parts[ends].min(1)
        for i, move in enumerate(moves):
            if move.bits:
                found[i] = moved_bytes(self.type, move, self.machine.sizes, self.machine.load)
        return found

    def _ends(self, moves: Sequence[Move]) -> NDArray[np.int64]:
        """``[moves, 2]``: the numbers of the layouts before and after each move."""
        found = [(self._number(move.source), self._number(move.target)) for move in moves]
        return np.array(found, dtype=np.int64).reshape(-1, 2)

    def local_seconds(self, moves: Sequence[Move]) -> NDArray[np.float64]:
        """The part of each move that the device's own kernels take: casts, and copies to and from a collective's order.

        Collectives exchange blocks of the first dim: a factor that has others before it is brought there, or back from
        there, by a copy. A slice is always one. What is not row-major is copied besides, see `TensorType.relaid`.
        """
        return self._local_seconds(moves, self._ends(moves))

    def launches(self, moves: Sequence[Move]) -> NDArray[np.float64]:
        """How many of the device's own kernels each move has; none along an axis of one device."""
        kernels = self._local_kernels(moves, self._ends(moves))[1]
        return np.where([self.machine.sizes[m.axis] > 1 for m in moves], kernels, 0.0)

    def _local_seconds(self, moves: Sequence[Move], ends: NDArray[np.int64]) -> NDArray[np.float64]:
        if not moves:
            return np.zeros(0)
        device, (moved, kernels) = self.machine.device, self._local_kernels(moves, ends)
        seconds = moved / (device.bandwidth * device.streaming) + kernels * device.launch
        # Counts of experts' rows are moved once for all rows that are sorted together, and the host waits for them.
        if self.type.experts and not self.type.routed:
            waits = [isinstance(m.target[m.axis], ByExpert) for m in moves]
            seconds = seconds + host_wait_seconds(device) * np.array(waits, dtype=np.float64)
        # Along an axis of one device nothing is emitted.
        return np.asarray(np.where([self.machine.sizes[m.axis] > 1 for m in moves], seconds, 0.0), dtype=np.float64)

    def _local_kernels(
        self, moves: Sequence[Move], ends: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Bytes that the device's own kernels of each move read and write, and how many these are; ``moves``: some."""
        own = item_bytes(self.type.dtype)
        sent, cast = (np.array(column, dtype=np.float64) for column in zip(*map(self._items, moves), strict=True))
        numbers: list[list[int]] = ends.tolist()
        before, after = (
            np.array([count(m, *of) for m, of in zip(moves, numbers, strict=True)], dtype=np.float64)
            for count in (self._copies_before, self._copies_after)
        )
        source, target = (self.type.numel / self.parts[ends]).T
        moved = source * (cast + 2 * sent * before) + target * (cast + 2 * own * after)
        kernels = 2 * (cast > 0) + before + after
        for i, move in enumerate(moves):
            if move.bits:
                moved[i], kernels[i] = self._quantizing(move, int(before[i]), int(after[i]))
        return moved, kernels

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

    def _copies_before(self, move: Move, source: int, target: int) -> int:
        """Copies of what is moved from a layout to another: the factor that is split comes first; all is row-major."""
        into = move.target[move.axis]
        if move.kind in (OWN_ROWS, PLACE_ROWS):
            return int(move.kind == PLACE_ROWS)
        if exchanges(move.source[move.axis], into):  # back into the order in which rows came
            return int(not isinstance(into, ByExpert))
        if isinstance(into, Interleaved):
            return 1
        if move.kind in ("reduce_scatter", "all_to_all") and self._outer(source, into) > 1:
            return 1
        return int(self.type.relaid > 0 and move.kind != "all_reduce")

    def _copies_after(self, move: Move, source: int, target: int) -> int:
        """Copies of the result: the factor that was split comes back to its place; a slice is one, or two."""
        kind, out, into = move.kind, move.source[move.axis], move.target[move.axis]
        count = int(self.type.relaid > 1)
        if kind in (OWN_ROWS, PLACE_ROWS):
            return 1
        if exchanges(out, into):  # into the order of experts
            return count + isinstance(into, ByExpert)
        if kind in ("all_gather", "all_to_all"):
            count += self._outer(source if kind == "all_gather" else target, out) > 1
        if kind == SLICE:
            assert isinstance(into, Split)
            # Before its own there is another one where blocks of other factors of its dim do not follow one another.
            outer, end = self._outer(target, into), self._outer(target, Split(into.dim + 1))
            count += 1 + (end > outer > self._outer(target, Split(into.dim)))
        return count

    def _outer(self, layout: int, position: Placement) -> int:
        """Local elements of the dims and factors before the one at a position."""
        assert isinstance(position, Split)
        return self._before[layout][self._column[position.dim, position.factor]]

    @cached_property
    def _column(self) -> dict[tuple[int, int], int]:
        every = [(d, j) for d, dim in enumerate(self.type.dims) for j in range(max(1, len(dim)))]
        every.append((len(self.type.dims), 0))  # after the last dim
        return {position: i for i, position in enumerate(every)}

    @cached_property
    def _before(self) -> list[list[int]]:
        """``[layouts, factors + 1]``: local elements of all factors before each, and of all."""
        sizes = [f.size for dim in self.type.dims for f in (dim or (Factor("", 1),))]
        local = np.tile(np.array(sizes, dtype=np.int64), (len(self.layouts), 1))
        for i, layout in enumerate(self.layouts):
            for placement, n in zip(layout, self.machine.sizes, strict=True):
                if isinstance(placement, Split):
                    local[i, self._column[placement.dim, placement.factor]] //= n
        found = np.cumprod(np.concatenate([np.ones((len(local), 1), dtype=np.int64), local], axis=1), axis=1)
        return found.tolist()  # type: ignore[no-any-return]

    def chunked_seconds(self, moves: Sequence[Move], chunks: Kinds = frozenset()) -> NDArray[np.float64]:
        """``[2 + 3 axes, moves]``: at least what moves of a value take, one after the other, told apart.

        Seconds of kernels, then of what collectives send on each axis, then on each axis of those that chunks of a
        product hide at the most: all but the first chunk. Chunks need no exchange that only makes another dim the
        first, nor copies. Then latency and launches on each axis, which are among what is sent where there are chunks;
        and in the end waits.

        Args:
            moves: in their order.
            chunks: kinds of collectives beside which there is a product of their rows.
        """
        gone: set[int] = set()
        units = self.units(moves, chunks)
        for i, (move, then) in enumerate(itertools.pairwise(moves)):
            joined = self.joins(move, then, chunks)
            if joined:
                exchange = i if move.kind == "all_to_all" else i + 1
                gone.add(exchange)
                units[2 * i + 1 - exchange] = joined
        found = self.apart_seconds(moves, units)
        found[:, sorted(gone)] = 0
        return found

    def apart_seconds(self, moves: Sequence[Move], units: Sequence[int] = ()) -> NDArray[np.float64]:
        """The same of moves that do not follow one another, each in its number of pieces."""
        axes, ends, (sizes, links) = (
            len(self.machine.sizes),
            self._ends(moves),
            (self.machine.sizes, self.machine.links),
        )
        found, size = np.zeros((2 + 3 * axes, len(moves))), self._moved_bytes(moves, ends)
        found[0], found[-1] = self._local_seconds(moves, ends), self._waits(moves)
        # Values that are sent together take latency and launch once.
        sent = self._sent_seconds(moves, size, links, self.machine.device.launch)
        alone = self._sent_seconds(moves, size, tuple(map(_without_latency, links)), 0)
        axis, every = np.array([move.axis for move in moves], dtype=np.int64), np.arange(len(moves))
        found[1 + axis, every], found[1 + 2 * axes + axis, every] = alone, sent - alone
        for i, move in ((i, moves[i]) for i, pieces in enumerate(units) if pieces > 1):
            first = float(COLLECTIVES[move.collective](size[i] / units[i], sizes[move.axis], links[move.axis]))
            first = min(first + self.machine.device.launch, float(sent[i]))
            found[1 + axes + move.axis, i] = sent[i] - first
            found[0, i], found[1 + move.axis, i], found[1 + 2 * axes + move.axis, i] = 0, first, 0
        return found

    def _waits(self, moves: Sequence[Move]) -> NDArray[np.float64]:
        """For how long kernels wait for the collective of each move besides, where it does not hide."""
        sizes, links = self.machine.sizes, self.machine.links
        return np.array([links[m.axis].wait if m.kind not in LOCAL_MOVES and sizes[m.axis] > 1 else 0.0 for m in moves])

    def units(self, moves: Sequence[Move], chunks: Kinds) -> list[int]:
        """Into how many pieces chunks may cut each move's collective; 0: it stays whole."""
        return [self._units(move, chunks) for move in moves] if chunks else []

    def _units(self, move: Move, chunks: Kinds) -> int:
        """Into how many pieces chunks may cut a move's collective; 0: it stays whole."""
        if not chunks or move.kind not in chunks or self.machine.sizes[move.axis] == 1:
            return 0
        return PIECES if move.kind == "all_reduce" else self._blocks(move.source, move.target, move.axis)

    def joins(self, move: Move, then: Move, chunks: Kinds) -> int:
        """The same of two moves, one of which only exchanges blocks for the other, which is then left out."""
        gathers = (move.kind, then.kind) == ("all_to_all", "all_gather")
        if not chunks or move.axis != then.axis or move.target != then.source or self.machine.sizes[move.axis] == 1:
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
        blocks = self._outer(self._number(layout), split)
        # Of one axis alone, which stands for a mesh of several: others may split the blocks.
        return min(blocks, MOST_UNITS) if 2 <= blocks <= MOST_UNITS or len(layout) == 1 else 0


def _without_latency(link: Link) -> Link:
    return replace(link, latency=1e-30)
