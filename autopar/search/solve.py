"""Entry point of the combinatorial solver."""

from __future__ import annotations

import time

import numpy as np

from autopar.errors import InfeasibleError
from autopar.search.graph import build
from autopar.search.minimise import Limits, minimise
from autopar.search.price import Outcome, Point, Progress, fits, locate, solve_within
from autopar.search.problem import Problem, Solution, evaluate


def solve(
    problem: Problem,
    *,
    budget: float | None = None,
    gap: float = 1e-3,
    time_limit: float = 60.0,
    progress: Progress | None = None,
) -> Solution:
    """Minimise node and edge costs, with the memory of the chosen labels within a budget.

    Deterministic unless the time limit decides.

    Args:
        problem: Nodes and edges.
        budget: Bytes, or None for no limit.
        gap: Relative distance between objective and lower bound at which to stop.
        time_limit: Seconds after which the incumbent is returned with the bound proved so far.
        progress: Called with (phase, incumbent, bound).

    Returns:
        Labels with their objective, memory and a valid lower bound.

    Raises:
        InfeasibleError: if there is no labelling of finite cost within the budget.
    """
    report = progress or (lambda phase, incumbent, bound: None)
    limits = Limits(gap, time.monotonic() + time_limit)
    found = minimise(build(problem, False), lambda labels: evaluate(problem, labels)[0], limits)
    if found.labels is None:
        raise InfeasibleError("no choice of labels avoids every forbidden label and pair; allow more candidates")
    outcome = Outcome(locate(problem, found.labels), found.bound, found.method)
    report("unconstrained", found.value, found.bound)
    if budget is not None and not fits(outcome.point.memory, budget):
        outcome = solve_within(problem, budget, outcome, limits, report)
    point: Point = outcome.point
    labels = np.asarray(point.labels, dtype=np.int64)
    return Solution(labels, point.cost, min(outcome.bound, point.cost), point.memory, outcome.method)
