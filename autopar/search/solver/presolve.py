"""Exact shrinking: dead, equal and dominated labels go, parallel factors are joined, minima move to unary costs.

A label is dominated if another costs no more, whatever the neighbors choose, and needs no more memory: dead-end
elimination (Goldstein, Biophysical Journal 1994). At least one optimum survives every step, and so does the minimum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        # First, so that what follows compacts one factor instead of several.
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
    """Join the node's factors over the same nodes; returns the node if there were any."""
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
    known, living = graph.tidy.get(fid), tuple(len(graph.alive(n)) for n in factor.nodes)
    if known == living:
        return []
    for node, left in zip(factor.nodes, living, strict=True):
        if not left:
            return [node]
    compact, shorter = _drop_unused_rows(graph, factor)
    # Rows that were compact before are so until they lose entries.
    axes = range(len(factor.nodes)) if known is None else _across(shorter, len(factor.nodes))
    compact, moved, touched = _move_minima(graph, compact, axes)
    merged = False
    if not touched:
        compact, merged = _merge_equal_rows(compact, range(len(factor.nodes)) if moved else axes)
    empty = not compact.table.any()
    if shorter or moved or merged or empty:
        graph.remove(fid)
        if not touched and empty:
            return touched
        fid = graph.add(compact)
    if not touched:
        graph.tidy[fid] = tuple(len(graph.alive(n)) for n in factor.nodes)
    return touched


def _across(shorter: Sequence[int], count: int) -> list[int]:
    """The axes whose rows have lost entries, when others have lost rows."""
    return [axis for axis in range(count) if any(other != axis for other in shorter)]


def _drop_unused_rows(graph: Workspace, factor: Potential) -> tuple[Potential, list[int]]:
    """The factor without rows that no living label has, and the axes that had any."""
    groups, table, shorter = list(factor.groups), factor.table, list[int]()
    for axis, node in enumerate(factor.nodes):
        alive = graph.alive(node)
        if not _all_used(groups[axis][alive], table.shape[axis]):
            groups[axis], (used,) = join([groups[axis]], alive)
            table = table.take(used, axis)
            shorter.append(axis)
    return Potential(factor.nodes, tuple(groups), table), shorter


def _move_minima(graph: Workspace, factor: Potential, axes: Iterable[int]) -> tuple[Potential, bool, list[int]]:
    """Move the minimum of each row to the unary cost of the labels that have it.

    Args:
        graph: Whose costs get them.
        factor: One of its factors.
        axes: The others' rows have minimum 0.

    Returns:
        The factor, all of whose rows have minimum 0; whether that changed it; and the nodes to look at again, as labels
        have died whose row was all forbidden.
    """
    table, changed, touched = factor.table, False, list[int]()
    for axis in axes:
        node = factor.nodes[axis]
        others = tuple(k for k in range(table.ndim) if k != axis)
        low = table.min(axis=others)
        if not low.any():
            continue
        changed = True
        cost = graph.cost[node].copy()
        alive = graph.alive(node)
        cost[alive] += low[factor.groups[axis][alive]]
        graph.cost[node] = cost
        shift = np.where(np.isfinite(low), low, 0.0)
        table = table - shift.reshape([-1 if k == axis else 1 for k in range(table.ndim)])
        if not np.isfinite(low).all():
            touched += [*factor.nodes]
    return Potential(factor.nodes, factor.groups, table), changed, touched


def _merge_equal_rows(factor: Potential, axes: Iterable[int]) -> tuple[Potential, bool]:
    """The factor with equal rows of some axes merged, and whether there were any."""
    groups, table, changed = list(factor.groups), factor.table, False
    finite = np.isfinite(table)
    largest = float(np.abs(table, where=finite, out=np.zeros_like(table)).max(initial=0.0))
    hashed, unit = np.where(finite, table, -largest), NOISE * largest
    for axis in axes:
        first, number = _equal_rows(table, hashed, axis, unit)
        if first is not None:
            table, hashed, changed = table.take(first, axis), hashed.take(first, axis), True
            groups[axis] = np.where(groups[axis] >= 0, number[groups[axis]], -1)
    return Potential(factor.nodes, tuple(groups), table), changed


def _all_used(group: Ints, size: int) -> bool:
    used = np.zeros(size, dtype=bool)
    used[group] = True
    return bool(used.all())


@cache
def _weights(columns: int) -> Floats:
    """Weights of columns under which different rows have different sums, almost surely; fixed, for determinism."""
    found: Floats = np.cos(np.arange(columns))
    return found


