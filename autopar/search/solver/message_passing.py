"""Dual ascent by sequential reweighted message passing, with labels fixed by reduced cost on the way.

Kolmogorov, "A new look at reweighted message passing", PAMI 2015: each node in turn pulls the minima of its
factors and hands an equal share to the factors that lead onward. The sum of all minima is a lower bound that
never falls, and after each pull `bound + cost[label]` bounds every solution that uses the label.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.search.solver.problem import Floats, Ints
from autopar.search.solver.workspace import Potential, Workspace


@dataclass(frozen=True, eq=False)
class _End:
    """One factor seen from one node."""

    table: int
    axis: int
    others: tuple[int, ...]
    group: Ints  # [alive labels]
    shape: tuple[int, ...]  # broadcasts a vector over groups along the axis
    order: Ints | None  # labels sorted by group; None if every label is its own group, in order
    starts: Ints
    onward: tuple[bool, bool]  # does it lead to a later node, to an earlier node


@dataclass
class MessagePassing:
    """A compact copy of a graph's core; every table and unary cost has minimum 0, the rest is in `bound`."""

    nodes: list[int]
    labels: list[Ints]
    unary: list[Floats]
    memory: list[Floats]
    tables: list[Floats]
    ids: list[int]
    ends: list[list[_End]]
    bound: float

    def sweep(self, forward: bool, cutoff: float) -> int:
        """Visit all nodes once; returns how many labels were fixed away because they reach `cutoff`."""
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

    def price(self, step: float) -> None:
        """Add `step` seconds per byte of memory; `bound` is valid again after the next sweep."""
        self.unary = [u + step * m for u, m in zip(self.unary, self.memory, strict=True)]

    def _pull(self, i: int) -> Floats:
        unary = self.unary[i]
        for end in self.ends[i]:
            table = self.tables[end.table]
            low = table.min(axis=end.others)
            finite = np.where(np.isfinite(low), low, 0.0)
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
        ahead = [e for e in self.ends[i] if e.onward[0 if forward else 1]]
        if not ahead:
            return
        behind = sum(e.onward[1 if forward else 0] for e in self.ends[i])
        weight = 1.0 / max(len(ahead), behind)
        rest = unary
        for end in ahead:
            least = unary if end.order is None else np.minimum.reduceat(unary[end.order], end.starts)
            share = least * weight
            self.tables[end.table] += share.reshape(end.shape)
            share[~np.isfinite(share)] = 0.0
            rest = rest - share[end.group]
        self.unary[i] = rest

    def decode(self, budget: float) -> list[int]:
        """A labeling of the core, as positions: each node's best given those already chosen.

        Labels that would leave the later nodes less memory than they need at least are avoided.
        """
        chosen: list[int] = []
        views = list(self.tables)
        least = [float(m[np.isfinite(u)].min()) for m, u in zip(self.memory, self.unary, strict=True)]
        room = budget - sum(least)
        for i, ends in enumerate(self.ends):
            total = np.where(self.memory[i] - least[i] <= room, self.unary[i], np.inf)
            for end in ends:
                table = views[end.table]
                total += table.min(axis=end.others)[end.group]
            pick = int(np.argmin(total))
            chosen.append(pick)
            room -= float(self.memory[i][pick]) - least[i]
            for end in ends:
                # Keep the axis with length 1, so that the other ends' axes stay where they are.
                g = int(end.group[pick])
                table = views[end.table].take([g], axis=end.axis)
                views[end.table] = table
        return chosen


def compact(graph: Workspace) -> MessagePassing:
    """Copy the live part of a graph; it must be presolved, so that every row has a finite entry."""
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
    memory = [graph.memory[n][ls] for n, ls in zip(nodes, labels, strict=True)]
    tables = [graph.factors[f].table.copy() for f in ids]
    bound = graph.constant
    # Where the price of memory was changed, costs may be negative: a sweep that fixes labels would trust a false bound.
    for costs in (*unary, *tables):
        least = float(costs.min(initial=np.inf))
        if np.isfinite(least):
            costs -= least
            bound += least
    return MessagePassing(nodes, labels, unary, memory, tables, ids, ends, bound)


def _end(factor: Potential, table: int, axis: int, labels: Ints, position: dict[int, int]) -> _End:
    group = factor.groups[axis][labels]
    size = factor.table.shape[axis]
    identity = len(group) == size and bool((group == np.arange(size)).all())
    order = np.argsort(group, kind="stable")
    here, all_at = position[factor.nodes[axis]], [position[n] for n in factor.nodes]
    return _End(
        table=table,
        axis=axis,
        others=tuple(k for k in range(factor.table.ndim) if k != axis),
        group=group,
        shape=tuple(-1 if k == axis else 1 for k in range(factor.table.ndim)),
        order=None if identity else order,
        starts=np.searchsorted(group[order], np.arange(size)),
        onward=(max(all_at) > here, min(all_at) < here),
    )


def write_back(graph: Workspace, messages: MessagePassing, cutoff: float) -> None:
    """Replace the graph's costs by the reparametrized ones: the same problem with a better trivial bound.

    Table entries that reach the cutoff become inf, as labels did in the sweeps.
    """
    graph.constant = messages.bound
    graph.tidy.clear()
    graph.regrets.clear()
    for n, ls, unary in zip(messages.nodes, messages.labels, messages.unary, strict=True):
        cost = np.full(len(graph.cost[n]), np.inf)
        cost[ls] = unary
        graph.cost[n] = cost
    for fid, table in zip(messages.ids, messages.tables, strict=True):
        old = graph.factors[fid]
        graph.factors[fid] = Potential(old.nodes, old.groups, np.where(table > cutoff - messages.bound, np.inf, table))
