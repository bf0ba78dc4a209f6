"""A plan within a memory budget, which holds for the graph that is emitted and not for an estimate.

The search counts memory by a constraint: parameters, optimizer state and what is live while one operator runs, at the
program point where a device holds the most (`autopar.search.formulation.peak_point`). It is a relaxation: it leaves out
other program points, and copies. So the graph of the plan found is rewritten and its peak measured; if that exceeds the
budget, the constraint is tightened by what is too much, and the search goes on. The bound is that of the constraint as
it was at first: a tightened one says nothing about the plans that it excludes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InfeasibleError
from autopar.ir.plan import Plan
from autopar.search.axis_by_axis import descend, placements
from autopar.search.budget.budget_problem import BudgetProblem, missing, peak_bytes
from autopar.search.budget.cutoff import NO_CUTOFF
from autopar.search.budget.lagrangian import Point, fits, solve
from autopar.search.budget.layer_groups import in_groups
from autopar.search.budget.memory_constraint import MemoryConstraint
from autopar.search.budget.pareto import MAX_PRICES, Frontier, within
from autopar.search.budget.use_slack import slack_used
from autopar.search.formulation.build import Formulation
from autopar.search.formulation.memory_model import WHOLE, MemoryModel
from autopar.search.formulation.pins import Restrictions
from autopar.search.solver.certify import Claim
from autopar.search.solver.layer_mix import LayerMix
from autopar.search.solver.minimize import Limits
from autopar.search.solver.problem import Ints, Solution, evaluate

MORE_PRICES = 3
"""Multipliers tried for a constraint that is tightened."""

ROUNDS, BETTER = 8, 1
"""How often a constraint is tightened at most, and how often between two limits of which only the lower fits."""

CLOSE = 0.97
"""A plan that uses so much of the budget need not be improved by loosening its constraint again."""

MOMENTS = 3
"""So many program points have a constraint at most."""

HOPELESS = 1.25
"""Where what saves the least needs so much of the budget, nothing else is tried for a stage of a pipeline."""

SMALL = 1500
"""Problems of so few labels are solved with the memory constraint in the ILP, too, where multipliers leave a gap."""


def plan_within(task: BudgetProblem) -> Plan:
    """The best plan of one problem, within the budget if there is one.

    Raises:
        InfeasibleError: nothing fits.
    """
    kept = None if task.job.memory is None else _kept(task, task.job.restrictions)
    if kept is not None and kept.relaxed and task.job.cutoff.price:  # memory will be short
        bound = kept.frontier.bound_at(task.job.cutoff.price, kept.budget)
        task.job.cutoff.require_less(bound)
        return _fitting(task, kept, bound)
    if kept is not None and not task.whole:  # nor is there enough for a stage of which this is asked
        return _fitting(task, kept, 0.0)
    built = task.formulation(task.job.restrictions, _everything_saved(task))
    solution = solve(built.problem, gap=task.limits.gap, time_limit=task.seconds, progress=task.job.progress)
    task.claims.append(Claim(built.problem, solution.lower_bound))
    task.job.cutoff.require_less(solution.lower_bound)
    plan = task.plan(built, _single(solution), solution.lower_bound, solution.method)
    if kept is not None and task.whole:
        kept.frontier.start(_alike(kept.built, built, solution.labels), solution.lower_bound)
        if kept.relaxed and not fits(kept.frontier.free().memory, kept.budget):  # nor does the plan
            return _fitting(task, kept, solution.lower_bound)
    plan, enough = task.measured(plan)
    return plan if enough or kept is None else _fitting(task, kept, solution.lower_bound)


def plan_by_axes(task: BudgetProblem, bound: float) -> Plan:
    """A plan on three axes or more: layouts axis by axis, then what is saved for backward under these layouts.

    Layouts are searched for parameters that take all of the budget, or half of it, and so on until the rest fits.

    Args:
        task: what is searched.
        bound: that no plan falls below.

    Raises:
        InfeasibleError: nothing fits.
    """
    limits = task.limits

    def make(restrictions: Restrictions) -> Formulation:
        return task.formulation(restrictions, _everything_saved(task))

    failure: InfeasibleError | None = None
    for part in (1.0, 0.5, 0.25, 0.125):
        room = None if task.job.memory is None else part * task.job.memory
        try:
            built, found = descend(
                make, task.job.restrictions, task.tables, room, limits.gap, task.seconds, task.job.progress
            )
        except InfeasibleError as e:
            raise failure or e from e
        plan, enough = task.measured(task.plan(built, _single(found), bound, "axis by axis"))
        if enough:
            return plan
        fixed = replace(task.job.restrictions, fixed=placements(built, found, task.tables), free=())
        try:
            return _fitting(task, _kept(task, fixed), bound, "axis by axis")
        except InfeasibleError as e:
            failure = failure or e
    assert failure is not None
    raise failure


def _everything_saved(task: BudgetProblem) -> MemoryModel:
    """Memory where the backward pass recomputes nothing, as it need not without a budget."""
    return MemoryModel(task.state_and_gradients, regions=task.regions, share=task.job.share)


def _single(solution: Solution) -> LayerMix:
    return LayerMix.of(Point(solution.labels, solution.objective, solution.memory))


def _fitting(task: BudgetProblem, saved: MemoryConstraint, bound: float, method: str = "") -> Plan:
    """The best plan whose graph fits, by memory constraints that are tightened until it does.

    A constraint counts what a device holds at one program point. Where none of these leads to a plan that fits, what is
    saved for backward counts; then gradients, too, if they are what is too much; and last, operators may not work on so
    much at a time. Offloaded tensors count little, so that such a constraint says little of what is live only briefly:
    where it leads to no plan in half of the time, everything stays on the device.

    Args:
        task: what is searched.
        saved: the constraint on what is saved for backward.
        bound: that no plan falls below.
        method: that the certificate names.

    Raises:
        InfeasibleError: no such plan fits.
    """
    assert task.job.memory is not None
    points = _at_peak_points(task, saved)
    bound = _proved(task, points, saved, bound)
    waiting = [*points, saved, saved.narrowed(replace(saved.memory, state=task.state_and_gradients))]
    on_device = [_on_device(constraint, task.limits) for constraint in waiting] if task.offload else []
    least: Plan | None = None
    capped = False
    while waiting or on_device:
        if not waiting:
            waiting, on_device = on_device, []
        constraint = waiting.pop(0)
        try:
            plan, bound, working = _tightened(replace(task, limits=constraint.limits), constraint, bound, method)
        except InfeasibleError as e:  # nothing works on so little
            if least is None and not on_device and e.needed is not None:
                raise
            if constraint.relaxed or not on_device:
                break
            continue
        if fits(peak_bytes(plan), task.job.memory):
            return plan
        better = least is None or peak_bytes(plan) < CLOSE * peak_bytes(least)
        least = _lesser(least, plan)
        last = not waiting and not on_device
        if last and (better or not capped) and not task.limits.expired():
            # The transient part is too much: halve what an operator may take, for as long as that helps.
            halved = saved.narrowed(replace(saved.memory, working=working / 2))
            waiting.append(_on_device(halved, task.limits))
            capped = True
    raise missing(task.job.memory, least)


def _proved(task: BudgetProblem, points: Sequence[MemoryConstraint], saved: MemoryConstraint, bound: float) -> float:
    """The best bound that the constraints which hold for all plans prove.

    Raises:
        PrunedError: no plan is faster than the cutoff.
        InfeasibleError: a constraint has no room for any plan.
    """
    for claim in (point.frontier.claim(point.budget) for point in points if point.relaxed):
        task.claims.append(claim)
        bound = max(bound, claim.bound)
    task.job.cutoff.require_less(bound)
    _require_room(task, [constraint for constraint in [*points, saved] if constraint.relaxed], bound)
    return bound


def _require_room(task: BudgetProblem, rows: Sequence[MemoryConstraint], bound: float) -> None:
    """Where one of the constraints that hold for all plans has no room, none fits, whatever else is tried.

    Raises:
        InfeasibleError: says what is missing to its plan of least memory.
    """
    assert task.job.memory is not None
    for row in rows:
        if not row.frontier.reaches(row.budget):
            plan, enough = task.measured(task.plan(row.built, _least(row.frontier), bound, "Lagrangian"))
            if not enough:
                raise missing(task.job.memory, plan)


def _kept(task: BudgetProblem, restrictions: Restrictions) -> MemoryConstraint:
    """The constraint on what is saved for backward; it bounds all plans if nothing is decided for it."""
    assert task.job.memory is not None
    memory = MemoryModel(
        task.state, True, task.job.search.again, regions=task.regions, away=task.offload,
        optimizer=task.optimizer_state, share=task.job.share,
    )  # fmt: skip
    relaxed = restrictions is task.job.restrictions and task.whole
    limits = replace(task.limits, deadline=time.monotonic() + task.seconds / 2) if task.offload else task.limits
    return MemoryConstraint(
        task.formulation,
        restrictions,
        memory,
        limits,
        task.job.memory,
        relaxed,
        task.job.cutoff if relaxed else NO_CUTOFF,
    )


def _on_device(row: MemoryConstraint, limits: Limits) -> MemoryConstraint:
    """The constraint with everything on the device."""
    return replace(row.narrowed(replace(row.memory, away=False, optimizer={})), limits=limits)


def _at_peak_points(task: BudgetProblem, kept: MemoryConstraint) -> list[MemoryConstraint]:
    """The constraints at the program points where most is held, that with the best bound first; of a stage none.

    Without a budget much is saved, and the point is the one where all of it is live; of such points, that counts at
    which the most is live that no plan can do without. Where the best that fits under this constraint does not fit
    under that of its own peak, the latter is one, too, if it bounds more. A stage's share of the whole model says
    little of one point.
    """
    if kept.memory.share is not WHOLE or kept.built.heaviest is None or not task.job.moments:
        return []
    rows: list[MemoryConstraint] = []
    mix: LayerMix | None = None
    try:
        labelings = [kept.frontier.free().labels, kept.frontier.little().labels]
        while len(rows) < MOMENTS:
            row = replace(kept, memory=replace(kept.memory, moment=kept.built.heaviest(labelings)), like=kept)
            if mix is not None:
                held = [evaluate(row.built.problem, labels)[1] for labels in labelings]
                if fits(sum(share * size for share, size in zip(mix.shares, held, strict=True)), kept.budget):
                    break
                if row.frontier.bound_at(mix.price, kept.budget) <= rows[0].frontier.bound(kept.budget):
                    break
            rows.insert(0, row)
            mix = _within(task, row.built, row.frontier, kept.budget, first=True)
            labelings = [*mix.labelings]
    except InfeasibleError:  # said where it is searched
        pass
    return rows


def _lesser(a: Plan | None, b: Plan) -> Plan:
    """Of two plans the one that needs less."""
    return b if a is None or peak_bytes(b) < peak_bytes(a) else a


@dataclass
class _Measured:
    """Plans under one memory constraint whose graphs were measured.

    Attributes:
        best: the cheapest that fits.
        chosen: the labels that it is of.
        least: the one that needs the least, whether it fits or not.
        fitting: the most bytes that the constraint counts of a plan that fits.
        failing: the fewest bytes that it counts of one that does not.
    """

    best: Plan | None = None
    chosen: LayerMix | None = None
    least: Plan | None = None
    fitting: float = -np.inf
    failing: float = np.inf

    def add(self, plan: Plan, mix: LayerMix, enough: bool) -> None:
        """A plan, its labels, and whether it fits."""
        self.least = _lesser(self.least, plan)
        if not enough:
            self.failing = min(self.failing, mix.memory)
            return
        if self.best is None or mix.cost < self.best.certificate.objective:
            self.best, self.chosen = plan, mix
        self.fitting = max(self.fitting, mix.memory)


def _tightened(
    task: BudgetProblem, constraint: MemoryConstraint, bound: float, method: str
) -> tuple[Plan, float, float]:
    """The best plan under one kind of constraint that fits; where none does, the one that needs least.

    What the graph needs beyond what the constraint counts is about the same for plans alike. So the budget less that
    is the next limit of the constraint, until the limits of plans that fit and of those that do not are close.

    Args:
        task: what is searched.
        constraint: how memory is counted.
        bound: known before.
        method: that the certificate names.

    Returns:
        The plan, with its peak; a lower bound; and the most bytes that one operator takes and makes in the plan.

    Raises:
        InfeasibleError: the problem has no solution at all.
    """
    assert task.job.memory is not None
    built, frontier, budget = constraint.built, constraint.frontier, task.job.memory
    known, tries, before = _Measured(), BETTER, (np.inf, np.inf)
    room = _first_room(task, constraint, known, bound, method)
    thorough = 1 if task.whole or np.isinf(room) else 0
    for turn in range(ROUNDS):
        try:
            mix = _within(task, built, frontier, room, first=turn <= thorough)
        except InfeasibleError:
            if known.best is not None:
                break
            mix = _least(frontier)  # its graph may need less than is counted, and leave room for a better plan
        if constraint.relaxed:
            task.claims.append(frontier.claim(budget))
            bound = max(bound, frontier.bound(budget))
        task.job.cutoff.require_less(bound)
        plan, enough = task.measured(task.plan(built, mix, bound, method or "Lagrangian"))
        size = peak_bytes(plan)
        known.add(plan, mix, enough)
        tries -= known.best is not None
        if task.limits.expired() or (mix.cost, mix.memory) == before or CLOSE * budget <= size <= budget:
            break
        if known.failing - known.fitting < (1 - CLOSE) * budget or tries < 0:
            break
        before = mix.cost, mix.memory
        room = _next_room(frontier, mix, size, budget, known)
    plan = _best_of(task, constraint, known, bound, method)
    working = [v.working[x] for v, x in zip(built.variables, mix.labelings[0], strict=True) if v.working is not None]
    return plan, bound, float(max(working))


def _first_room(
    task: BudgetProblem, constraint: MemoryConstraint, known: _Measured, bound: float, method: str
) -> float:
    """Bytes of the constraint's first limit.

    What the cheapest plan needs besides what is counted says how much is transient; a constraint at a program point
    counts that itself. For a stage, the plan of least memory is measured first: there are other pipelines, of which
    some fit sooner.

    Raises:
        InfeasibleError: even that plan needs far too much of a stage's devices.
    """
    assert task.job.memory is not None
    room = np.inf if constraint.memory.moment is None else task.job.memory
    if task.whole:
        return room
    mix = _least(constraint.frontier)
    known.least, enough = task.measured(task.plan(constraint.built, mix, bound, method or "Lagrangian"))
    if not enough and peak_bytes(known.least) > HOPELESS * task.job.memory:
        raise missing(task.job.memory, known.least)
    if not enough:  # what saves the least is not what needs the least
        return room
    return constraint.frontier.least().memory + task.job.memory - peak_bytes(known.least)


def _next_room(frontier: Frontier, mix: LayerMix, size: float, budget: float, known: _Measured) -> float:
    """Bytes of the constraint's next limit, after a plan that needs ``size`` bytes."""
    room = mix.memory + budget - size  # what is transient stays about the same
    if not frontier.reaches(room):  # or it shrinks with the rest
        room = mix.memory * budget / size
    if known.fitting < room < known.failing:
        return room
    return (known.fitting + known.failing) / 2 if np.isfinite(known.fitting) else known.failing * CLOSE


