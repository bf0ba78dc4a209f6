"""Exact elimination of nodes by min-plus products, and the way back.

This is variable elimination (bucket elimination, Dechter 1999): the sum of a node's factors, minimized over its labels,
is one factor over its neighbors. Nodes whose labels differ in memory stay, since the minimum would forget which label's
memory it needs.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from autopar.search.solver.presolve import presolve
from autopar.search.solver.problem import Floats, Ints
from autopar.search.solver.workspace import Potential, Workspace, join


def fold(graph: Workspace, max_degree: int, max_entries: int, max_work: int) -> bool:
    """Eliminate nodes whose labels need the same memory, least work first, until the limits stop it.

    Args:
        graph: Edited in place.
        max_degree: Most neighbors of an eliminated node.
        max_entries: Largest table that may appear.
        max_work: Most table entries times labels for one elimination.

    Returns:
        False if the problem turned out infeasible.
    """
    work: dict[int, float] = {}
    # Least work first, as in minimum-weight elimination orders; ties go to the lower number, for determinism.
    waiting: list[tuple[float, int]] = []
    stale = dict.fromkeys(graph.live_nodes())
    while True:
        for node in stale:
            if graph.active[node]:
                work[node] = _work(graph, node, max_degree, max_entries, max_work)
                heappush(waiting, (work[node], node))
        # What was pushed before a node's work changed is out of date.
        while waiting and (waiting[0][1] not in work or work[waiting[0][1]] != waiting[0][0]):
            heappop(waiting)
        if not waiting or not np.isfinite(waiting[0][0]):
            return True
        _, node = heappop(waiting)
        around = graph.neighbors(node)
        if not eliminate(graph, node):
            return False
        del work[node]
        if not presolve(graph, around):
            return False
        # The work of a node changes with its factors: of those around, and of their neighbors.
        stale = dict.fromkeys(around)
        for other in around:
            stale.update(dict.fromkeys(graph.neighbors(other)))


def _work(graph: Workspace, node: int, max_degree: int, max_entries: int, max_work: int) -> float:
    """Table entries times labels to eliminate a node, or inf if a limit forbids it."""
    around = graph.neighbors(node)
    if len(around) > max_degree or graph.carries_memory(node):
        return float("inf")
    columns: dict[int, list[Ints]] = {n: [] for n in around}
    for fid in graph.incident[node]:
        factor = graph.factors[fid]
        for n, g in zip(factor.nodes, factor.groups, strict=True):
            if n != node:
                columns[n].append(g)
    entries = 1.0
    for n in around:
        one = columns[n]
        entries *= int(one[0].max()) + 1 if len(one) == 1 else len(join(one, graph.alive(n))[1][0])
    work = entries * len(graph.alive(node))
    return work if entries <= max_entries and work <= max_work else float("inf")


def eliminate(graph: Workspace, node: int) -> bool:
    """Replace a node by the cheapest cost its labels leave to its neighbors.

    Returns:
        False if the node has no label left.
    """
    around, cost = graph.neighbors(node), graph.cost[node]
    alive = graph.alive(node)
    if not alive.size:
        return False
    parts = [graph.remove(fid) for fid in list(graph.incident[node])]
    graph.folded.append((node, cost, tuple(parts)))
    graph.active[node] = False
    groups, picks = [], []
    for n in around:
        sharing = [k for k, p in enumerate(parts) if n in p.nodes]
        # Two factors may group a neighbor's labels differently: the new one tells apart what either did.
        joint, sub = join([parts[k].groups[parts[k].nodes.index(n)] for k in sharing], graph.alive(n))
        groups.append(joint)
        picks.append(dict(zip(sharing, sub, strict=True)))
    if not around:
        graph.constant += float(cost[alive].min())
        return True
    table = _min_sum(parts, node, cost, alive, around, picks)
    if len(around) == 1:
        n = around[0]
        new, left = graph.cost[n].copy(), graph.alive(n)
        new[left] += table[groups[0][left]]
        graph.cost[n] = new
    else:
        graph.add(Potential(tuple(around), tuple(groups), table))
    return True


def _min_sum(
    parts: list[Potential], node: int, cost: Floats, alive: Ints, around: list[int], picks: list[dict[int, Ints]]
) -> Floats:
    """The minimum over the node's labels of its cost plus its factors, [groups of each neighbor]."""
    shape = [len(next(iter(p.values()))) for p in picks]
    blocks: list[tuple[Floats, Ints]] = []  # (row of the node, ...) broadcastable over `shape`
    for k, part in enumerate(parts):
        axes = [part.nodes.index(node)] + [part.nodes.index(n) for n in around if n in part.nodes]
        table = part.table.transpose(axes)
        subs = [picks[i][k] for i, n in enumerate(around) if n in part.nodes]
        table = table[np.ix_(np.arange(table.shape[0]), *subs)]
        spread = [len(picks[i][k]) if n in part.nodes else 1 for i, n in enumerate(around)]
        blocks.append((table.reshape(table.shape[0], *spread), part.groups[axes[0]]))
    # Label by label: the sum over all labels at once would be as large as the limits allow for the product.
    rows = np.stack([g[alive] for _, g in blocks], axis=1)
    best: Floats = np.full(shape, np.inf)
    for label, row in _cheapest_per_row(rows, cost[alive]):
        total: Floats = np.asarray(cost[alive[label]])
        for (table, _), r in zip(blocks, row, strict=True):
            total = total + table[r]
        np.minimum(best, total, out=best)
    return best


def _cheapest_per_row(rows: Ints, cost: Floats) -> list[tuple[int, list[int]]]:
    """Of labels with equal groups everywhere only the cheapest can win."""
    best: dict[tuple[int, ...], int] = {}
    for i, row in enumerate(rows.tolist()):
        key = tuple(row)
        if key not in best or cost[i] < cost[best[key]]:
            best[key] = i
    return [(i, list(row)) for row, i in best.items()]


def unfold(graph: Workspace, labels: Ints) -> Ints:
    """Choose the labels of folded nodes, last folded first.

    Args:
        graph: The workspace after folding.
        labels: Labels of the live nodes, [n]; others are ignored.

    Returns:
        Labels of all nodes, [n].
    """
    out = labels.copy()
    for node, cost, factors in reversed(graph.folded):
        total = cost.copy()
        finite = np.flatnonzero(np.isfinite(total))
        for f in factors:
            axis = f.nodes.index(node)
            where = tuple(
                slice(None) if k == axis else int(g[out[n]])
                for k, (n, g) in enumerate(zip(f.nodes, f.groups, strict=True))
            )
            total[finite] += f.table[where][f.groups[axis][finite]]
        out[node] = int(np.argmin(total))
    return out
