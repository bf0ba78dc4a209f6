"""A plan within a memory budget, which holds for the graph that is emitted and not for an estimate.

The search counts memory by a row: parameters, optimizer state and what is held while one operator runs, at the moment
when most is held (`autopar.search.formulation.peak_point`). A row is a relaxation: it leaves out other moments, and
copies. So the graph of the plan found is rewritten and its peak measured; if that exceeds the budget, the row is
tightened by what is too much, and the search goes on. The bound is that of the row as it was at first.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

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
"""Prices tried for a row that is tightened."""

ROUNDS, BETTER = 8, 1
"""How often a row is tightened at most, and how often one is tried between two of which only the tighter gave a fit."""

CLOSE = 0.97
"""A plan that uses so much of the budget need not be improved by loosening its row again."""

MOMENTS = 3
"""So many moments have a row at most."""

HOPELESS = 1.25
"""Where what keeps least needs so much of the budget, nothing else is tried for a stage of a pipeline."""

SMALL = 1500
"""Problems of so few labels are solved with the memory row in the ILP, too, where prices leave one."""


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
    """A plan on three axes or more: layouts axis by axis, then what is kept under these layouts.

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


def _fitting(task: BudgetProblem, kept: MemoryConstraint, bound: float, method: str = "") -> Plan:
    """The best plan whose graph fits, by rows that are tightened until it does.

    The row is what is held at one moment. Where that does not lead to a plan that fits, it is what is kept when the
    backward pass begins; gradients count, too, if they are what is too much; or operators may not work on so much at a
    time. What may lie on the host counts little, so that such a row says little of what lives for a moment: where that
    leads to no plan in half of the time, everything stays on the device.

    Args:
        task: what is searched.
        kept: the row of what is kept.
        bound: that no plan falls below.
        method: that the certificate names.

    Raises:
        InfeasibleError: no such plan fits.
    """
    assert task.job.memory is not None
    moments = _at_moments(task, kept)
    rows = [*moments, kept, kept.narrowed(replace(kept.memory, state=task.state_and_gradients))]
    here = [_on_device(row, task.limits) for row in rows] if task.offload else []
    for claim in (row.frontier.claim(row.budget) for row in moments if row.relaxed):
        task.claims.append(claim)
        bound = max(bound, claim.bound)
    task.job.cutoff.require_less(bound)
    _require_room(task, [row for row in [*moments, kept] if row.relaxed], bound)
    least: Plan | None = None
    capped = False
    while rows or here:
        if not rows:
            rows, here = here, []
        row = rows.pop(0)
        try:
            plan, found, working = _tightened(replace(task, limits=row.limits), row, bound, method)
        except InfeasibleError as e:  # nothing works on so little
            if least is None and not here and e.needed is not None:
                raise
            if row.relaxed or not here:
                break
            continue
        if fits(peak_bytes(plan), task.job.memory):
            return plan
        bound = found
        size = peak_bytes(plan)
        better = least is None or size < CLOSE * peak_bytes(least)
        least = _lesser(least, plan)
        if not rows and not here and (better or not capped) and not task.limits.expired():
            rows.append(_on_device(kept.narrowed(replace(kept.memory, working=working / 2)), task.limits))
            capped = True
    raise missing(task.job.memory, least)


def _require_room(task: BudgetProblem, rows: Sequence[MemoryConstraint], bound: float) -> None:
    """Where one of the rows that hold for all plans has no room, none fits, whatever else is tried.

    Raises:
        InfeasibleError: says what is missing to the plan of the least row.
    """
    assert task.job.memory is not None
    for row in rows:
        if not row.frontier.reaches(row.budget):
            plan, enough = task.measured(task.plan(row.built, _least(row.frontier), bound, "Lagrangian"))
            if not enough:
                raise missing(task.job.memory, plan)


def _kept(task: BudgetProblem, restrictions: Restrictions) -> MemoryConstraint:
    """The row of what is kept when the backward pass begins; it bounds all plans if nothing is decided for it."""
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
    """The row with everything on the device."""
    return replace(row.narrowed(replace(row.memory, away=False, optimizer={})), limits=limits)


