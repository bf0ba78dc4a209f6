"""Smaller instances of the same values: edges that say nothing go, and nodes that have one label left."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.search.solver.intervals.instance import Instance
from autopar.search.solver.problem import Floats, Ints


@dataclass(frozen=True)
class Entries:
    """Of each entry of an instance's tables: its edge, and its two labels, from 0 in their nodes."""

    edge: Ints
    of_u: Ints
    of_v: Ints

    @staticmethod
    def of(instance: Instance) -> Entries:
        """Those of an instance."""
        edge = np.repeat(np.arange(len(instance.u)), np.diff(instance.edge_first))
        within = np.arange(len(instance.table)) - instance.edge_first[edge]
        columns = instance.sizes[instance.v][edge]
        return Entries(edge, within // columns, within % columns)


def without_separable(instance: Instance) -> Instance:
    """The same costs of labelings by fewer edges: a table that is a column plus a row goes to the labels' own costs."""
    if not len(instance.u):
        return instance
    at, table, corner = Entries.of(instance), instance.table, instance.edge_first[:-1]
    first = corner[at.edge]
    row, column = table[first + at.of_u * instance.sizes[instance.v][at.edge]], table[first + at.of_v]
    finite = np.logical_and.reduceat(np.isfinite(table), corner)
    largest = np.maximum.reduceat(np.where(np.isfinite(table), np.abs(table), 0.0), corner)
    with np.errstate(invalid="ignore"):  # inf - inf: not finite, and stays
        off = np.maximum.reduceat(np.abs(table - row - column + table[first]), corner)
    goes = finite & (off <= 1e-12 * largest)
    cost = instance.cost.copy()
    rows, columns = (np.flatnonzero(goes[at.edge] & (x == 0)) for x in (at.of_v, at.of_u))
    np.add.at(cost, instance.first[instance.u[at.edge[rows]]] + at.of_u[rows], table[rows])
    np.add.at(
        cost, instance.first[instance.v[at.edge[columns]]] + at.of_v[columns], table[columns] - table[first[columns]]
    )
    return replace(instance, cost=cost, u=instance.u[~goes], v=instance.v[~goes], table=table[~goes[at.edge]])


@dataclass(frozen=True)
class Restricted:
    """What is left to choose where only some labels may be taken.

    Attributes:
        instance: of the nodes that have two labels or more.
        nodes: these, in the original.
        kept: their labels, as positions among all labels of the original.
        labels: of each node of the original, its first allowed label.
        constant: what the nodes of one label cost, alone and with each other.
    """

    instance: Instance
    nodes: Ints
    kept: Ints
    labels: Ints
    constant: float

    def spread(self, original: Instance, labels: Ints) -> Ints:
        """Labels of all nodes of the original from those of the instance."""
        found = self.labels.copy()
        found[self.nodes] = self.kept[self.instance.first[:-1] + labels] - original.first[self.nodes]
        return found

    def narrowed(self, original: Instance, labels: Ints) -> Ints:
        """The other way."""
        found: Ints = np.searchsorted(self.kept, original.first[self.nodes] + labels[self.nodes])
        return found - self.instance.first[:-1]


def restrict(instance: Instance, entries: Entries, allowed: NDArray[np.bool_]) -> Restricted | None:
    """Fix nodes of one allowed label: their pairs become costs of the labels around, and their bytes lower the limits.

    Args:
        instance: the problem.
        entries: its.
        allowed: whether each label may be taken, at least one of each node, [L].

    Returns:
        None where all nodes are fixed.
    """
    owner = np.repeat(np.arange(len(instance.begin)), instance.sizes)
    count = np.bincount(owner, allowed, len(instance.begin)).astype(np.int64)
    free = count > 1
    if not free.any():
        return None
    every = np.flatnonzero(allowed)
    labels = every[np.concatenate([[0], np.cumsum(count)[:-1]])] - instance.first[:-1]
    left = instance.first[instance.u][entries.edge] + entries.of_u
    right = instance.first[instance.v][entries.edge] + entries.of_v
    possible = allowed[left] & allowed[right]
    both = free[instance.u] & free[instance.v]
    inner, outer = np.flatnonzero(possible & both[entries.edge]), np.flatnonzero(possible & ~both[entries.edge])
    takes = np.where(free[instance.u][entries.edge[outer]], left[outer], right[outer])
    cost = instance.cost + np.bincount(takes, instance.table[outer], len(instance.cost))
    place, nodes = np.cumsum(free) - 1, np.flatnonzero(free)
    kept = np.flatnonzero(allowed & free[owner])
    fixed: Floats = np.where(free, 0.0, instance.memory[instance.first[:-1] + labels])
    smaller = Instance(
        np.concatenate([[0], np.cumsum(count[nodes])]).astype(np.int64),
        cost[kept],
        instance.memory[kept],
        instance.begin[nodes],
        instance.end[nodes],
        instance.limit - instance.over_points(fixed),
        place[instance.u[both]],
        place[instance.v[both]],
        instance.table[inner],
    )
    constant = float(cost[instance.first[:-1] + labels][~free].sum())
    return Restricted(smaller, nodes, kept, labels, constant)