def _best_of(task: BudgetProblem, constraint: MemoryConstraint, known: _Measured, bound: float, method: str) -> Plan:
    """The best plan that was measured, its slack used; where none fits, a point known already may, or needs least."""
    assert task.job.memory is not None
    built = constraint.built
    if known.best is None:
        found = _remembered(task, built, constraint.frontier, known.failing, bound, method)
        return found if known.least is None else _lesser(found, known.least)
    if known.chosen is None or not task.whole:  # pipelines are many
        return known.best

    def measure(mix: LayerMix) -> tuple[Plan, bool]:
        return task.measured(task.plan(built, mix, bound, method or "Lagrangian"))

    return slack_used(built, known.chosen, known.best, task.job.memory, task.limits, measure)


def _least(frontier: Frontier) -> LayerMix:
    """All members in the state of least memory."""
    return LayerMix.of(frontier.least())


def _remembered(
    task: BudgetProblem, built: Formulation, frontier: Frontier, row: float, bound: float, method: str
) -> Plan:
    """Of the points below a limit that multipliers have found the cheapest whose graph fits; or what needs least.

    A constraint says little of what is transient: its best plan may not fit while a point that counts less, known
    already, does. To measure one takes less time than to try another multiplier.
    """
    least = frontier.least()
    below = {(p.point.cost, p.point.memory): p.point for p in frontier.known if p.point.memory < row}
    found: Plan | None = None
    for point in sorted(below.values(), key=lambda p: p.cost) or [least]:
        plan, enough = task.measured(task.plan(built, LayerMix.of(point), bound, method or "Lagrangian"))
        if enough:
            return plan
        found = _lesser(found, plan)
    assert found is not None
    return found


