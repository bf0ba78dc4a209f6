"""Shortest paths in a graph of few arcs, from the nodes that are asked for.

Bellman-Ford in numpy, some sources at once: all arcs into a node are a row of one array, and a round gives every path
one arc more (R. Bellman, "On a routing problem", 1958). On four mesh axes a tensor has up to two thousand layouts, of
which a search asks for a few dozen: all pairs of them take minutes. (SciPy, which has the same from chosen nodes, is
no dependency; networkx takes an object for each arc.)
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NO_ARC = -1
"""In place of an arc: that of a path that has none, or none more."""

_AT_ONCE = 1 << 22
"""Entries of the array of a round: more do not stay in the processor's cache."""


class ShortestPaths:
    """Paths between the nodes of a graph; those from a node are found when they are first asked for."""

    def __init__(self, count: int, ends: Ints, lengths: Floats) -> None:
        """Take the graph.

        Args:
            count: of nodes.
            ends: the nodes that each arc leads from and to, [arcs, 2].
            lengths: of the arcs, above zero, [arcs].
        """
        self.count = count
        # The last arc stands for none: it leads from node 0, and is endless.
        self._from = np.append(ends[:, 0], 0)
        self._length = np.append(lengths, np.inf)
        order = np.argsort(ends[:, 1], kind="stable")
        degree = np.bincount(ends[:, 1], minlength=count)
        place = np.arange(len(order)) - np.repeat(np.cumsum(degree) - degree, degree)
        self._into = np.full((count, max(1, int(degree.max(initial=0)))), len(ends))
        self._into[ends[order, 1], place] = order
        self._known = np.zeros(count, dtype=bool)
        # Rows are written when they are known: what is never written takes no memory.
        self._seconds = np.empty((count, count))
        self._last = np.empty((count, count), dtype=np.int32)

    def lengths(self, rows: Ints, columns: Ints) -> Floats:
        """``[A, B]``: from each of some nodes to each of some others; inf where there is no path."""
        self._find(rows)
        return self._seconds[np.ix_(rows, columns)]

    def backwards(self, rows: Ints, columns: Ints) -> Iterator[tuple[Ints, Ints]]:
        """The arcs of the paths between nodes, the last ones first.

        Args:
            rows: nodes that paths begin at, [A].
            columns: nodes that they lead to, [B].

        Yields:
            ``[A, B]`` twice: an arc of each path, and the one before it; `NO_ARC` where a path has none.
        """
        self._find(rows)
        own = rows[:, None]
        arc = self._last[own, columns[None, :]].astype(np.int64)
        while (arc != NO_ARC).any():
            at = np.where(arc == NO_ARC, own, self._from[arc])
            before = self._last[own, at].astype(np.int64)
            yield arc, before
            arc = before

    def path(self, source: int, target: int) -> list[int]:
        """The arcs from one node to another, in their order; empty where there is no path."""
        self._find(np.array([source]))
        last, found, at = self._last[source], list[int](), target
        while (arc := int(last[at])) != NO_ARC:
            found.append(arc)
            at = int(self._from[arc])
        return found[::-1]

    def _find(self, sources: Ints) -> None:
        if self._known[sources].all():
            return
        missing = np.unique(sources[~self._known[sources]])
        few = max(1, _AT_ONCE // self._into.size)
        for start in range(0, len(missing), few):
            self._find_some(missing[start : start + few])

    def _find_some(self, sources: Ints) -> None:
        # A row for each node, so that what is gathered lies in a row.
        distance = np.full((self.count, len(sources)), np.inf)
        distance[sources, np.arange(len(sources))] = 0.0
        last = np.full(distance.shape, NO_ARC, dtype=np.int32)
        near = np.zeros(self.count, dtype=bool)
        near[sources] = True
        while near.any():
            # Nodes that an arc leads to from one whose paths became shorter.
            nodes = np.flatnonzero(near[self._from[self._into]].any(1))
            into = self._into[nodes]
            through = distance[self._from[into]] + self._length[into][:, :, None]
            best = through.argmin(1)
            shortest = np.take_along_axis(through, best[:, None, :], 1)[:, 0]
            # Strictly shorter only: among equal paths one of the fewest arcs stays, in every process.
            better = shortest < distance[nodes]
            distance[nodes] = np.where(better, shortest, distance[nodes])
            last[nodes] = np.where(better, np.take_along_axis(into, best, 1), last[nodes])
            near[:] = False
            near[nodes] = better.any(1)
        self._seconds[sources], self._last[sources], self._known[sources] = distance.T, last.T, True
