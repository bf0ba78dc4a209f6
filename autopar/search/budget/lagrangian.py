"""A memory budget: relax the constraint by a Lagrange multiplier, then close what is left open with an ILP.

The multiplier is in seconds per byte. For any multiplier, the minimum of ``cost + multiplier * (memory - budget)`` is
a lower bound on the cost within the budget; `_bracket` looks for the multiplier with the best bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autopar.errors import InfeasibleError
from autopar.search.solver.eliminate import fold, unfold
from autopar.search.solver.ilp import solve_ilp
from autopar.search.solver.message_passing import MessagePassing, compact, write_back
from autopar.search.solver.minimize import EXACT, LEVELS, WORK_PER_ENTRY, Incumbent, Limits, ascend, decode, minimize
from autopar.search.solver.presolve import presolve
from autopar.search.solver.problem import Ints, Problem, Solution, evaluate, locate
from autopar.search.solver.workspace import Workspace, build

Progress = Callable[[str, float, float], None]

MAX_STEPS = 16
SWEEPS_PER_STEP = 8
NARROW = 0.05  # relative width of the multiplier's bracket at which to stop
FIRST_WINDOW = 0.003  # how far above the bound the ILP first looks, as a share of the objective
WIDEN = 2.5
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


def least_memory(problem: Problem, limits: Limits) -> Solution:
    """The labeling that needs least memory, whatever it costs.

    Raises:
        InfeasibleError: there is no labeling at all.
    """
    # Memory in place of cost; what is forbidden stays forbidden.
    nodes = tuple(replace(n, cost=np.where(np.isfinite(n.cost), n.memory, np.inf)) for n in problem.nodes)
    edges = tuple(replace(e, table=np.where(np.isfinite(e.table), 0.0, np.inf)) for e in problem.edges)

    def value_of(labels: Ints) -> float:
        cost, memory = evaluate(problem, labels)
        return memory if np.isfinite(cost) else float("inf")

    labels, _, _ = minimize(build(Problem(nodes, edges), False), value_of, replace(limits, gap=0.0))
    if labels is None:
        raise InfeasibleError(NO_LABELING)
    return locate(problem, labels)


def solve_within(problem: Problem, budget: float, free: Solution, limits: Limits, progress: Progress) -> Solution:
    """Minimize cost within a budget that the unconstrained minimum exceeds.

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
    require_fit(least, budget)
    graph = build(problem, True)
    degree, entries = LEVELS[1]
    if not presolve(graph) or not fold(graph, degree, entries, entries * WORK_PER_ENTRY):
        raise InfeasibleError(NO_LABELING)

    def value_of(labels: Ints) -> float:
        cost, memory = evaluate(problem, labels)
        return cost if fits(memory, budget) else float("inf")

    best = Incumbent(value_of, limits.gap)
    best.offer(least.labels)
    bound, multiplier = _bracket(problem, graph, budget, locate(problem, free.labels), best, limits)
    bound = max(bound, free.lower_bound)
    progress("multiplier", best.value, bound)
    if best.value - bound <= limits.gap * abs(best.value) or limits.expired():
        method = "time limit" if limits.expired() else "multiplier"
        return _solution(problem, _known(best), min(best.value, best.applied, bound), method)
    found = _close(problem, graph, budget, multiplier, best, bound, limits)
    progress(found.method, found.objective, found.lower_bound)
    return found


def reprice(graph: Workspace, multiplier: float) -> Workspace:
    """A copy with `multiplier` seconds per byte of memory added to the costs; negative to undo it."""
    priced = graph.copy()
    priced.cost = [c + multiplier * m if m.any() else c for c, m in zip(graph.cost, graph.memory, strict=True)]
    return priced


def settled(graph: Workspace) -> float:
    """Memory of the eliminated nodes, which `fold` only eliminates where it is the same for all their labels."""
    return sum(float(graph.memory[node][np.isfinite(cost)][0]) for node, cost, _ in graph.folded)


def _bracket(
    problem: Problem, graph: Workspace, budget: float, over: Solution, best: Incumbent, limits: Limits
) -> tuple[float, float]:
    """Kelley's cutting planes in one dimension: the next multiplier is where the lines of the two best labelings cross.

    As a function of the multiplier, each labeling is a line of slope ``memory - budget``, and the bound is their lower
    envelope. The messages of one multiplier start the next, so each step needs few sweeps.

    Args:
        problem: The problem.
        graph: Presolved; gets the costs of the messages, with the multiplier taken out.
        budget: Bytes.
        over: The cheapest labeling, which exceeds the budget.
        best: A labeling within the budget; offered better ones.
        limits: Deadline.

    Returns:
        The best bound, and the multiplier that gave it.
    """
    messages = compact(graph)
    room = budget - settled(graph)  # for the nodes that are left
    _sweep(messages, limits)
    best.offer(decode(graph, messages, room))
    # `under` fits and `over` does not: the best multiplier is between those at which either is the minimum.
    under, bound, chosen, current = locate(problem, _known(best)), -np.inf, 0.0, 0.0
    low, high = 0.0, np.inf
    for _ in range(MAX_STEPS):
        if under.objective <= over.objective or limits.expired() or high - low < NARROW * high:
            break
        multiplier = (under.objective - over.objective) / (over.memory - under.memory)
        if not low < multiplier < high:
            # The messages' labelings are not exact, so lines can cross outside the bracket: bisect instead.
            multiplier = low * 4 if np.isinf(high) else float(np.sqrt(low * high)) if low else high / 4
        messages.price(multiplier - current)
        current = multiplier
        _sweep(messages, limits)
        if messages.bound - multiplier * budget > bound:
            bound, chosen = messages.bound - multiplier * budget, multiplier
        best.offer(decode(graph, messages, room))
        point = locate(problem, decode(graph, messages))
        if fits(point.memory, budget):
            best.offer(point.labels)
            under, high = point if np.isfinite(point.objective) else under, multiplier
        else:
            over, low = point if np.isfinite(point.objective) else over, multiplier
    messages.price(-current)
    write_back(graph, messages, np.inf)
    return bound, chosen


