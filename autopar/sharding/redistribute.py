"""Redistribution: the cheapest sequence of single-axis moves from one layout of a tensor to another.

Moves are all-gather, reduce-scatter, all-reduce, all-to-all and a local slice. Axes that split one factor nest in mesh
order, so only the innermost of them can be moved. All pairs are found at once: Floyd-Warshall over the tensor's layouts
(R. W. Floyd, "Algorithm 97: Shortest path", 1962), in numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.costs.cluster import Device, Link
from autopar.costs.collectives import COLLECTIVES
from autopar.ir.layout import Factor, Layout, Partial, Placement, Replicate, Split, TensorType, item_bytes
from autopar.sharding.candidates import layouts, split_parts


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


@dataclass(frozen=True)
class Move:
    """One single-axis step of a redistribution.

    Attributes:
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all`` or ``slice``.
        axis: index of the mesh axis.
        source: layout before.
        target: layout after.
    """

    kind: str
    axis: int
    source: Layout
    target: Layout


def move_kind(source: Placement, target: Placement) -> str | None:
    """The collective that turns one placement into another on one axis; None if there is none."""
    # Nothing becomes Partial: whoever takes the terms would only have to add them up again.
    if isinstance(source, Split):
        return {Replicate: "all_gather", Split: "all_to_all"}.get(type(target))
    if isinstance(source, Partial):
        return {Replicate: "all_reduce", Split: "reduce_scatter"}.get(type(target))
    return "slice" if isinstance(target, Split) else None


def innermost(layout: Layout, axis: int) -> bool:
    """Whether no later axis splits the factor that ``axis`` splits, so that its blocks are contiguous."""
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
        # Blocks of an outer axis are not contiguous while an inner axis splits the same factor.
        if other == placement or (isinstance(placement, Split) and not innermost(source, axis)):
            return None
        kind, target = move_kind(placement, other), (*source[:axis], other, *source[axis + 1 :])
        if not kind or target not in self.index or not (isinstance(other, Replicate) or innermost(target, axis)):
            return None
        return Move(kind, axis, source, target)

    @cached_property
    def parts(self) -> NDArray[np.int64]:
        """Into how many blocks each layout cuts the tensor."""
        return np.array([split_parts(layout, self.machine.sizes) for layout in self.layouts], dtype=np.int64)

    def move_seconds(self, moves: Sequence[Move]) -> NDArray[np.float64]:
        """Time of each move: the collective, a launch and a pass over the local tensor; casts around it, if any."""
        found: NDArray[np.float64] = self.seconds_apart(moves).sum(axis=0)
        return found

    def seconds_apart(self, moves: Sequence[Move]) -> NDArray[np.float64]:
        """``[2, moves]``: time of each move's kernels, and of its collective."""
        device = self.machine.device
        cast = np.array([reduces(m.kind) and sum_dtype(self.type) != self.type.dtype for m in moves], dtype=bool)
        item = np.where(cast, item_bytes(sum_dtype(self.type)), item_bytes(self.type.dtype))
        ends = np.array([(self.index[m.source], self.index[m.target]) for m in moves], dtype=np.int64).reshape(-1, 2)
        size = self.type.numel * item / self.parts[ends].min(axis=1)
        # Casts to and from the dtype of the sum are a pass each, besides the copy into the collective's order.
        passes = np.where(cast, 3, 1)
        kernels = np.asarray(passes * (device.launch + size / (device.bandwidth * device.streaming)), dtype=np.float64)
        sent = np.zeros_like(kernels)
        groups: dict[tuple[str, int], list[int]] = {}
        for i, move in enumerate(moves):
            groups.setdefault((move.kind, move.axis), []).append(i)
        for (kind, axis), members in groups.items():
            # A slice communicates nothing; its launch and pass are counted above.
            if kind != "slice":
                collective = COLLECTIVES[kind]
                sent[members] = collective(size[members], self.machine.sizes[axis], self.machine.links[axis])
        return np.array([kernels, sent])

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
    def _apart(self) -> NDArray[np.float64]:
        """``[1 + axes, layouts, layouts]``: seconds of kernels, and of collectives on each axis, along each path."""
        distance, step, arcs = self._solved
        count, axes = len(self.layouts), len(self.machine.sizes)
        hops = np.zeros((1 + axes, count, count))
        moves = list(arcs.values())
        for (a, b), move, (kernels, sent) in zip(arcs, moves, self.seconds_apart(moves).T, strict=True):
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
        apart = self._apart[:, chosen[0], chosen[1]]
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


@lru_cache(maxsize=256)
def _table(type_: TensorType, machine: Machine) -> Redistributions:
    return Redistributions(type_, machine)
