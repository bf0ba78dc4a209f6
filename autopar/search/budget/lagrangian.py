"""A memory budget as a price: seconds per byte, under which a problem has no budget any more.

For any multiplier, the minimum of ``cost + multiplier * (memory - budget)`` is a lower bound on the cost within the
budget; `autopar.search.budget.pareto` looks for the multiplier with the best bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from autopar.errors import InfeasibleError
from autopar.search.solver.minimize import Limits, minimize
from autopar.search.solver.problem import Ints, Problem, Solution, evaluate
from autopar.search.solver.workspace import Workspace, build

Progress = Callable[[str, float, float], None]

NO_LABELING = "no choice of labels avoids every forbidden label and pair; allow more candidates"
ROUNDING = 1e-12  # relative: memory sums may exceed the budget by float rounding


def fits(memory: float, budget: float) -> bool:
    """Whether memory is within a budget, up to rounding."""
    return memory <= budget + ROUNDING * abs(budget)


def require_fit(least: Solution, budget: float) -> None:
    """Refuse a budget that the labeling of least memory exceeds.

    Raises:
        InfeasibleError: says how much that labeling needs.
    """
    if not fits(least.memory, budget):
        raise InfeasibleError(
            f"no plan needs less than {least.memory:.6g} bytes, the budget is {budget:.6g}; "
            "raise the budget or add candidates that shard more",
            needed=least.memory,
            budget=budget,
        )


def reprice(graph: Workspace, multiplier: float) -> Workspace:
    """A copy with `multiplier` seconds per byte of memory added to the costs."""
    priced = graph.copy()
    priced.cost = [c + multiplier * m if m.any() else c for c, m in zip(graph.cost, graph.memory, strict=True)]
    return priced


def settled(graph: Workspace) -> float:
    """Memory of the eliminated nodes, which `fold` only eliminates where it is the same for all their labels."""
    return sum(float(graph.memory[node][np.isfinite(cost)][0]) for node, cost, _ in graph.folded)


def solve(
    problem: Problem,
    *,
    gap: float = 1e-3,
    time_limit: float = 60.0,
    progress: Progress | None = None,
    met: Callable[[Ints], None] | None = None,
    start: Ints | None = None,
) -> Solution:
    """Minimize node and edge costs, whatever the memory of the chosen labels.

    Deterministic unless the time limit decides.

    Args:
        problem: Nodes and edges.
        gap: Relative distance between objective and lower bound at which to stop.
        time_limit: Seconds after which the incumbent is returned with the bound proved so far.
        progress: Called with (phase, incumbent, bound).
        met: Called with each labeling that is looked at.
        start: A labeling that is known.

    Returns:
        Labels with their objective, memory and a valid lower bound.

    Raises:
        InfeasibleError: if there is no labeling of finite cost.
    """
    report = progress or (lambda phase, incumbent, bound: None)
    limits = Limits(gap, time.monotonic() + time_limit)

    def value_of(labels: Ints) -> float:
        value = evaluate(problem, labels)[0]
        if met is not None and np.isfinite(value):
            met(labels)
        return value

    labels, bound, method = minimize(build(problem, False), value_of, limits, start)
    if labels is None:
        raise InfeasibleError(NO_LABELING)
    cost, memory = evaluate(problem, labels)
    bound = min(bound, cost)  # float rounding may put the bound above
    report("unconstrained", cost, bound)
    return Solution(np.asarray(labels, dtype=np.int64), cost, memory, bound, method)
