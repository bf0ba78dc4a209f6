"""One entry: exactly where the instance is small, by multipliers of its limits otherwise."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from autopar.search.solver.intervals.exact import close
from autopar.search.solver.intervals.instance import Instance
from autopar.search.solver.intervals.multipliers import Best, Progress, ascend
from autopar.search.solver.problem import Ints

MOST_ENTRIES = 500_000
"""Costs of pairs of an instance that is tried exactly; of others presolve alone would take the time."""

FIRST_SHARE, EXACT_SHARE = 0.05, 0.5
"""Of the time: multipliers, for a first value, and the ILP; what is left goes to multipliers again."""


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        labels: of each node, [n], within the limit at each point; None if none were found.
        value: what they cost, inf without.
        bound: no labels within the limit cost less; inf: there are none.
        method: ``MIP`` where it ended by the gap, ``multipliers``, or ``time limit``.
    """

    labels: Ints | None
    value: float
    bound: float
    method: str


def solve(instance: Instance, seconds: float, gap: float, progress: Progress) -> Found:
    """Minimize within the limit of each program point.

    Args:
        instance: the problem.
        seconds: time limit; it ends up to a few seconds later.
        gap: relative, at which it stops.
        progress: called with the best value and the bound so far.
    """
    begin, best = time.monotonic(), Best()
    small = len(instance.table) <= MOST_ENTRIES
    ascend(instance, best, begin + (FIRST_SHARE if small else 1.0) * seconds, gap, progress)
    method = "multipliers"
    if small and not best.within(gap):
        if close(instance, best, begin + EXACT_SHARE * seconds, gap):
            method = "MIP"
        else:
            ascend(instance, best, begin + seconds, gap, progress)
    if not np.isposinf(best.bound) and not best.within(gap):
        method = "time limit"
    return Found(best.labels, best.value, min(best.bound, best.value), method)