def _at_moments(task: BudgetProblem, kept: MemoryConstraint) -> list[MemoryConstraint]:
    """The rows at the moments when most is held, that with the best bound first; of a stage none.

    Without a budget much is kept, and the moment is that when all of it is there; of such moments, that counts at which
    the most is there that nobody can do without. Where the best that fits in this row does not fit in that of its own
    heaviest moment, this is a row, too, if it says more. A stage's share of the whole model says little of one moment.
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


def _tightened(task: BudgetProblem, row: MemoryConstraint, bound: float, method: str) -> tuple[Plan, float, float]:
    """The best plan of one kind of row that fits; where none does, the one that needs least.

    Args:
        task: what is searched.
        row: how memory is counted.
        bound: known before.
        method: that the certificate names.

    Returns:
        The plan, with its peak; a lower bound; and the most bytes that one operator takes and makes in the plan.

    Raises:
        InfeasibleError: the problem has no solution at all.
    """
    assert task.job.memory is not None
    built, frontier = row.built, row.frontier
    best: Plan | None = None
    chosen: LayerMix | None = None
    least: Plan | None = None
    fitting, failing, tries = -np.inf, np.inf, BETTER
    # What the cheapest plan needs besides its row says how much is transient; a moment's row says that itself.
    room = np.inf if row.memory.moment is None else task.job.memory
    before = (np.inf, np.inf)
    if not task.whole:  # there are other pipelines, of which some fit sooner
        least, enough = task.measured(task.plan(built, _least(frontier), bound, method or "Lagrangian"))
        if not enough and peak_bytes(least) > HOPELESS * task.job.memory:
            raise missing(task.job.memory, least)
        if enough:  # otherwise what keeps least is not what needs least
            room = frontier.least().memory + task.job.memory - peak_bytes(least)

    def measure(mix: LayerMix, bound: float) -> tuple[Plan, bool]:
        return task.measured(task.plan(built, mix, bound, method or "Lagrangian"))

    thorough = 1 if task.whole or np.isinf(room) else 0
    for turn in range(ROUNDS):
        try:
            mix = _within(task, built, frontier, room, first=turn <= thorough)
        except InfeasibleError:
            if best is not None:
                break
            mix = _least(frontier)  # its graph may need less than its row says, and leave room for a better plan
        if row.relaxed:
            task.claims.append(frontier.claim(task.job.memory))
            bound = max(bound, frontier.bound(task.job.memory))
        task.job.cutoff.require_less(bound)
        plan, enough = measure(mix, bound)
        size = peak_bytes(plan)
        least = _lesser(least, plan)
        if enough:
            if best is None or mix.cost < best.certificate.objective:
                best, chosen = plan, mix
            fitting = max(fitting, mix.memory)
        else:
            failing = min(failing, mix.memory)
        late = task.limits.expired()
        tries -= best is not None
        if late or (mix.cost, mix.memory) == before or CLOSE * task.job.memory <= size <= task.job.memory:
            break
        if failing - fitting < (1 - CLOSE) * task.job.memory or tries < 0:
            break
        before = mix.cost, mix.memory
        room = mix.memory + task.job.memory - size  # what is transient stays about the same
        if not frontier.reaches(room):  # or it shrinks with the rest
            room = mix.memory * task.job.memory / size
        if not fitting < room < failing:
            room = (fitting + failing) / 2 if np.isfinite(fitting) else failing * CLOSE
    if best is None:
        best = _remembered(task, built, frontier, failing, bound, method)
        best = best if least is None else _lesser(best, least)
    elif chosen is not None and task.whole:  # pipelines are many
        best = slack_used(built, chosen, best, task.job.memory, task.limits, lambda mix: measure(mix, bound))
    working = [v.working[x] for v, x in zip(built.variables, mix.labelings[0], strict=True) if v.working is not None]
    return best, bound, float(max(working))


def _least(frontier: Frontier) -> LayerMix:
    """All members in the state of least memory."""
    return LayerMix.of(frontier.least())


def _remembered(
    task: BudgetProblem, built: Formulation, frontier: Frontier, row: float, bound: float, method: str
) -> Plan:
    """Of the points below a row that prices have found the cheapest whose graph fits; or what needs least.

    A row says little of what is transient: its best plan may not fit while a point with a smaller row, known already,
    does. To measure one takes less time than another price.
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
    """The best choice within a row; after the first, few more prices are tried."""

    def alike(labels: Ints) -> list[NDArray[np.bool_]]:
        return _alike(built, built, labels)

    counts = np.array([v.count for v in built.variables])
    mix = within(frontier, row, counts, alike, task.job.progress, MAX_PRICES if first else MORE_PRICES)
    if mix.cost - frontier.bound(row) <= task.limits.gap * mix.cost:
        return mix
    if sum(len(n.cost) for n in built.problem.nodes) <= SMALL:
        exact = solve(built.problem, budget=row, gap=task.limits.gap, time_limit=task.seconds)
        return replace(_single(exact), price=mix.price) if exact.objective < mix.cost else mix
    if counts.max() == 1:  # there are no blocks to mix, so that what lies between two prices is out of reach of them
        return in_groups(built.problem, alike(mix.labelings[-1]), counts, row, mix, task.limits.gap)
    return mix


def _alike(built: Formulation, other: Formulation, labels: Ints) -> list[NDArray[np.bool_]]:
    """For each variable its labels that differ at most in their state from those of a problem of the same variables."""
    return [v.candidate == w.candidate[x] for v, w, x in zip(built.variables, other.variables, labels, strict=True)]
