"""Exact shrinking: dead and duplicate labels, dominated labels, parallel edges, minima moved to unary costs."""

from __future__ import annotations

from functools import cache

import numpy as np

from autopar.search.solver.problem import Floats, Ints
from autopar.search.solver.workspace import NOISE, Potential, Workspace, combine, join


def presolve(graph: Workspace, queue: list[int] | None = None, dominance_entries: int = 200_000) -> bool:
    """Shrink until nothing changes.

    Args:
        graph: Edited in place.
        queue: Nodes to look at; all live ones if None.
        dominance_entries: Factors larger than this take no part in dominance (their nodes are skipped).

    Returns:
        False if some node lost all its labels: the problem is infeasible.
    """
    todo = dict.fromkeys(graph.live_nodes() if queue is None else queue)
    while todo:
        node = next(iter(todo))
        del todo[node]
        if not graph.active[node]:
            continue
        if not all(graph.alive(n).size for n in (node, *graph.neighbors(node))):
            return False
        touched = _merge_parallel(graph, node)
        for fid in list(graph.incident[node]):
            touched += _tidy(graph, fid)
        if not all(graph.alive(n).size for n in (node, *touched)):
            return False
        if _drop_labels(graph, node, dominance_entries):
            touched += graph.neighbors(node)
            touched.append(node)
        todo.update(dict.fromkeys(touched))
    return True


def _merge_parallel(graph: Workspace, node: int) -> list[int]:
    scopes: dict[tuple[int, ...], list[int]] = {}
    for fid in graph.incident[node]:
        scopes.setdefault(tuple(sorted(graph.factors[fid].nodes)), []).append(fid)
    touched: list[int] = []
    for fids in scopes.values():
        if len(fids) > 1:
            graph.add(combine([graph.remove(f) for f in fids], graph))
            touched += [node]
    return touched


def _tidy(graph: Workspace, fid: int) -> list[int]:
    """Compact one factor; returns nodes that lost labels and must be looked at again."""
    factor = graph.factors[fid]
    if graph.tidy.get(fid) == tuple(len(graph.alive(n)) for n in factor.nodes):
        return []
    groups, table, touched = list(factor.groups), factor.table, []
    changed = False
    for axis, node in enumerate(factor.nodes):
        alive = graph.alive(node)
        if not alive.size:
            return [node]
        if not _all_used(groups[axis][alive], table.shape[axis]):
            groups[axis], (kept,) = join([groups[axis]], alive)
            table, changed = table.take(kept, axis), True
    for axis, node in enumerate(factor.nodes):
        others = tuple(k for k in range(table.ndim) if k != axis)
        low = table.min(axis=others)
        if not low.any():
            continue
        changed = True
        cost = graph.cost[node].copy()
        alive = graph.alive(node)
        cost[alive] += low[groups[axis][alive]]
        graph.cost[node] = cost
        shift = np.where(np.isfinite(low), low, 0.0)
        table = table - shift.reshape([-1 if k == axis else 1 for k in range(table.ndim)])
        if not np.isfinite(low).all():
            touched += [*factor.nodes]  # labels died: come back and drop their rows
    if not touched:
        for axis in range(table.ndim):
            table, groups[axis], merged = _merge_rows(table, groups[axis], axis)
            changed |= merged
    if changed or not table.any():
        graph.remove(fid)
        if not touched and not table.any():
            return touched
        fid = graph.add(Potential(factor.nodes, tuple(groups), table))
    if not touched:
        graph.tidy[fid] = tuple(len(graph.alive(n)) for n in factor.nodes)
    return touched


def _all_used(group: Ints, size: int) -> bool:
    used = np.zeros(size, dtype=bool)
    used[group] = True
    return bool(used.all())


@cache
def _weights(columns: int) -> Floats:
    """Of columns, so that different rows have different sums."""
    found: Floats = np.cos(np.arange(columns))
    return found


def _merge_rows(table: Floats, group: Ints, axis: int) -> tuple[Floats, Ints, bool]:
    """Give labels with equal rows one group."""
    rows = np.moveaxis(table, axis, 0).reshape(table.shape[axis], -1)
    if len(rows) == 1:
        return table, group, False
    finite = np.isfinite(rows)
    largest = float(np.abs(rows, where=finite, out=np.zeros_like(rows)).max(initial=0.0))
    unit = NOISE * largest
    hashes = np.sort(np.where(finite, rows, -largest) @ _weights(rows.shape[1]))
    # Equal rows have equal hashes up to rounding: without near-equal hashes there is nothing to merge.
    rounding = 1e-9 * max(abs(hashes[0]), abs(hashes[-1])) + 2 * unit * rows.shape[1]
    if (hashes[1:] - hashes[:-1]).min() > rounding:
        return table, group, False
    keys = np.rint(rows / unit) if unit else rows
    seen: dict[bytes, int] = {}
    new = np.array([seen.setdefault((k + 0.0).tobytes(), len(seen)) for k in keys])
    if len(seen) == len(rows):
        return table, group, False
    _, first = np.unique(new, return_index=True)
    return table.take(first, axis), np.where(group >= 0, new[group], -1), True


def _drop_labels(graph: Workspace, node: int, limit: int) -> bool:
    """Kill labels that another label beats whatever the neighbors choose."""
    stamp = tuple(graph.incident[node])
    last = graph.checked.get(node)
    if last is not None and last[0] == stamp and last[1] is graph.cost[node]:
        return False
    alive = graph.alive(node)
    graph.checked[node] = (stamp, graph.cost[node])
    if len(alive) == 1:
        return False
    cost, memory = graph.cost[node][alive], graph.memory[node][alive]
    # margin[a, b] >= 0: b costs no more than a against every choice of the neighbors.
    margin = cost[:, None] - cost[None, :]
    margin[memory[:, None] < memory[None, :]] = -np.inf
    for fid in graph.incident[node]:
        factor = graph.factors[fid]
        axis = factor.nodes.index(node)
        group = factor.groups[axis][alive]
        if factor.table.size * factor.table.shape[axis] > limit:
            margin[group[:, None] != group[None, :]] = -np.inf
            continue
        known = graph.regrets.setdefault(fid, {})
        if axis not in known:
            known[axis] = _regret(factor.table, axis)
        margin -= known[axis][group[:, None], group[None, :]]
    np.fill_diagonal(margin, -np.inf)
    beats = margin >= 0
    if not beats.any():
        return False
    kept = np.ones(len(alive), dtype=bool)
    # One at a time, so that of labels that beat each other the lowest survives; first those strictly beaten.
    for a in range(len(alive) - 1, -1, -1):
        kept[a] = not (beats[a] & kept).any()
    new = graph.cost[node].copy()
    new[alive[~kept]] = np.inf
    graph.cost[node] = new
    return not kept.all()


def _regret(table: Floats, axis: int) -> Floats:
    rows = np.moveaxis(table, axis, 0).reshape(table.shape[axis], -1)
    with np.errstate(invalid="ignore"):  # inf - inf: neither row allows this column
        worst: Floats = np.fmax.reduce(rows[None, :, :] - rows[:, None, :], axis=2)
    return worst