def _sweep(messages: MessagePassing, limits: Limits) -> None:
    for _ in range(SWEEPS_PER_STEP):
        messages.sweep(True, np.inf)
        messages.sweep(False, np.inf)
        if limits.expired():
            return


def _solution(problem: Problem, labels: Ints, bound: float, method: str) -> Solution:
    return Solution(labels, *evaluate(problem, labels), bound, method)


def _known(best: Incumbent) -> Ints:
    assert best.labels is not None
    return best.labels


def _close(
    problem: Problem, graph: Workspace, budget: float, multiplier: float, best: Incumbent, bound: float, limits: Limits
) -> Solution:
    """Look for labelings just above the bound, then in wider windows: no labeling is below a window that was searched.

    The smaller the window above the bound, the more labels the reduced costs fix. So even a bad incumbent, which alone
    would fix few, makes the search no larger.
    """
    window, proved, method = max(2 * limits.gap, FIRST_WINDOW), bound, "multiplier"
    while True:
        best.cap = proved + window * abs(best.value)
        whole = best.cap >= best.value
        found, method = _search(graph.copy(), budget, multiplier, best, limits)
        proved = max(proved, min(best.applied, found))
        done = best.value - proved <= max(limits.gap, 20 * EXACT) * abs(best.value) or whole
        if done or method == "time limit":
            return _solution(problem, _known(best), min(best.value, proved), method)
        window *= WIDEN


def _search(graph: Workspace, budget: float, multiplier: float, best: Incumbent, limits: Limits) -> tuple[float, str]:
    """Fix labels by reduced cost, eliminate nodes without memory, and give HiGHS the rest with the memory constraint.

    Returns:
        A bound on labelings within the budget and below the cutoff, and what closed it.
    """
    level = 1
    while level < len(LEVELS) - 1:
        priced = reprice(graph, multiplier)
        priced.constant -= multiplier * budget
        before = sum(len(graph.alive(n)) for n in graph.live_nodes())
        bound = ascend(priced, best, limits, budget - settled(graph))
        if bound >= best.cutoff():
            return np.inf, "multiplier"
        graph = reprice(priced, -multiplier)
        graph.constant += multiplier * budget
        degree, entries = LEVELS[level]
        if not presolve(graph) or not fold(graph, degree, entries, entries * WORK_PER_ENTRY):
            return np.inf, "multiplier"
        after = sum(len(graph.alive(n)) for n in graph.live_nodes())
        # A level is given up once reduced costs drop few labels more.
        level += after > 0.8 * before
        if not graph.live_nodes():
            best.offer(unfold(graph, np.zeros(len(graph.cost), dtype=np.int64)))
            return (graph.constant if fits(settled(graph), budget) else np.inf), "elimination"
        if limits.expired():
            return bound, "time limit"
    scale = abs(best.value)
    seconds = limits.deadline - time.monotonic()
    labels, proved, method = solve_ilp(graph, scale, limits.gap / 2 * scale, seconds, budget - settled(graph))
    if labels is not None:
        best.offer(unfold(graph, labels))
    return max(bound, proved), method


def solve(
    problem: Problem,
    *,
    budget: float | None = None,
    gap: float = 1e-3,
    time_limit: float = 60.0,
    progress: Progress | None = None,
    met: Callable[[Ints], None] | None = None,
    start: Ints | None = None,
) -> Solution:
    """Minimize node and edge costs, with the memory of the chosen labels within a budget.

    Deterministic unless the time limit decides.

    Args:
        problem: Nodes and edges.
        budget: Bytes, or None for no limit.
        gap: Relative distance between objective and lower bound at which to stop.
        time_limit: Seconds after which the incumbent is returned with the bound proved so far.
        progress: Called with (phase, incumbent, bound).
        met: Called with each labeling that the search without a budget looks at.
        start: A labeling that is known.

    Returns:
        Labels with their objective, memory and a valid lower bound.

    Raises:
        InfeasibleError: if there is no labeling of finite cost within the budget.
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
    found = _solution(problem, labels, bound, method)
    report("unconstrained", found.objective, found.lower_bound)
    if budget is not None and not fits(found.memory, budget):
        found = solve_within(problem, budget, found, limits, report)
    bound = min(found.lower_bound, found.objective)  # float rounding may put the bound above
    return replace(found, labels=np.asarray(found.labels, dtype=np.int64), lower_bound=bound)
