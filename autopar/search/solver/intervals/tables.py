"""The tables of all edges in one array, each once from either end, so that numpy reads those of many nodes at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.search.solver.intervals.instance import Instance
from autopar.search.solver.problem import Floats, Ints


@dataclass(frozen=True)
class Tables:
    """Directed edges by level of their target; entries of one after the other, each row by row of its target's labels.

    Attributes:
        level: of each node: nodes of one share no edge, [n].
        owner: the node of each label, [L].
        cost: of each label; forbidden ones, as forbidden pairs, cost more than any labeling without, [L].
        target: of each directed edge, [D].
        other: its other end, [D].
        opposite: the same edge from its other end, [D].
        first: where its entries begin, [D + 1].
        entry: the costs of pairs.
        row: where each row of entries begins, [R].
        edge: the directed edge of each row, [R].
        label: the label of each row, among those of all nodes, [R].
        of_node: edges of node i as a target are `by_node[of_node[i]:of_node[i + 1]]`, [n + 1].
        by_node: [D].
    """

    level: Ints
    owner: Ints
    cost: Floats
    target: Ints
    other: Ints
    opposite: Ints
    first: Ints
    entry: Floats
    row: Ints
    edge: Ints
    label: Ints
    of_node: Ints
    by_node: Ints

    @staticmethod
    def of(instance: Instance) -> Tables:
        """Those of an instance."""
        sizes, edges = instance.sizes, len(instance.u)
        level = _levels(len(sizes), instance.u, instance.v)
        target, other = np.concatenate([instance.u, instance.v]), np.concatenate([instance.v, instance.u])
        order = np.lexsort((target, level[target]))
        edge, flipped = np.tile(np.arange(edges), 2)[order], np.repeat([0, 1], edges)[order]
        target, other = target[order], other[order]
        position = np.empty((2, edges), dtype=np.int64)
        position[flipped, edge] = np.arange(2 * edges)
        rows, columns = sizes[target], sizes[other]
        first = starts(rows * columns)
        # Entry (a, b) of the table of directed edge d, targets in rows.
        d = np.repeat(np.arange(2 * edges), rows * columns)
        at = np.arange(first[-1]) - first[d]
        a, b = at // columns[d], at % columns[d]
        source = instance.edge_first[:-1][edge][d] + np.where(flipped[d] == 1, b * rows[d] + a, at)
        finite = (np.where(np.isfinite(x), x, 0.0) for x in (instance.cost, instance.table))
        forbidden = sum(float(np.abs(x).sum()) for x in finite) + 1.0
        of_row = np.repeat(np.arange(2 * edges), rows)
        within = np.arange(len(of_row)) - starts(rows)[of_row]
        by_node = np.argsort(target, kind="stable")
        return Tables(
            level,
            np.repeat(np.arange(len(sizes)), sizes),
            np.minimum(instance.cost, forbidden),
            target,
            other,
            position[1 - flipped, edge],
            first,
            np.minimum(instance.table[source], forbidden),
            first[of_row] + within * columns[of_row],
            of_row,
            instance.first[target][of_row] + within,
            np.searchsorted(target[by_node], np.arange(len(sizes) + 1)).astype(np.int64),
            by_node,
        )

    def edges_of(self, nodes: Ints) -> Ints:
        """Directed edges to some nodes."""
        return self.by_node[ranges(self.of_node[nodes], self.of_node[nodes + 1] - self.of_node[nodes])]


def starts(sizes: Ints) -> Ints:
    """Where each of some runs begins, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def ranges(begin: Ints, length: Ints) -> Ints:
    """`begin[i], begin[i] + 1, ...`, `length[i]` of each, one range after the other."""
    return np.repeat(begin - starts(length)[:-1], length) + np.arange(int(length.sum()))


def cheapest(cost: Floats, first: Ints, of: Ints) -> tuple[Ints, Floats]:
    """The first of the cheapest of each run of `cost`, from 0 in its run, and what it costs.

    Args:
        cost: of labels, run after run.
        first: where each run begins.
        of: the run of each label.
    """
    least = np.minimum.reduceat(cost, first)
    at = np.flatnonzero(cost <= least[of])
    mine = of[at]
    which = np.flatnonzero(np.concatenate([[True], mine[1:] != mine[:-1]]))
    return at[which] - first, least


def _levels(nodes: int, u: Ints, v: Ints) -> Ints:
    """Of each node one more than the highest of its neighbors of lower number: those of a level share no edge."""
    before: list[list[int]] = [[] for _ in range(nodes)]
    for a, b in zip(np.minimum(u, v).tolist(), np.maximum(u, v).tolist(), strict=True):
        before[b].append(a)
    found = [0] * nodes
    for node, around in enumerate(before):
        if around:
            found[node] = 1 + max(found[n] for n in around)
    return np.array(found, dtype=np.int64)