def _within(task: BudgetProblem, built: Formulation, frontier: Frontier, row: float, first: bool) -> LayerMix:
    """The best choice within a limit; after the first, few more multipliers are tried."""

    def alike(labels: Ints) -> list[NDArray[np.bool_]]:
        return _alike(built, built, labels)

    counts = np.array([v.count for v in built.variables])
    mix = within(frontier, row, counts, alike, task.job.progress, MAX_PRICES if first else MORE_PRICES)
    if mix.cost - frontier.bound(row) <= task.limits.gap * mix.cost:
        return mix
    if sum(len(n.cost) for n in built.problem.nodes) <= SMALL:
        exact = solve(built.problem, budget=row, gap=task.limits.gap, time_limit=task.seconds)
        return replace(_single(exact), price=mix.price) if exact.objective < mix.cost else mix
    if counts.max() == 1:  # no layers repeat, so that multipliers cannot reach what lies between two of their solutions
        return in_groups(built.problem, alike(mix.labelings[-1]), counts, row, mix, task.limits.gap)
    return mix


def _alike(built: Formulation, other: Formulation, labels: Ints) -> list[NDArray[np.bool_]]:
    """For each variable its labels that differ at most in their state from those of a problem of the same variables."""
    return [v.candidate == w.candidate[x] for v, w, x in zip(built.variables, other.variables, labels, strict=True)]