def _equal_rows(table: Floats, hashed: Floats, axis: int, unit: float) -> tuple[Ints | None, Ints]:
    """The first of each kind of equal rows, None if no two are equal; and the number of each row's kind.

    Args:
        table: Of a factor.
        hashed: The same with finite numbers in place of infinite ones.
        axis: Of the rows.
        unit: Entries that differ by less are equal.
    """
    rows = np.moveaxis(hashed, axis, 0).reshape(table.shape[axis], -1)
    every = np.arange(len(rows))
    if len(rows) == 1:
        return None, every
    hashes = np.sort(rows @ _weights(rows.shape[1]))
    # Equal rows have equal hashes up to rounding: without near-equal hashes there is nothing to merge.
    rounding = 1e-9 * max(abs(hashes[0]), abs(hashes[-1])) + 2 * unit * rows.shape[1]
    if (hashes[1:] - hashes[:-1]).min() > rounding:
        return None, every
    rows = np.moveaxis(table, axis, 0).reshape(table.shape[axis], -1)
    keys = np.rint(rows / unit) if unit else rows
    seen: dict[bytes, int] = {}
    new = np.array([seen.setdefault((k + 0.0).tobytes(), len(seen)) for k in keys])
    if len(seen) == len(rows):
        return None, every
    return np.unique(new, return_index=True)[1], new


def _drop_labels(graph: Workspace, node: int, limit: int) -> bool:
    """Drop labels that another label beats, whatever the neighbors choose."""
    # Neither factors nor costs have changed since the last time: nothing new can be dominated.
    stamp = tuple(graph.incident[node])
    last = graph.checked.get(node)
    if last is not None and last[0] == stamp and last[1] is graph.cost[node]:
        return False
    alive = graph.alive(node)
    graph.checked[node] = (stamp, graph.cost[node])
    if len(alive) == 1:
        return False
    cost, memory = graph.cost[node][alive], graph.memory[node][alive]
    # margin[a, b] >= 0: b costs no more than a, whatever the neighbors choose. Each factor lowers it by its worst case.
    margin = cost[:, None] - cost[None, :]
    margin[memory[:, None] < memory[None, :]] = -np.inf
    np.fill_diagonal(margin, -np.inf)
    for fid in graph.incident[node]:
        worse, better = np.nonzero(margin >= 0)
        if not worse.size:
            return False
        factor = graph.factors[fid]
        axis = factor.nodes.index(node)
        group = factor.groups[axis][alive]
        if factor.table.size * factor.table.shape[axis] > limit:
            margin[group[:, None] != group[None, :]] = -np.inf  # only labels that it cannot tell apart are compared
            continue
        known = graph.regrets.setdefault(fid, {})
        if axis not in known and 2 * worse.size < factor.table.shape[axis] ** 2:
            margin[worse, better] -= _regret_of(factor.table, axis, group[worse], group[better])
            continue
        if axis not in known:
            known[axis] = _regret(factor.table, axis)
        margin -= known[axis].take(group, 0).take(group, 1)
    beats = margin >= 0
    if not beats.any():
        return False
    left = np.ones(len(alive), dtype=bool)
    # One at a time, from the last: of labels that beat each other, the first survives.
    for a in np.flatnonzero(beats.any(1))[::-1]:
        left[a] = not (beats[a] & left).any()
    new = graph.cost[node].copy()
    new[alive[~left]] = np.inf
    graph.cost[node] = new
    return not left.all()


def _regret(table: Floats, axis: int) -> Floats:
    """The largest extra cost of row b over row a, [a, b]."""
    rows = np.moveaxis(table, axis, 0).reshape(table.shape[axis], -1)
    # What is reduced over is the first axis where rows are many: a maximum of arrays then, twice as fast.
    first = rows.shape[1] < 4 * len(rows)
    rows = np.ascontiguousarray(rows.T) if first else rows
    with np.errstate(invalid="ignore"):  # inf - inf: neither row allows this column
        extra = rows[:, None, :] - rows[:, :, None] if first else rows[None, :, :] - rows[:, None, :]
        worst: Floats = np.fmax.reduce(extra, axis=0 if first else 2)
    return worst


def _regret_of(table: Floats, axis: int, rows: Ints, others: Ints) -> Floats:
    """The largest extra cost of other rows over some, pair by pair: cheaper than of all where these are few."""
    entries = np.moveaxis(table, axis, 0).reshape(table.shape[axis], -1)
    with np.errstate(invalid="ignore"):  # as in `_regret`
        worst: Floats = np.fmax.reduce(entries[others] - entries[rows], axis=1)
    return worst
