"""Dual ascent by sequential reweighted message passing (SRMP), with labels fixed by reduced cost on the way.

Kolmogorov, "A new look at reweighted message passing", PAMI 2015 (https://arxiv.org/abs/1309.5655), which generalizes
TRW-S to factors of more than two nodes. Nodes are visited in order; each pulls the minima of its factors into its unary
cost and pushes an equal share to the factors that lead to nodes not yet visited. All this reparametrizes the problem:
costs move between nodes and factors, and no labeling's total changes. The sum of all minima is a lower bound that never
falls. After a pull, `bound + unary[label]` is a lower bound on every labeling with that label, so that labels whose
bound reaches the incumbent can be dropped (reduced-cost fixing).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.search.solver.problem import Floats, Ints
from autopar.search.solver.workspace import Potential, Workspace


@dataclass(frozen=True, eq=False)
class _End:
    """One factor seen from one node.

    Attributes:
        table: number of the factor's table.
        axis: of the node in the table.
        others: the other axes.
        group: row of each label that is alive.
        shape: broadcasts a vector over rows along the axis.
        order: labels sorted by row; None if every label has its own row, in order.
        starts: where each row starts in ``order``.
        onward: whether it leads to a later node, and whether to an earlier one.
    """

    table: int
    axis: int
    others: tuple[int, ...]
    group: Ints
    shape: tuple[int, ...]
    order: Ints | None
    starts: Ints
    onward: tuple[bool, bool]


@dataclass
class MessagePassing:
    """A compact copy of the live part of a workspace. Every table and unary cost has minimum 0; the rest is in `bound`.

    Tables and `unary` are edited in place by the sweeps, which is what makes them fast; `write_back` ends the copy.

    Attributes:
        nodes: of the workspace, in the order of the sweeps.
        labels: of each node, those that are alive.
        unary: costs of these labels.
        tables: of the factors.
        ids: of the factors in the workspace.
        ends: of each node, its factors.
        bound: no labeling costs less.
    """

    nodes: list[int]
    labels: list[Ints]
    unary: list[Floats]
    tables: list[Floats]
    ids: list[int]
    ends: list[list[_End]]
    bound: float

    def sweep(self, forward: bool, cutoff: float) -> int:
        """Visit all nodes once, forward or backward.

        Returns:
            How many labels were dropped because no labeling with them costs less than the cutoff.
        """
        fixed = 0
        for i in range(len(self.nodes)) if forward else range(len(self.nodes) - 1, -1, -1):
            unary = self._pull(i)
            over = unary > cutoff - self.bound
            if over.any():
                over &= np.isfinite(unary)
                fixed += int(over.sum())
                unary[over] = np.inf
            self._push(i, unary, forward)
        return fixed

    def _pull(self, i: int) -> Floats:
        """Move the minimum of each factor's rows into the unary cost, and the minimum of that into `bound`."""
        unary = self.unary[i]
        for end in self.ends[i]:
            table = self.tables[end.table]
            low = table.min(axis=end.others)
            finite = np.where(np.isfinite(low), low, 0.0)  # inf - inf: a forbidden row stays forbidden
            table -= finite.reshape(end.shape)
            unary = unary + low[end.group]
        least = float(unary.min())
        if np.isfinite(least):
            self.bound += least
            unary = unary - least
        else:
            self.bound = np.inf
        self.unary[i] = unary
        return unary

    def _push(self, i: int, unary: Floats, forward: bool) -> None:
        """Share the unary cost among the factors that lead on in the direction of the sweep."""
        next_ = [e for e in self.ends[i] if e.onward[0 if forward else 1]]
        if not next_:
            return
        previous = sum(e.onward[1 if forward else 0] for e in self.ends[i])
        # As in TRW-S, the weight is the same in both directions, and no more than all is given away.
        weight = 1.0 / max(len(next_), previous)
        rest = unary
        for end in next_:
            # A row takes a share of what the cheapest of its labels has.
            least = unary if end.order is None else np.minimum.reduceat(unary[end.order], end.starts)
            share = least * weight
            self.tables[end.table] += share.reshape(end.shape)
            share[~np.isfinite(share)] = 0.0  # inf - inf again
            rest = rest - share[end.group]
        self.unary[i] = rest

    def decode(self) -> list[int]:
        """A labeling, as positions in `labels`: each node takes its best label given those already chosen."""
        chosen: list[int] = []
        views = list(self.tables)  # narrowed to the labels chosen so far
        for i, ends in enumerate(self.ends):
            total = self.unary[i].copy()
            for end in ends:
                table = views[end.table]
                total += table.min(axis=end.others)[end.group]
            pick = int(np.argmin(total))
            chosen.append(pick)
            for end in ends:
                # Keep the axis with length 1, so that the other ends' axes stay where they are.
                g = int(end.group[pick])
                table = views[end.table].take([g], axis=end.axis)
                views[end.table] = table
        return chosen


def compact(graph: Workspace) -> MessagePassing:
    """Copy the live part of a workspace, which must be presolved, so that every row has a finite entry."""
    nodes = graph.live_nodes()
    position = {n: i for i, n in enumerate(nodes)}
    labels = [graph.alive(n) for n in nodes]
    ids = list(graph.factors)
    ends: list[list[_End]] = [[] for _ in nodes]
    for t, fid in enumerate(ids):
        factor = graph.factors[fid]
        for axis, n in enumerate(factor.nodes):
            ends[position[n]].append(_end(factor, t, axis, labels[position[n]], position))
    unary = [graph.cost[n][ls] for n, ls in zip(nodes, labels, strict=True)]
    tables = [graph.factors[f].table.copy() for f in ids]
    bound = graph.constant
    # Minima must be in the bound before the first sweep, which drops labels by it.
    for costs in (*unary, *tables):
        least = float(costs.min(initial=np.inf))
        if np.isfinite(least):
            costs -= least
            bound += least
    return MessagePassing(nodes, labels, unary, tables, ids, ends, bound)


def _end(factor: Potential, table: int, axis: int, labels: Ints, position: dict[int, int]) -> _End:
    group = factor.groups[axis][labels]
    size = factor.table.shape[axis]
    identity = len(group) == size and bool((group == np.arange(size)).all())
    order = np.argsort(group, kind="stable")
    own, every = position[factor.nodes[axis]], [position[n] for n in factor.nodes]
    return _End(
        table=table,
        axis=axis,
        others=tuple(k for k in range(factor.table.ndim) if k != axis),
        group=group,
        shape=tuple(-1 if k == axis else 1 for k in range(factor.table.ndim)),
        order=None if identity else order,
        starts=np.searchsorted(group[order], np.arange(size)),
        onward=(max(every) > own, min(every) < own),
    )


def write_back(graph: Workspace, messages: MessagePassing, cutoff: float) -> None:
    """Replace the workspace's costs by the reparametrized ones: the same problem with a better constant.

    Table entries that reach the cutoff become inf, as labels did in the sweeps.
    """
    graph.constant = messages.bound
    graph.tidy.clear()  # both remember what held for the old tables
    graph.regrets.clear()
    for n, ls, unary in zip(messages.nodes, messages.labels, messages.unary, strict=True):
        cost = np.full(len(graph.cost[n]), np.inf)
        cost[ls] = unary
        graph.cost[n] = cost
    for fid, table in zip(messages.ids, messages.tables, strict=True):
        old = graph.factors[fid]
        graph.factors[fid] = Potential(old.nodes, old.groups, np.where(table > cutoff - messages.bound, np.inf, table))
