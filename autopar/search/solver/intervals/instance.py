"""The problem: nodes with labels, costs of labels and of pairs, and for each node the points that it lives at."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.search.solver.problem import Floats, Ints


@dataclass(frozen=True)
class Instance:
    """Minimize costs of labels and pairs, with at most `limit` bytes of the chosen labels at each program point.

    Labels of all nodes are in one array, those of node i at `first[i]:first[i + 1]`; so are the tables of edges.

    Attributes:
        first: of each node, its first label, [n + 1].
        cost: of each label, inf where it is forbidden, [L].
        memory: of each label, in bytes, [L].
        begin: the program point from which on a node lives, [n].
        end: the one before which it ends; no later than `begin`: it takes no memory, [n].
        limit: bytes at each program point, [points]; less than nothing: no labels fit.
        u: first node of each edge, [E].
        v: second node, another one, [E].
        table: costs of pairs, of one edge after the other, each row by row of u's labels; inf: forbidden.
    """

    first: Ints
    cost: Floats
    memory: Floats
    begin: Ints
    end: Ints
    limit: Floats
    u: Ints
    v: Ints
    table: Floats

    def __post_init__(self) -> None:
        nodes, sizes = len(self.first) - 1, np.diff(self.first)
        if nodes < 1 or self.first[0] or (sizes < 1).any():
            raise ValueError(f"each of the {nodes} nodes needs a label")
        if not len(self.cost) == len(self.memory) == self.first[-1]:
            raise ValueError(f"{self.first[-1]} labels have {len(self.cost)} costs and {len(self.memory)} sizes")
        if not len(self.begin) == len(self.end) == nodes or (self.begin < 0).any():
            raise ValueError(f"each of the {nodes} nodes needs an interval that does not begin before 0")
        if np.isnan(self.cost).any() or np.isnan(self.table).any():
            raise ValueError("costs must be numbers or inf")
        if not np.isfinite(self.memory).all() or (self.memory < 0).any() or not np.isfinite(self.limit).all():
            raise ValueError("memory must be finite and not negative, and limits finite")
        if self.points < int(self.end.max()):
            raise ValueError(f"intervals end at {int(self.end.max())}, and limits at {self.points}")
        for name, ends in (("u", self.u), ("v", self.v)):
            if len(ends) and not 0 <= int(ends.min()) <= int(ends.max()) < nodes:
                raise ValueError(f"an edge's {name} is no node of 0 to {nodes - 1}")
        if (self.u == self.v).any():
            raise ValueError(
                f"edge {int(np.argmax(self.u == self.v))} has one node; add its diagonal to the node's cost"
            )
        if len(self.table) != int((sizes[self.u] * sizes[self.v]).sum()):
            raise ValueError(f"{len(self.table)} costs of pairs for {int((sizes[self.u] * sizes[self.v]).sum())} pairs")

    @cached_property
    def sizes(self) -> Ints:
        """How many labels each node has, [n]."""
        found: Ints = np.diff(self.first)
        return found

    def sizes_of(self, node: int) -> int:
        """How many labels a node has."""
        return int(self.first[node + 1] - self.first[node])

    @cached_property
    def edge_first(self) -> Ints:
        """Where each edge's table begins, [E + 1]."""
        entries = self.sizes[self.u] * self.sizes[self.v]
        return np.concatenate([[0], np.cumsum(entries)]).astype(np.int64)

    @property
    def points(self) -> int:
        """How many program points there are."""
        return len(self.limit)

    def value(self, labels: Ints) -> float:
        """What labels cost, inf where they use a forbidden one or a forbidden pair.

        Args:
            labels: of each node, from 0, [n].
        """
        pairs = self.table[self.edge_first[:-1] + labels[self.u] * self.sizes[self.v] + labels[self.v]]
        return float(self.cost[self.first[:-1] + labels].sum() + pairs.sum())

    def alive(self, point: int) -> NDArray[np.bool_]:
        """Whether each node lives at a program point, [n]."""
        found: NDArray[np.bool_] = (self.begin <= point) & (point < self.end)
        return found

    def usage(self, labels: Ints) -> Floats:
        """Bytes at each program point, [points]."""
        return self.over_points(self.memory[self.first[:-1] + labels])

    def over_points(self, of_nodes: Floats) -> Floats:
        """The sum of a value of each node over those that live at a point, [points]."""
        change, lives = np.zeros(self.points + 1), self.begin < self.end
        np.add.at(change, self.begin[lives], of_nodes[lives])
        np.add.at(change, self.end[lives], -of_nodes[lives])
        found: Floats = np.cumsum(change)[:-1]
        return found

    def fits(self, labels: Ints) -> bool:
        """Whether no program point exceeds the limit, up to rounding."""
        return bool((self.usage(labels) <= self.limit + self.tolerance).all())

    @cached_property
    def tolerance(self) -> float:
        """Bytes that sums of bytes may be off by."""
        return 1e-12 * float(np.abs(self.limit).max())

    def exceeded(self, labels: Ints) -> list[int]:
        """The worst point of each run of points that exceed their limits, the worst first."""
        over = self.usage(labels) - self.limit
        above = np.flatnonzero(over > self.tolerance)
        runs = np.split(above, np.flatnonzero(np.diff(above) > 1) + 1) if len(above) else []
        return sorted((int(run[over[run].argmax()]) for run in runs), key=lambda p: -over[p])

    def largest_live_sets(self) -> Ints:
        """Program points whose nodes are not all alive at another one: no other limit can bind alone."""
        lives = self.begin < self.end
        begins = np.zeros(self.points + 1, dtype=bool)
        begins[self.begin[lives]] = True
        ends = np.zeros(self.points + 1, dtype=bool)
        ends[self.end[lives]] = True
        # Of the points between two at which something ends, the last one at which something begins has all of them.
        last_begin = np.maximum.accumulate(np.where(begins, np.arange(self.points + 1), -1))
        at = np.flatnonzero(ends)
        found = last_begin[at - 1]
        return np.unique(found[found >= np.concatenate([[0], at[:-1]])]).astype(np.int64)
