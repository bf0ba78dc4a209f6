"""A plan within a memory budget, which holds for the graph that is emitted and not for an estimate.

The search counts memory by rows: parameters, optimizer state and what is kept when the backward pass begins. A row is a
relaxation: it leaves out what is transient. So the graph of the plan found is rewritten and its peak measured; if that
exceeds the budget, the row is tightened by what is too much, and the search goes on. The bound is that of the row as it
was at first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.cost.memory import format_bytes
from autopar.errors import InfeasibleError
from autopar.plan import Plan
from autopar.redistribute import Tables
from autopar.search.axes import descend, placements
from autopar.search.build import Built, Memory
from autopar.search.frontier import MAX_PRICES, Frontier, Mix, within
from autopar.search.minimise import Limits
from autopar.search.price import fits
from autopar.search.problem import Ints, Solution
from autopar.search.quotient import Quotient
from autopar.search.restrict import Restrictions
from autopar.search.solve import solve

MORE_PRICES = 3
"""Prices tried for a row that is tightened."""

ROUNDS = 8
"""How often a row is tightened."""

CLOSE = 0.97
"""A plan that uses so much of the budget need not be improved by loosening its row again."""

SMALLEST = 1e-3
"""Share of the budget below which what one operator works on does not matter."""

SMALL = 1500
"""Problems of so few labels are solved with the memory row in the ILP, too, where prices leave a gap."""

Peak = Callable[[Plan], Mapping[str, float]]
Progress = Callable[[str, float, float], None]


@dataclass(frozen=True)
class Task:
    """What is searched.

    Attributes:
        make: the problem under restrictions, with memory counted in some way.
        read: ``(problem, choice, lower bound, method)`` to a plan.
        state: bytes of each parameter with its state, with gradients or without.
        restrictions: what is decided already.
        limits: relative gap and deadline.
        memory: bytes per device; None for no limit.
        peak: of a plan's graph, by category.
        recompute: whether what is kept for the backward pass is searched.
        classes: which nodes share a decision.
        progress: called with phase, incumbent and bound.
    """

    make: Callable[[Restrictions, Memory], Built]
    read: Callable[[Built, Mix, float, str], Plan]
    state: Callable[[bool], Mapping[str, float]]
    restrictions: Restrictions
    limits: Limits
    memory: float | None
    peak: Peak | None
    recompute: bool
    classes: Quotient
    progress: Progress

    @property
    def seconds(self) -> float:
        """What is left of the time limit."""
        return max(1.0, self.limits.deadline - time.monotonic())


def plan_within(task: Task) -> Plan:
    """The best plan of one problem, within the budget if there is one.

    Raises:
        InfeasibleError: nothing fits.
    """
    built = task.make(task.restrictions, Memory(task.state(True)))
    solution = solve(built.problem, gap=task.limits.gap, time_limit=task.seconds, progress=task.progress)
    plan = task.read(built, _single(solution), solution.lower_bound, solution.method)
    if task.memory is None or task.peak is None or fits(_total(task.peak(plan)), task.memory):
        return plan
    return _fitting(task, task.restrictions, solution.lower_bound)


def plan_by_axes(task: Task, tables: Tables, bound: float) -> Plan:
    """A plan on three axes or more: layouts axis by axis, then what is kept under these layouts.

    Layouts are searched for parameters that take all of the budget, or half of it, and so on until the rest fits.

    Args:
        task: what is searched.
        tables: redistribution costs.
        bound: that no plan falls below.

    Raises:
        InfeasibleError: nothing fits.
    """
    limits = task.limits

    def make(restrictions: Restrictions) -> Built:
        return task.make(restrictions, Memory(task.state(True)))

    failure: InfeasibleError | None = None
    for part in (1.0, 0.5, 0.25, 0.125):
        room = None if task.memory is None else part * task.memory
        try:
            built, found = descend(make, task.restrictions, tables, room, limits.gap, task.seconds, task.progress)
        except InfeasibleError as e:
            raise failure or e from e
        plan = task.read(built, _single(found), bound, "axis by axis")
        if task.memory is None or task.peak is None or fits(_total(task.peak(plan)), task.memory):
            return plan
        fixed = replace(task.restrictions, fixed=placements(built, found, tables), free=())
        try:
            return _fitting(task, fixed, bound, "axis by axis")
        except InfeasibleError as e:
            failure = failure or e
    assert failure is not None
    raise failure


def _single(solution: Solution) -> Mix:
    return Mix(solution.labels, solution.labels, 0.0, solution.objective, solution.memory)


def _total(held: Mapping[str, float]) -> float:
    return sum(held.values())


def _fitting(task: Task, restrictions: Restrictions, bound: float, method: str = "") -> Plan:
    """The best plan whose graph fits, by rows that are tightened until it does.

    The row is what is held when the backward pass begins. Where that does not lead to a plan that fits, gradients
    count, too, if they are what is too much; or operators may not work on so much at a time.

    Args:
        task: what is searched.
        restrictions: what is decided already.
        bound: that no plan falls below.
        method: that the certificate names.

    Raises:
        InfeasibleError: no such plan fits.
    """
    assert task.memory is not None
    row = Memory(task.state(False), activations=True, states=task.recompute)
    needed, gradients, working = np.inf, False, np.inf
    while True:
        built = task.make(restrictions, replace(row, state=task.state(gradients), working=working))
        try:
            found = _tightened(task, built, bound, method, relaxed=not gradients and working == np.inf)
        except InfeasibleError:  # nothing works on so little
            break
        if found.plan is not None:
            return found.plan
        bound, needed = found.bound, min(needed, found.needed)
        if not gradients and working == np.inf and found.gradients:
            gradients = True
            continue
        gradients, limit = False, found.working / 2
        if not limit < working / 1.5 or limit < SMALLEST * task.memory or time.monotonic() > task.limits.deadline:
            break
        working = limit
    raise InfeasibleError(
        f"no plan was found that needs less than {format_bytes(needed)} a device, and the budget is "
        f"{format_bytes(task.memory)}: {format_bytes(needed - task.memory)} are missing. Raise memory= to "
        f"{format_bytes(needed)}, use more devices or a smaller batch",
        needed=needed,
        budget=task.memory,
    )


@dataclass(frozen=True)
class Found:
    """What came of one kind of row.

    Attributes:
        plan: the best that fits, if any does.
        bound: no plan within the budget falls below.
        needed: the least that a plan was found to need.
        gradients: whether what was too much was gradients rather than activations.
        working: the most bytes that an operator takes and makes in the last plan.
    """

    plan: Plan | None
    bound: float
    needed: float
    gradients: bool
    working: float


def _tightened(task: Task, built: Built, bound: float, method: str, relaxed: bool) -> Found:
    """The best plan of one kind of row that fits.

    Args:
        task: what is searched.
        built: its problem, with memory counted in one way.
        bound: known before.
        method: that the certificate names.
        relaxed: whether no plan that fits has more than the budget in its row, so that the row bounds all of them.
    """
    assert task.memory is not None
    assert task.peak is not None
    frontier = Frontier(built.problem, task.limits)
    best: Plan | None = None
    needed, fitting, failing, gradients = np.inf, -np.inf, np.inf, False
    row = np.inf  # what the cheapest plan needs says how much is transient
    before: Mix | None = None
    for turn in range(ROUNDS):
        try:
            mix = _within(task, built, frontier, row, first=turn == 1)
        except InfeasibleError:
            point = frontier.least()
            mix, row = Mix(point.labels, point.labels, 0.0, point.cost, point.memory), -np.inf
        bound = max(bound, frontier.bound(task.memory)) if relaxed else bound
        plan = task.read(built, mix, bound, method or "prices")
        held = task.peak(plan)
        size = _total(held)
        needed = min(needed, size)
        task.progress(f"peak {format_bytes(size)}", mix.cost, bound)
        if size <= task.memory:
            best = plan if best is None or mix.cost < best.certificate.objective else best
            fitting = max(fitting, mix.memory)
        else:
            failing = min(failing, mix.memory)
            gradients = best is None and held.get("gradients", 0.0) > held.get("activations", 0.0)
        same = before is not None and (before.cost, before.memory) == (mix.cost, mix.memory)
        done = row == -np.inf or same or CLOSE * task.memory <= size <= task.memory
        late = time.monotonic() > task.limits.deadline and best is not None
        if done or late or (gradients and relaxed and turn) or failing - fitting < (1 - CLOSE) * task.memory:
            break
        before = mix
        row = mix.memory + task.memory - size  # what is transient stays about the same
        if not fitting < row < failing:
            row = (fitting + failing) / 2 if np.isfinite(fitting) else failing * CLOSE
    working = max(float(v.working[x]) for v, x in zip(built.variables, mix.under, strict=True) if v.working is not None)
    return Found(best, bound, needed, gradients, working)


def _within(task: Task, built: Built, frontier: Frontier, row: float, first: bool) -> Mix:
    """The best choice within a row; after the first, few more prices are tried."""

    def alike(labels: Ints) -> list[NDArray[np.bool_]]:
        return [v.candidate == v.candidate[x] for v, x in zip(built.variables, labels, strict=True)]

    counts = np.array([v.count for v in built.variables])
    mix = within(frontier, row, counts, alike, task.progress, MAX_PRICES if first else MORE_PRICES)
    gap = mix.cost - frontier.bound(row)
    if gap > task.limits.gap * mix.cost and sum(len(n.cost) for n in built.problem.nodes) <= SMALL:
        exact = solve(built.problem, budget=row, gap=task.limits.gap, time_limit=task.seconds)
        if exact.objective < mix.cost:
            return _single(exact)
    return mix
