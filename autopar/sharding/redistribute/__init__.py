"""Redistribution: the cheapest sequence of single-axis moves from one layout of a tensor to another.

Moves are all-gather, reduce-scatter, all-reduce, all-to-all (also of rows by their experts), and local ones: a slice,
the rows of a device's own experts, and these put where they were among the others. Axes that split one factor nest in
mesh order, so only the innermost of them can be moved. Gradients in few bits may also be reduced along several axes
in a row, innermost first: what is sent across the outer ones, which are slow, is a part then. `moves` has the moves,
`move_seconds` what each takes, `shortest` how the cheapest sequences are found.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.costs.outer_exchange import quantized_bytes
from autopar.ir.layout import (
    ByExpert,
    Factor,
    Interleaved,
    Layout,
    Partial,
    Placement,
    Replicate,
    Split,
    TensorType,
    item_bytes,
)
from autopar.ir.quantized.axes import GRADIENTS, WEIGHTS
from autopar.rules.remembered import remembered
from autopar.sharding.candidates import split_parts
from autopar.sharding.redistribute.move_seconds import Kinds, MoveSeconds
from autopar.sharding.redistribute.moves import (
    Machine,
    Move,
    exchanges,
    innermost,
    move_kind,
    moved_bytes,
    reduces,
    sum_dtype,
)
from autopar.sharding.redistribute.shortest import Floats, Ints, ShortestPaths

MOST_KEPT = 600
"""Of up to so many layouts, which three axes have, the seconds of all pairs are kept, told apart; else of none."""

AROUND = 1e3
"""Seconds that no path takes."""

_QUANTIZED = {"all_gather": WEIGHTS, "reduce_scatter": GRADIENTS}
"""Kinds of moves that may be in few bits, and what they are of then."""


class Redistributions(MoveSeconds):
    """All moves of one type of tensor on one machine, and the cheapest sequences of them."""

    def __init__(self, type_: TensorType, machine: Machine) -> None:
        """Enumerate layouts; costs are computed when they are asked for."""
        super().__init__(type_, machine)
        self._alone: dict[Kinds, Floats] = {}
        self._kept: dict[Kinds, Floats] = {}
        self._joined: dict[tuple[int, int, Kinds], Floats] = {}

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
    def _arcs(self) -> list[tuple[Move, ...]]:
        """The moves, mostly one, that lead from a layout to another."""
        chains = self.chains()
        # Where axes inside can be reduced first, they are: fewer terms are rounded, and what costs alike is one rule.
        ends: dict[tuple[Layout, Placement], list[tuple[Move, ...]]] = {}
        for chain in chains:
            ends.setdefault(_end(chain), []).append(chain)
        every = [*((move,) for move in self.moves()), *chains]
        kept = (arc for arc in every if not any(_rounds_less(other, arc) for other in ends.get(_end(arc), ())))
        return list({(arc[0].source, arc[-1].target): arc for arc in kept}.values())

    @cached_property
    def _paths(self) -> ShortestPaths:
        ends = [(self.index[arc[0].source], self.index[arc[-1].target]) for arc in self._arcs]
        lengths = self._own(frozenset())[:, :-1].sum(0) + self._around
        return ShortestPaths(len(self.layouts), np.array(ends, dtype=np.int64).reshape(-1, 2), lengths)

    @cached_property
    def _around(self) -> Floats:
        """``[arcs]``: what keeps paths from arcs that get around few bits, where others lead there, too."""
        counts = [sum(map(self._gets_around, arc)) for arc in self._arcs]
        return AROUND * np.array(counts, dtype=np.float64)

    def _gets_around(self, move: Move) -> bool:
        """Whether a gradient is reduced in whole numbers, where few bits are asked for and its shards smaller so."""
        bits = self.machine.bits(move.axis, GRADIENTS) if self.type.message == GRADIENTS else 0
        if move.bits or not bits or not reduces(move.kind):
            return False
        shard = self.type.numel // (split_parts(move.source, self.machine.sizes) * self.machine.sizes[move.axis])
        return bool(quantized_bytes(shard, bits) < shard * item_bytes(sum_dtype(self.type)))

    def _of_arcs(self, of_moves: Floats) -> Floats:
        """What the moves of each arc have together, from what each of them has, in the last dim."""
        first = np.cumsum([0, *map(len, self._arcs)])[:-1]
        return np.add.reduceat(of_moves, first, axis=-1) if len(first) else of_moves

    def seconds(self, rows: Ints, columns: Ints) -> Floats:
        """``[A, B]``: time from some layouts to others; inf where there is no way (nothing becomes Partial)."""
        found = self._paths.lengths(rows, columns)
        if self._around.any():
            around = np.append(self._around, 0.0)  # the last one is of no arc
            for arc, _ in self._paths.backwards(rows, columns):
                found -= around[arc]
        return found

    def sliced(self, rows: Ints, columns: Ints) -> NDArray[np.bool_]:
        """``[A, B]``: whether nothing is sent along the path from one of some layouts to one of others."""
        local = np.array([*(all(move.kind == "slice" for move in arc) for arc in self._arcs), True], dtype=bool)
        found = np.isfinite(self.seconds(rows, columns))
        for arc, _ in self._paths.backwards(rows, columns):
            found &= local[arc]
        return found

    def apart(self, rows: Ints, columns: Ints, chunks: Kinds = frozenset()) -> Floats:
        """``[2 + 3 axes, A, B]``: along paths seconds as `chunked_seconds` tells them apart; zeros where there is none.

        Args:
            rows: numbers of the layouts that paths begin at, [A].
            columns: numbers of those that they lead to, [B].
            chunks: kinds of collectives that chunks of products may hide.
        """
        if len(self.layouts) > MOST_KEPT:
            return self._apart(rows, columns, chunks)
        if chunks not in self._kept:
            every = np.arange(len(self.layouts))
            self._kept[chunks] = self._apart(every, every, chunks)
        return self._kept[chunks][:, rows[:, None], columns]

    def _apart(self, rows: Ints, columns: Ints, chunks: Kinds) -> Floats:
        own = self._own(chunks)
        found = np.zeros((len(own), len(rows), len(columns)))
        for arc, before in self._paths.backwards(rows, columns):
            found += own[:, arc]
            if chunks:
                self._add_joined(found, before, arc, chunks)
        return found

    def _own(self, chunks: Kinds) -> Floats:
        """``[2 + 3 axes, arcs + 1]``: seconds of each arc by itself; the last one is none."""
        if chunks not in self._alone:
            moves = [move for arc in self._arcs for move in arc]
            found = self._of_arcs(self.apart_seconds(moves, self.units(moves, chunks)))
            self._alone[chunks] = np.concatenate([found, np.zeros((len(found), 1))], axis=1)
        return self._alone[chunks]

    def _add_joined(self, found: Floats, first: Ints, then: Ints, chunks: Kinds) -> None:
        """Add what two arcs in a row take less than each by itself, where chunks make one of them.

        Args:
            found: ``[2 + 3 axes, A, B]``, of paths.
            first: arcs, [A, B]; `NO_ARC` where there is none.
            then: the arcs after these.
            chunks: kinds of collectives that chunks of products may hide.
        """
        kinds, axes = self._kinds, len(self.machine.sizes)
        exchanges = (kinds[first] == kinds[then] - axes) & (kinds[first] >= 0) & (kinds[first] < 2 * axes)
        pairs, which = np.unique(np.stack([first[exchanges], then[exchanges]]), axis=1, return_inverse=True)
        if not pairs.size:
            return
        less = np.stack([self._less(int(a), int(b), chunks) for a, b in pairs.T], axis=1)
        found[:, exchanges] += less[:, which.reshape(-1)]

    @cached_property
    def _kinds(self) -> Ints:
        """A number for each arc; two in a row may be made one where the second has that of the first and the axes."""
        order, axes = ("reduce_scatter", "all_to_all", "all_gather"), len(self.machine.sizes)
        numbers = [
            order.index(arc[0].kind) * axes + arc[0].axis if len(arc) == 1 and arc[0].kind in order else -axes - 1
            for arc in self._arcs
        ]
        return np.array([*numbers, -axes - 1], dtype=np.int64)

    def _less(self, first: int, then: int, chunks: Kinds) -> Floats:
        """``[2 + 3 axes]``: what two arcs take together, without what each takes by itself."""
        key = first, then, chunks
        if key not in self._joined:
            (a,), (b,), own = self._arcs[first], self._arcs[then], self._own(chunks)
            together = self.chunked_seconds([a, b], chunks).sum(1)
            joined = self.joins(a, b, chunks)
            self._joined[key] = together - own[:, first] - own[:, then] if joined else np.zeros(len(own))
        return self._joined[key]

    def priced(self, rows: Ints, columns: Ints, prices: Floats, chunks: Kinds = frozenset()) -> Floats:
        """Seconds from some layouts to others, each kind at a price; inf where there is no way.

        Args:
            rows: numbers of layouts, [A].
            columns: numbers of layouts, [B].
            prices: of what `chunked_seconds` tells apart, for each column, [B, 2 + 3 axes].
            chunks: kinds of collectives that chunks of products may hide.
        """
        seconds = self.seconds(rows, columns)
        if (prices == prices[:, :1]).all():
            return seconds * prices[:, 0]
        # Prices differ by when a value is moved, so that they are few.
        different, which = np.unique(prices, axis=0, return_inverse=True)
        priced = np.tensordot(different, self.apart(rows, columns, chunks), 1)
        return np.where(np.isfinite(seconds), priced[which, :, np.arange(len(columns))].T, np.inf)

    def path(self, source: Layout, target: Layout) -> tuple[Move, ...]:
        """The cheapest moves from ``source`` to ``target``.

        Raises:
            ValueError: there are none, or the tensor cannot have one of the layouts.
        """
        strange = [layout for layout in (source, target) if layout not in self.index]
        if strange:
            raise ValueError(f"{self.type} cannot have the layout {strange[0]}")
        arcs = self._paths.path(self.index[source], self.index[target])
        if not arcs and source != target:
            raise ValueError(f"no way to redistribute {self.type} from {source} to {target}")
        return tuple(move for arc in arcs for move in self._arcs[arc])


def _end(arc: tuple[Move, ...]) -> tuple[Layout, Placement]:
    """Where moves begin, and the placement that they end with."""
    return arc[0].source, arc[-1].target[arc[-1].axis]


def _rounds_less(chain: tuple[Move, ...], arc: tuple[Move, ...]) -> bool:
    """Whether reductions are those of an arc, and first of all others along axes inside of what it rounds."""
    rounded = {move.axis for move in arc if move.bits}
    own, others = ({move.axis for move in moves} for moves in (arc, chain))
    inside = {axis for axis in others - own if rounded and axis > min(rounded)}
    return bool(inside) and own < others and rounded <= {move.axis for move in chain if move.bits}


class Tables:
    """Redistribution tables on one machine, one for each type of tensor."""

    def __init__(self, machine: Machine) -> None:
        """Tables are made when they are asked for."""
        self.machine = machine
        # By identity, which is found faster than what a type is equal to; the types are there so that it stays theirs.
        self._known: dict[int, tuple[TensorType, Redistributions]] = {}

    def of(self, type_: TensorType) -> Redistributions:
        """The table of a type; types that differ in names or padding only share one."""
        known = self._known.get(id(type_))
        if known is None:
            # Names and padding change no cost. With them left out, thousands of tensors need a few tables.
            plain = tuple(tuple(Factor("", f.size) for f in dim) for dim in type_.dims)
            message = type_.message if self.machine.quantized else ""
            table = _table(replace(type_, dims=plain, used=(), drawn=False, message=message), self.machine)
            known = self._known[id(type_)] = type_, table
        return known[1]


@remembered(256)
def _table(type_: TensorType, machine: Machine) -> Redistributions:
    return Redistributions(type_, machine)
