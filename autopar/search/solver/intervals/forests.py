"""Better labels for most nodes at a time: exactly over a random forest, all other nodes as they are.

Nodes are left out until those inside have no cycle. What is left is minimized by dynamic programming, all trees at once
and depth by depth in numpy (tree sampling: Hamze, de Freitas, UAI 2004; here without a temperature). No node inside
one tree has an edge to another tree, so that any part of the trees may be taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.search.solver.intervals.instance import Instance
from autopar.search.solver.intervals.tables import Tables, cheapest, ranges, starts
from autopar.search.solver.problem import Floats, Ints

SEEDS = (0.002, 0.008, 0.03, 0.12, 1.0)
"""Shares of the nodes left that trees begin at, round after round: few at first, so that trees grow large."""


@dataclass(frozen=True)
class Forest:
    """Of each node: its depth, -1 outside; the directed edge from its parent, -1 without; and the root of its tree."""

    depth: Ints
    edge: Ints
    root: Ints


def grown(tables: Tables, nodes: int, draw: np.random.Generator) -> Forest:
    """A random forest: a node joins if one of its neighbors is inside, and no other."""
    depth, edge, root = (np.full(nodes, -1) for _ in range(3))
    inside, via = np.zeros(nodes, dtype=np.int64), np.full(nodes, -1)
    rank = draw.random(nodes)
    for share in SEEDS:
        new = _apart(tables, (depth < 0) & (inside == 0) & (draw.random(nodes) < share), rank)
        depth[new], root[new] = 0, new
        while len(new):
            edges = tables.edges_of(new)
            around = tables.other[edges]
            np.add.at(inside, around, 1)
            via[around] = edges
            possible = np.zeros(nodes, dtype=bool)
            possible[around] = True
            new = _apart(tables, possible & (depth < 0) & (inside == 1), rank)
            edge[new] = via[new]
            parent = tables.target[via[new]]
            depth[new], root[new] = depth[parent] + 1, root[parent]
    return Forest(depth, edge, root)


def _apart(tables: Tables, possible: NDArray[np.bool_], rank: Floats) -> Ints:
    """Of possible nodes those that rank above all their possible neighbors."""
    edges = tables.edges_of(np.flatnonzero(possible))
    below = possible[tables.other[edges]] & (rank[tables.other[edges]] >= rank[tables.target[edges]])
    found = possible.copy()
    found[tables.target[edges[below]]] = False
    return np.flatnonzero(found)


def move(instance: Instance, tables: Tables, forest: Forest, labels: Ints, cost: Floats) -> Ints:
    """The labels of least cost that differ from the given ones in the forest alone.

    Args:
        instance: the problem.
        tables: its.
        forest: of its nodes.
        labels: now, [n].
        cost: of labels, with their prices, [L].
    """
    inside = forest.depth >= 0
    apart = inside[tables.target] & ~inside[tables.other]
    rows = np.flatnonzero(apart[tables.edge])
    given = tables.entry[tables.row[rows] + labels[tables.other[tables.edge[rows]]]]
    total = cost + np.bincount(tables.label[rows], given, len(cost))
    order = np.argsort(forest.depth, kind="stable")
    at = np.searchsorted(forest.depth[order], np.arange(int(forest.depth.max()) + 2))
    sizes, first = instance.sizes, instance.first
    for k in range(len(at) - 2, 0, -1):
        nodes = order[at[k] : at[k + 1]]
        edge = forest.edge[nodes]
        parent = tables.target[edge]
        mine = np.repeat(sizes[nodes], sizes[parent])
        below = total[ranges(np.repeat(first[nodes], sizes[parent]), mine)]
        entries = tables.entry[ranges(tables.first[edge], sizes[parent] * sizes[nodes])]
        low = np.minimum.reduceat(entries + below, starts(mine)[:-1])
        np.add.at(total, ranges(first[parent], sizes[parent]), low)
    found = labels.copy()
    for k in range(len(at) - 1):
        nodes = order[at[k] : at[k + 1]]
        costs = total[ranges(first[nodes], sizes[nodes])]
        if k:
            edge = forest.edge[nodes]
            row = tables.first[edge] + found[tables.target[edge]] * sizes[nodes]
            costs = costs + tables.entry[ranges(row, sizes[nodes])]
        begin = starts(sizes[nodes])[:-1]
        choice, least = cheapest(costs, begin, np.repeat(np.arange(len(nodes)), sizes[nodes]))
        # Of labels that cost the same, the one that it has.
        now = costs[begin + labels[nodes]]
        found[nodes] = np.where(now <= least + 1e-12 * np.abs(least), labels[nodes], choice)
    return found
