"""Redistribution: the cheapest sequence of single-axis moves from one layout of a tensor to another.

Moves are all-gather, reduce-scatter, all-reduce, all-to-all (also of rows by their experts), and local ones: a slice,
the rows of a device's own experts, and these put where they were among the others. Axes that split one factor nest in
mesh order, so only the innermost of them can be moved. Gradients in few bits may also be reduced along several axes
in a row, innermost first: what is sent across the outer ones, which are slow, is a part then. All pairs are found at
once: Floyd-Warshall over the tensor's layouts (R. W. Floyd, "Algorithm 97: Shortest path", 1962), in numpy. `moves` has
the moves, `move_seconds` what each takes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.ir.layout import ByExpert, Factor, Interleaved, Layout, Partial, Placement, Replicate, Split, TensorType
from autopar.ir.quantized.axes import GRADIENTS, WEIGHTS
from autopar.rules.remembered import remembered
from autopar.sharding.redistribute.move_seconds import Kinds, MoveSeconds
from autopar.sharding.redistribute.moves import Machine, Move, exchanges, innermost, move_kind, moved_bytes

Arcs = Mapping[tuple[int, int], tuple[Move, ...]]
"""The moves, mostly one, that lead from one layout to another, by their numbers."""

_QUANTIZED = {"all_gather": WEIGHTS, "reduce_scatter": GRADIENTS}
"""Kinds of moves that may be in few bits, and what they are of then."""


class Redistributions(MoveSeconds):
    """All moves of one type of tensor on one machine, and the cheapest sequences of them."""

    def __init__(self, type_: TensorType, machine: Machine) -> None:
        """Enumerate layouts; costs are computed when they are asked for."""
        super().__init__(type_, machine)
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

    def chains(self) -> list[tuple[Move, ...]]:
        """Reductions of a gradient along several axes, innermost first, of which some are in few bits (ZeRO++)."""
        if self.type.message != GRADIENTS:
            return []
        wide = [axis for axis, n in enumerate(self.machine.sizes) if n > 1]
        several = [axes for count in range(2, len(wide) + 1) for axes in itertools.combinations(wide, count)]
        splits = dict.fromkeys(p for layout in self.layouts for p in layout if type(p) is Split)
        every = ((s, axes, p) for axes in several for s in self.layouts for p in splits)
        found = [self._chain(source, axes, position) for source, axes, position in every]
        return [chain for chain in found if any(move.bits for move in chain)]

    def _chain(self, source: Layout, axes: tuple[int, ...], position: Split) -> tuple[Move, ...]:
        """The moves that split a sum over some axes along all of them; none where that is no layout."""
        target = tuple(position if axis in axes else p for axis, p in enumerate(source))
        fine = all(isinstance(source[axis], Partial) and self.type.may_move(source[axis], position) for axis in axes)
        # The factor's other axes are outside of these: blocks nest in mesh order.
        if not fine or target not in self.index or any(p == position for p in source[axes[0] :]):
            return ()
        found: list[Move] = []
        layout = source
        for axis in reversed(axes):
            outside = math.prod(self.machine.sizes[a] for a in axes if a < axis)
            placement = position if outside == 1 else Interleaved(position.dim, position.factor, outside)
            following = target if outside == 1 else (*layout[:axis], placement, *layout[axis + 1 :])
            found.append(self._in_few_bits(Move("reduce_scatter", axis, layout, following)))
            layout = following
        return tuple(found)

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
    def _solved(self) -> tuple[NDArray[np.float64], NDArray[np.int64], Arcs]:
        count = len(self.layouts)
        distance = np.full((count, count), np.inf)
        np.fill_diagonal(distance, 0.0)
        chains = self.chains()
        # Where axes inside can be reduced first, they are: fewer terms are rounded, and what costs alike is one rule.
        later = {(c[0].source, c[-1].axis, c[-1].target[c[-1].axis]) for c in chains if c[-1].bits}
        arcs: dict[tuple[int, int], tuple[Move, ...]] = {
            (self.index[m.source], self.index[m.target]): (m,)
            for m in self.moves()
            if not m.bits or (m.source, m.axis, m.target[m.axis]) not in later
        }
        arcs |= {(self.index[c[0].source], self.index[c[-1].target]): c for c in chains}
        seconds = iter(self.move_seconds([move for arc in arcs.values() for move in arc]).tolist())
        for (a, b), arc in arcs.items():
            distance[a, b] = sum(next(seconds) for _ in arc)
        return distance, _shortest(distance), arcs

    @property
    def seconds(self) -> NDArray[np.float64]:
        """``[layouts, layouts]``: time from row to column; inf where there is none (nothing becomes Partial)."""
        return self._solved[0]

    @cached_property
    def sliced(self) -> NDArray[np.bool_]:
        """``[layouts, layouts]``: whether nothing is sent along the path from row to column."""
        distance, step, arcs = self._solved
        local = np.eye(len(self.layouts), dtype=bool)
        for end, arc in arcs.items():
            local[end] = all(move.kind == "slice" for move in arc)
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
        ends = np.array([end for end, arc in arcs.items() for _ in arc], dtype=np.int64).reshape(-1, 2)
        own = self.chunked_seconds([move for arc in arcs.values() for move in arc], chunks)
        hops = np.zeros((len(own), count, count))
        np.add.at(hops, (slice(None), ends[:, 0], ends[:, 1]), own)  # type: ignore[arg-type]
        # What two moves in a row take less than each by itself, if these are the next on the way to a target.
        less = np.zeros_like(hops)
        for (a, b), (_, c) in self._pairs(arcs, chunks):
            together = self.chunked_seconds([*arcs[a, b], *arcs[b, c]], chunks).sum(1)
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

    def _pairs(self, arcs: Arcs, chunks: Kinds) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """Moves in a row that chunks make one of."""
        kinds = {"all_to_all": "all_gather", "reduce_scatter": "all_to_all"}
        following: dict[tuple[int, int, str], list[tuple[int, int]]] = {}
        single = {end: arc[0] for end, arc in arcs.items() if len(arc) == 1}
        for end, move in single.items() if chunks else ():
            if move.kind in kinds.values():
                following.setdefault((end[0], move.axis, move.kind), []).append(end)
        for first, move in single.items() if following else ():
            for then in following.get((first[1], move.axis, kinds.get(move.kind, "")), ()):
                if self._joined_units(move, single[then], chunks):
                    yield first, then

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
        found: list[Move] = []
        while a != b:
            hop = int(step[a, b])
            found += arcs[a, hop]
            a = hop
        return tuple(found)


_FEW = 0.35
"""Share of all pairs below which the pairs that a layout may be between are picked out: of sums, few."""


def _shortest(distance: NDArray[np.float64]) -> NDArray[np.int64]:
    """Make distances of single moves those of the shortest paths; the first hop from row towards column."""
    count = len(distance)
    step = np.tile(np.arange(count), (count, 1))
    # Floyd-Warshall, rows and columns at once: paths through the first k layouts.
    for k in range(count):
        rows, columns = np.flatnonzero(np.isfinite(distance[:, k])), np.flatnonzero(np.isfinite(distance[k]))
        if few := len(rows) * len(columns) < _FEW * count * count:
            through, known = distance[rows, k, None] + distance[k, columns], distance[np.ix_(rows, columns)]
        else:
            through, known = distance[:, k, None] + distance[None, k, :], distance
        # Strictly shorter only: among equal paths the first one found stays, in every process.
        better = through < known
        if few:
            a, b = np.nonzero(better)
            distance[rows[a], columns[b]] = through[a, b]
            step[rows[a], columns[b]] = step[rows[a], k]
        elif better.any():
            np.copyto(distance, through, where=better)
            np.copyto(step, step[:, k, None], where=better)
    return step


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
