"""A memory budget: price memory by a multiplier, then close what the multiplier leaves open with an ILP."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from autopar.errors import InfeasibleError
from autopar.search.fold import fold, unfold
from autopar.search.graph import Graph, build
from autopar.search.ilp import solve_ilp
from autopar.search.minimise import LEVELS, WORK_PER_ENTRY, Incumbent, Limits, ascend, minimise
from autopar.search.presolve import presolve
from autopar.search.problem import Edge, Ints, Node, Problem, evaluate

Progress = Callable[[str, float, float], None]

MAX_STEPS = 24
ROUNDING = 1e-12  # relative: memory sums may exceed the budget by float rounding


@dataclass(frozen=True)
class Point:
    """A labelling seen from the multiplier: what it costs, what it needs."""

    labels: Ints
    cost: float
    memory: float


@dataclass(frozen=True)
class Outcome:
    """The best labelling within the budget, a bound for all of them, and what closed it."""

    point: Point
    bound: float
    method: str


def fits(memory: float, budget: float) -> bool:
    """Whether memory is within a budget, up to rounding."""
    return memory <= budget + ROUNDING * abs(budget)


def locate(problem: Problem, labels: Ints) -> Point:
    """The point of a labelling."""
    return Point(labels, *evaluate(problem, labels))


def least_memory(problem: Problem, limits: Limits) -> Point:
    """The labelling that needs least memory, whatever it costs; raises InfeasibleError if there is none."""
    nodes = tuple(replace(n, cost=np.where(np.isfinite(n.cost), n.memory, np.inf)) for n in problem.nodes)
    edges = tuple(replace(e, table=np.where(np.isfinite(e.table), 0.0, np.inf)) for e in problem.edges)
    found = minimise(build(Problem(nodes, edges), False), lambda ls: evaluate(problem, ls)[1], replace(limits, gap=0.0))
    if found.labels is None:
        raise InfeasibleError("no choice of labels avoids every forbidden label and pair; allow more candidates")
    return locate(problem, found.labels)


def solve_within(problem: Problem, budget: float, free: Outcome, limits: Limits, progress: Progress) -> Outcome:
    """Minimise cost within a budget that the unconstrained minimum exceeds.

    Args:
        problem: The problem.
        budget: Bytes.
        free: The unconstrained minimum; its bound is valid here too.
        limits: Relative gap and deadline.
        progress: Called with phase, incumbent and bound.

    Raises:
        InfeasibleError: if even the least memory exceeds the budget.
    """
    least = least_memory(problem, limits)
    if not fits(least.memory, budget):
        raise InfeasibleError(
            f"no plan needs less than {least.memory:.6g} bytes, the budget is {budget:.6g}; "
            "raise the budget or add candidates that shard more",
            needed=least.memory,
            budget=budget,
        )
    base = build(problem, True)
    if not presolve(base) or not fold(base, LEVELS[0][0], LEVELS[0][1], LEVELS[0][1] * WORK_PER_ENTRY):
        raise InfeasibleError("no choice of labels avoids every forbidden label and pair; allow more candidates")
    outcome, multiplier = _bracket(problem, base, budget, replace(free, point=least), free.point, limits, progress)
    progress("multiplier", outcome.point.cost, outcome.bound)
    if _closed(outcome, limits) or limits.expired():
        return outcome
    outcome = _close(problem, base, budget, multiplier, outcome, limits)
    progress(outcome.method, outcome.point.cost, outcome.bound)
    return outcome


def _closed(outcome: Outcome, limits: Limits) -> bool:
    return outcome.point.cost - outcome.bound <= limits.gap * abs(outcome.point.cost)


def reprice(graph: Graph, multiplier: float) -> Graph:
    """A copy with memory priced at `multiplier` seconds per byte; negative to undo it."""
    priced = graph.copy()
    priced.cost = [c + multiplier * m for c, m in zip(graph.cost, graph.memory, strict=True)]
    return priced


def _bracket(
    problem: Problem, base: Graph, budget: float, start: Outcome, over: Point, limits: Limits, progress: Progress
) -> tuple[Outcome, float]:
    """Kelley's method in one dimension: the next multiplier is where the lines of the two best points cross.

    Returns:
        The best point within the budget with the best bound, and the multiplier that gave the bound.
    """
    best, bound, best_multiplier, under = start.point, start.bound, 0.0, start.point
    inner = replace(limits, gap=limits.gap / 4)
    for _ in range(MAX_STEPS):
        if under.cost <= over.cost or limits.expired():
            break
        multiplier = (under.cost - over.cost) / (over.memory - under.memory)

        def priced(labels: Ints, multiplier: float = multiplier) -> float:
            cost, memory = evaluate(problem, labels)
            return cost + multiplier * memory

        crossing = over.cost + multiplier * over.memory
        found = minimise(reprice(base, multiplier), priced, inner, best.labels)
        if found.bound - multiplier * budget > bound:
            bound, best_multiplier = found.bound - multiplier * budget, multiplier
        assert found.labels is not None
        point = locate(problem, found.labels)
        if fits(point.memory, budget):
            under = point
            best = min(best, point, key=lambda p: p.cost)
        else:
            over = point
        progress("multiplier", best.cost, min(best.cost, bound))
        if found.value >= crossing - 1e-9 * abs(crossing) or best.cost - bound <= limits.gap * abs(best.cost):
            break
    return Outcome(best, min(bound, best.cost), "multiplier"), best_multiplier


def _close(
    problem: Problem, base: Graph, budget: float, multiplier: float, outcome: Outcome, limits: Limits
) -> Outcome:
    """Fix labels by priced reduced cost, fold what carries no memory, and give the rest to HiGHS with the row."""

    def value_of(labels: Ints) -> float:
        cost, memory = evaluate(problem, labels)
        return cost if fits(memory, budget) else float("inf")

    best = Incumbent(value_of, limits.gap)
    best.offer(outcome.point.labels)
    graph, bound, level = base, outcome.bound, 1
    while level < len(LEVELS) - 1:
        priced = reprice(graph, multiplier)
        priced.constant -= multiplier * budget
        before = sum(len(graph.alive(n)) for n in graph.live_nodes())
        bound = max(bound, ascend(priced, best, limits))
        if bound >= best.cutoff():
            return _outcome(problem, best, bound, "multiplier")
        graph = reprice(priced, -multiplier)
        graph.constant += multiplier * budget
        degree, entries = LEVELS[level]
        if not presolve(graph) or not fold(graph, degree, entries, entries * WORK_PER_ENTRY):
            return _outcome(problem, best, np.inf, "multiplier")
        after = sum(len(graph.alive(n)) for n in graph.live_nodes())
        level += after > 0.8 * before
    scale = abs(best.value)
    seconds = limits.deadline - time.monotonic()
    import os
    if os.environ.get('DBG'): print('   ilp', len(graph.live_nodes()), 'labels', sum(len(graph.alive(n)) for n in graph.live_nodes()),'pinned',sum(graph.carries_memory(n) for n in graph.live_nodes()), 'entries', sum(f.table.size for f in graph.factors.values()), 'gap',1-bound/best.value, 'lb',bound,'ub',best.value); t=time.time()
    found = solve_ilp(graph, scale, limits.gap / 2 * scale, seconds, budget - _settled(graph))
    if os.environ.get('DBG'): print('   ilp took', time.time()-t)
    if found.labels is not None:
        best.offer(unfold(graph, found.labels))
    return _outcome(problem, best, max(bound, found.bound), found.method)


def _settled(graph: Graph) -> float:
    """Memory of the nodes folded away, the same for each of their labels."""
    return sum(float(graph.memory[s.node][np.isfinite(s.cost)][0]) for s in graph.folded)


def _outcome(problem: Problem, best: Incumbent, bound: float, method: str) -> Outcome:
    assert best.labels is not None
    return Outcome(locate(problem, best.labels), min(best.value, best.applied, bound), method)
