"""The labels near the bound alone: what is left of a priced instance is small enough for the solver without limits."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autopar.search.solver.intervals.exact import as_problem
from autopar.search.solver.intervals.instance import Instance
from autopar.search.solver.intervals.messages import Messages
from autopar.search.solver.intervals.restrict import Entries, restrict
from autopar.search.solver.minimize import Limits, minimize
from autopar.search.solver.problem import Ints
from autopar.search.solver.workspace import build

FIRST_ENTRIES, LARGER = 70_000, 10
"""Costs of pairs in the first window, and how many times as many in the next one."""

GAP = 1e-5


def cheaper(instance: Instance, entries: Entries, messages: Messages, labels: Ints, deadline: float) -> Ints:
    """Labels that cost less with their prices, whatever memory they take; larger and larger windows until time is up.

    Trees change one after the other, and stay where each change alone makes it worse. Here all nodes change at once,
    within the labels that the messages leave close to the bound.

    Args:
        instance: the problem.
        entries: its.
        messages: its, after some sweeps.
        labels: the best known, which every window has, [n].
        deadline: of the monotonic clock.
    """
    priced = replace(instance, cost=instance.cost + messages.price, memory=np.zeros_like(instance.memory))
    reduced, most = messages.reduced(), FIRST_ENTRIES
    begun, took = time.monotonic(), 0.0
    # A larger one takes longer than the one before, and has to end.
    while begun + took < deadline:
        allowed = _near(instance, messages, reduced, most)
        allowed[instance.first[:-1] + labels] = True
        left = restrict(priced, entries, allowed)
        if left is None:
            return labels
        before = left.instance.value(left.narrowed(instance, labels))
        limits = Limits(GAP, deadline)
        found, _, _ = minimize(build(as_problem(left.instance), False), left.instance.value, limits)
        if found is not None and left.instance.value(found) < before:
            labels = left.spread(instance, found)
        if most >= len(instance.table):
            break  # all labels were possible
        most *= LARGER
        begun, took = time.monotonic(), time.monotonic() - begun
    return labels


def _near(instance: Instance, messages: Messages, reduced: NDArray[np.float64], most: int) -> NDArray[np.bool_]:
    """The labels of least reduced cost whose pairs are at most `most`: of each node one or more, of those alone one."""
    owner, nodes = messages.tables.owner, len(instance.begin)
    least = np.minimum.reduceat(reduced, instance.first[:-1])
    at = np.flatnonzero(reduced <= least[owner])
    one = np.zeros(len(reduced), dtype=bool)
    one[at[np.unique(owner[at], return_index=True)[1]]] = True
    joined = np.zeros(nodes, dtype=bool)
    joined[instance.u] = joined[instance.v] = True
    possible = joined[owner] & (messages.tables.cost == instance.cost)
    order = np.sort(reduced[possible])
    low, high = 0, len(order)
    while low < high:
        middle = (low + high + 1) // 2
        count = np.bincount(owner, one | (possible & (reduced <= order[middle - 1])), nodes)
        low, high = (middle, high) if count[instance.u] @ count[instance.v] <= most else (low, middle - 1)
    return one | (possible & (reduced <= order[low - 1])) if low else one
