"""The problem without a memory constraint: eliminate, bound by messages, drop labels, repeat; an ILP last."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autopar.search.solver.eliminate import fold, unfold
from autopar.search.solver.highs import requested
from autopar.search.solver.ilp import columns_of, solve_ilp
from autopar.search.solver.message_passing import MessagePassing, compact, write_back
from autopar.search.solver.presolve import presolve
from autopar.search.solver.problem import Ints, Minimum
from autopar.search.solver.workspace import Workspace

# (most neighbors of an eliminated node, largest table): each level is tighter and slower than the one before.
LEVELS = ((2, 1_000_000), (3, 30_000), (4, 60_000), (5, 150_000), (7, 400_000))
WORK_PER_ENTRY = 60
SWEEPS_PER_DECODE = 4
MAX_SWEEPS = 60
EXACT = 1e-10  # relative; labels that cannot improve the incumbent by more are dropped even when the gap asked is 0

FIRST_WINDOW, LAST_WINDOW = 1e-3, 3.2e-2
"""Shares of the bound above it, within which labelings are looked for: each twice the last one, and then all of it."""

MOST_RETRIES = 3
"""So often, the bound of a window that was too large to be searched is where windows begin anew."""

MOST_COLUMNS = 200_000
"""Of an ILP that is worth being tried: larger ones take minutes, and gigabytes, to say little."""

Value = Callable[[Ints], float]


@dataclass(frozen=True)
class Limits:
    """When to stop: at a relative gap, or at a time of the monotonic clock."""

    gap: float
    deadline: float

    def expired(self) -> bool:
        """Whether the time limit has passed, or the user does not want to wait for it."""
        return requested() or time.monotonic() > self.deadline


@dataclass
class Incumbent:
    """The best labeling so far, and the largest value worth looking for: the only state that outlives a level.

    Attributes:
        value_of: the objective of a labeling.
        gap: relative.
        labels: the best so far.
        value: of these.
        cap: labelings that cost this much are not looked for, whatever the best is.
        applied: the last cutoff by which labels were dropped. No bound above it is proved.
    """

    value_of: Value
    gap: float
    labels: Ints | None = None
    value: float = float("inf")
    cap: float = float("inf")
    applied: float = float("inf")

    def offer(self, labels: Ints) -> None:
        """Take a labeling if it is better."""
        value = self.value_of(labels)
        if value < self.value:
            self.labels, self.value = labels, value

    def cutoff(self) -> float:
        """Solutions that cost this much or more are not looked for from now on."""
        if np.isfinite(self.value):
            # A tenth of the gap goes to pruning, so that what is returned is well within what was asked.
            self.applied = min(self.cap, self.value - max(EXACT, self.gap / 10) * abs(self.value))
        else:
            self.applied = self.cap
        return self.applied


def minimize(graph: Workspace, value_of: Value, limits: Limits, start: Ints | None = None) -> Minimum:
    """Find a labeling of least value.

    Labelings are looked for just above the bound first, then in wider windows above it. The smaller the window, the
    more labels reduced costs drop: so even an incumbent that is far off, which alone would drop few, makes the search
    no larger. Of a window without a labeling, the upper end is the next bound.

    Args:
        graph: The workspace; its memory is ignored and it is used up.
        value_of: The true value of a full labeling, equal to the graph's up to float rounding.
        limits: Relative gap and deadline.
        start: A labeling known already.

    Returns:
        The minimum; its labels are None if there is no labeling of finite value.
    """
    graph.memory = [np.zeros_like(m) for m in graph.memory]
    best = Incumbent(value_of, limits.gap)
    if start is not None:
        best.offer(start)
    for degree, entries in LEVELS[:2]:
        if not presolve(graph) or not fold(graph, degree, entries, entries * WORK_PER_ENTRY):
            return _finish(best, np.inf, "elimination")
    if not graph.live_nodes():
        best.offer(unfold(graph, np.zeros(len(graph.cost), dtype=np.int64)))
        return _finish(best, graph.constant, "elimination")
    bound, dropped = ascend(graph, best, limits), best.applied
    bound, method = _in_windows(graph, best, bound, limits)
    best.applied = dropped  # of labels that are gone from every window
    return _finish(best, bound, method)


def _in_windows(graph: Workspace, best: Incumbent, bound: float, limits: Limits) -> tuple[float, str]:
    """Search above the bound, in windows each of which is twice the last one, and offer the best labeling.

    Returns:
        A bound on the labelings of the graph, and what closed it.
    """
    window, retries, method = FIRST_WINDOW, MOST_RETRIES, "dual ascent"
    while True:
        best.cap = np.inf
        if bound >= best.cutoff() or limits.expired():
            return bound, method if bound >= best.cutoff() else "time limit"
        best.cap = bound + window * abs(bound) if np.isfinite(bound) else np.inf
        whole = best.cap >= best.value or best.cap == np.inf
        best.applied = np.inf
        found, method = _below_cutoff(graph.copy(), best, limits)
        before, bound = bound, max(bound, min(found, best.applied))
        if method == "size" and bound > before and retries:
            # What is too large to be searched has a better bound at least: a narrow window above that may be small.
            window, retries = FIRST_WINDOW, retries - 1
        elif whole or method in ("time limit", "size"):
            return bound, method
        else:
            window = 2 * window if window < LAST_WINDOW else np.inf


def _below_cutoff(graph: Workspace, best: Incumbent, limits: Limits) -> tuple[float, str]:
    """Search among labelings below the cutoff, and offer the best of them.

    Returns:
        A bound on labelings below the cutoff, infinite if there are none, and what closed it.
    """
    # The ILP gets the problem as it was early on, before there were factors of many nodes.
    snapshot: Workspace | None = None
    bound, level = -np.inf, 1
    feasible = presolve(graph)
    while feasible and level < len(LEVELS):
        if not graph.live_nodes():
            best.offer(unfold(graph, np.zeros(len(graph.cost), dtype=np.int64)))
            return graph.constant, "elimination"
        before = sum(len(graph.alive(n)) for n in graph.live_nodes())
        bound = max(bound, ascend(graph, best, limits))
        if bound >= best.cutoff():
            return np.inf, "dual ascent"
        if limits.expired():
            return bound, "time limit"
        feasible = presolve(graph)
        after = sum(len(graph.alive(n)) for n in graph.live_nodes())
        if level == 1:
            snapshot = graph.copy()
        level += after > 0.8 * before
        if feasible and level < len(LEVELS):
            degree, entries = LEVELS[level]
            feasible = fold(graph, degree, entries, entries * WORK_PER_ENTRY)
    if not feasible:
        return np.inf, "dual ascent"
    assert snapshot is not None
    _inherit(snapshot, graph)
    return _close(snapshot, best, bound, limits)


def _finish(best: Incumbent, bound: float, method: str) -> Minimum:
    """What is proved: all that was cut off costs at least the last cutoff, everything else at least `bound`."""
    return best.labels, min(best.value, best.applied, bound), method


def _inherit(snapshot: Workspace, graph: Workspace) -> None:
    """Drop in the snapshot the labels that were dropped in the workspace since it was taken."""
    for n in graph.live_nodes():
        snapshot.cost[n] = np.where(np.isfinite(graph.cost[n]), snapshot.cost[n], np.inf)


def ascend(graph: Workspace, best: Incumbent, limits: Limits) -> float:
    """Sweep until the bound stalls or many labels are dropped; the workspace keeps the costs and the dropped labels.

    Args:
        graph: Presolved; edited in place.
        best: Offered the labelings met on the way.
        limits: Deadline.

    Returns:
        The bound on labelings below the cutoff.
    """
    messages = compact(graph)
    # Once two fifths of the labels are gone, presolve makes the problem smaller: sweeps go on there.
    total, fixed, last = sum(len(ls) for ls in messages.labels), 0, -np.inf
    for sweep in range(1, MAX_SWEEPS + 1):
        fixed += messages.sweep(True, best.cutoff()) + messages.sweep(False, best.cutoff())
        if sweep % SWEEPS_PER_DECODE:
            continue
        if messages.bound < best.cutoff():
            best.offer(decode(graph, messages))
        left = best.cutoff() - messages.bound
        if left <= 0 or limits.expired() or fixed > 0.4 * total or messages.bound - last < 0.02 * left:
            break
        last = messages.bound
    write_back(graph, messages, best.cutoff())
    return messages.bound


def decode(graph: Workspace, messages: MessagePassing) -> Ints:
    """Labels of all nodes, read off the messages."""
    labels = np.zeros(len(graph.cost), dtype=np.int64)
    for n, ls, pick in zip(messages.nodes, messages.labels, messages.decode(), strict=True):
        labels[n] = ls[pick]
    return unfold(graph, labels)


def _close(graph: Workspace, best: Incumbent, bound: float, limits: Limits) -> tuple[float, str]:
    """Solve what is left by an ILP.

    It gets the workspace after little elimination: factors of many nodes have a weaker linear program and more columns.
    """
    if not presolve(graph):
        return np.inf, "dual ascent"
    bound = max(bound, ascend(graph, best, limits))
    if bound >= best.cutoff() or not presolve(graph):
        return np.inf, "dual ascent"
    if best.labels is not None and columns_of(graph) > MOST_COLUMNS:
        return bound, "size"
    seconds = max(limits.deadline - time.monotonic(), 0.0)
    # HiGHS's tolerances are absolute: it needs to know what size the objective has.
    scale = abs(best.value) if np.isfinite(best.value) else 1.0
    labels, proved, method = solve_ilp(graph, scale, limits.gap / 2 * scale, seconds)
    if labels is not None:
        best.offer(unfold(graph, labels))
    return max(bound, proved), method
