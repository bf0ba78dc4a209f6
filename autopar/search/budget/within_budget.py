"""A plan within a memory budget that holds for the graph that is emitted, not for an estimate.

The search counts memory by a constraint: parameters, optimizer state and what is live while one operator runs, at the
program point of the peak (`autopar.search.formulation.program_point`). A constraint is a relaxation: it leaves out
other program points, and copies. So the graph of the plan found is rewritten and its peak is measured; if that exceeds
the budget, the constraint is tightened by the excess and the search goes on. The bound is that of the constraint as it
was at first.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import InfeasibleError
from autopar.ir.plan import BY_AXES, LAGRANGIAN, Plan
from autopar.search.axis_by_axis import descend, placements
from autopar.search.budget.budget_problem import BudgetProblem, missing, peak_bytes
from autopar.search.budget.cutoff import NO_CUTOFF
from autopar.search.budget.lagrangian import fits, solve
from autopar.search.budget.memory_constraint import MemoryConstraint
from autopar.search.budget.tighten import CLOSE, HOPELESS, best_within, least_mix, lesser, same_candidates, tightened
from autopar.search.formulation.build import Formulation
from autopar.search.formulation.pins import Restrictions
from autopar.search.solver.certify import Claim
from autopar.search.solver.layer_mix import LayerMix
from autopar.search.solver.minimize import Limits
from autopar.search.solver.problem import Solution, evaluate

POINTS = 3
"""At most this many program points have a constraint. With one, a tiny CNN on 4 in 0.12 MiB takes 0.91 ms, not 0.61."""


def plan_within(searched: BudgetProblem) -> Plan:
    """The best plan of one problem, within the budget if there is one.

    Raises:
        InfeasibleError: nothing fits.
    """
    job = searched.job
    saved = None if job.memory is None else _saved(searched, job.restrictions)
    if saved is not None and saved.relaxed and job.cutoff.price:
        # The plan to beat was short of memory, so this one will be: its multiplier is the first to try.
        bound = saved.frontier.bound_at(job.cutoff.price, saved.budget)
        job.cutoff.require_less(bound)
        return _fitting(searched, saved, bound)
    # A stage has a budget only where memory is short.
    if saved is not None and (searched.impossible or not searched.whole):
        return _fitting(searched, saved, 0.0)
    built, solution, plan = _without_budget(searched)
    # Where memory is ample, what else fits is of no interest.
    if saved is None or searched.has_room(plan):
        return plan
    if searched.whole and not searched.ample:
        saved.frontier.start(same_candidates(saved.built, built, solution.labels), solution.lower_bound)
        if saved.relaxed and not fits(saved.frontier.free().memory, saved.budget):
            # The relaxation does not fit, so the plan's graph cannot: it need not be measured.
            return _fitting(searched, saved, solution.lower_bound)
    plan, enough = searched.measured(plan)
    return plan if enough else _fitting(searched, saved, solution.lower_bound)


def _without_budget(searched: BudgetProblem) -> tuple[Formulation, Solution, Plan]:
    """The problem of layouts as if there were no budget, its solution, and the plan of that; its bound is a claim."""
    job = searched.job
    built = searched.formulation(job.restrictions, searched.states_alone)
    solution = solve(
        built.problem, gap=searched.limits.gap, time_limit=searched.seconds, progress=job.progress,
        met=lambda labels: searched.met.append((built, labels)), start=searched.start,
    )  # fmt: skip
    searched.claims.append(Claim(built.problem, solution.lower_bound))
    if job.restrictions.free is not None:
        searched.placed.update(placements(built, solution, searched.tables))
    job.cutoff.require_less(solution.lower_bound, in_any_memory=True)
    return built, solution, searched.plan(built, LayerMix.of(solution), solution.lower_bound, solution.method)


def plan_by_axes(searched: BudgetProblem, bound: float) -> Plan:
    """A plan on many axes: layouts by pairs of axes, then what is saved under these layouts.

    Layouts are searched for parameters that take all of the budget, or half of it, and so on until the rest fits.

    Args:
        searched: what is searched.
        bound: that no plan falls below.

    Raises:
        InfeasibleError: nothing fits.
    """
    job, limits = searched.job, searched.limits

    def make(restrictions: Restrictions) -> Formulation:
        return searched.formulation(restrictions, searched.states_alone)

    failure: InfeasibleError | None = None
    for part in (1.0, 0.5, 0.25, 0.125):
        room = None if job.memory is None or searched.ample else part * job.memory
        try:
            built, found = descend(
                make, job.restrictions, searched.tables, room, limits.gap, searched.seconds, job.progress,
                start=None if room is not None else dict(searched.placed) or None,
            )  # fmt: skip
        except InfeasibleError as e:
            raise failure or e from e
        plan, enough = searched.within(searched.plan(built, LayerMix.of(found), bound, BY_AXES))
        if enough:
            searched.placed.update(placements(built, found, searched.tables))
            return plan
        fixed = replace(job.restrictions, fixed=placements(built, found, searched.tables), free=())
        try:
            return _fitting(searched, _saved(searched, fixed), bound, BY_AXES)
        except InfeasibleError as e:
            failure = failure or e
    assert failure is not None
    raise failure


def _fitting(searched: BudgetProblem, saved: MemoryConstraint, bound: float, method: str = "") -> Plan:
    """The best plan whose graph fits, by constraints that are tightened until it does.

    The first constraints are about program points. Where these lead to no plan that fits, the next is about what is
    saved for the backward pass; then operators may not work on so much at a time. What may be offloaded counts little,
    so that such a constraint says little about short live ranges: where it leads to no plan in half of the time,
    everything stays on the device.

    Args:
        searched: what is searched.
        saved: the constraint on what is saved for the backward pass.
        bound: that no plan falls below.
        method: that the certificate names.

    Raises:
        InfeasibleError: no such plan fits.
    """
    memory = searched.job.memory
    assert memory is not None
    points = _at_program_points(searched, saved)
    constraints = [*points, saved]
    on_device = [_on_device(c, searched.limits) for c in constraints] if searched.offload else []
    for claim in (c.frontier.claim(c.budget) for c in points if c.relaxed):
        searched.claims.append(claim)
        bound = max(bound, claim.bound)
    searched.job.cutoff.require_less(bound)
    if searched.raise_bound and points and points[0].relaxed:  # the best
        searched.job.cutoff.require_less(searched.raise_bound(points[0].memory, points[0].frontier))
    _require_room(searched, [c for c in [*points, saved] if c.relaxed], bound)
    least: Plan | None = None
    capped = False
    while constraints or on_device:
        if not constraints:
            constraints, on_device = on_device, []
        constraint = constraints.pop(0)
        try:
            plan, found, working = tightened(replace(searched, limits=constraint.limits), constraint, bound, method)
        except InfeasibleError as e:  # nothing works on so little
            if least is None and not on_device and e.needed is not None:
                raise
            if constraint.relaxed or not on_device:
                break
            continue
        if fits(peak_bytes(plan), memory):
            return plan
        bound = found
        better = least is None or peak_bytes(plan) < CLOSE * peak_bytes(least)
        least = lesser(least, plan)
        # A tiny CNN on 4 in 72 KiB has a plan of 70 under the limit on what operators work on, and of 101 before.
        if not better and (searched.impossible or (capped and peak_bytes(least) > HOPELESS * memory)):
            break
        if not constraints and not on_device and (better or not capped) and not searched.limits.expired():
            # What is left over is transient: half of what the largest operator works on may not be live at a time.
            # A tiny ViT on 4, 1% above the least memory, takes 4.55 ms with this and 5.23 without.
            smaller = saved.narrowed(replace(saved.memory, working=working / 2))
            constraints.append(_on_device(smaller, searched.limits))
            capped = True
    raise missing(memory, least)


def _require_room(searched: BudgetProblem, constraints: Sequence[MemoryConstraint], bound: float) -> None:
    """Where one of the constraints that hold for all plans has no room, none fits, whatever else is tried.

    Raises:
        InfeasibleError: says what the plan of least memory lacks.
    """
    assert searched.job.memory is not None
    for constraint in constraints:
        if not constraint.frontier.reaches(constraint.budget):
            least = searched.plan(constraint.built, least_mix(constraint.frontier), bound, LAGRANGIAN)
            plan, enough = searched.measured(least)
            if not enough:
                raise missing(searched.job.memory, plan)


def _saved(searched: BudgetProblem, restrictions: Restrictions) -> MemoryConstraint:
    """The constraint on what is saved when the backward pass begins; it bounds all plans if nothing is decided yet."""
    job = searched.job
    assert job.memory is not None
    memory = searched.states_and_activations(offload=searched.offload)
    relaxed = restrictions is job.restrictions and searched.whole
    limits = searched.limits
    if searched.offload:  # the other half of the time is for plans that offload nothing
        limits = replace(limits, deadline=time.monotonic() + searched.seconds / 2)
    cutoff = job.cutoff if relaxed else NO_CUTOFF
    return MemoryConstraint(searched, restrictions, memory, limits, job.memory, relaxed, cutoff)


def _on_device(constraint: MemoryConstraint, limits: Limits) -> MemoryConstraint:
    """The constraint with nothing offloaded."""
    return replace(constraint.narrowed(replace(constraint.memory, offload=False, optimizer={})), limits=limits)


def _at_program_points(searched: BudgetProblem, saved: MemoryConstraint) -> list[MemoryConstraint]:
    """Constraints at the program points where most is live, that with the best bound first; for a stage none.

    Without a budget much is saved, and the peak is where all of it is live; of such points, the one counts at which
    most is live that no plan can do without. Where the best plan within this constraint exceeds that of its own peak,
    this is a constraint, too, if its bound is better. A stage's share of the whole model says little of one point.
    """
    if not searched.whole or saved.built.peak_point is None or not searched.job.all_points:
        return []
    found: list[MemoryConstraint] = []
    mix: LayerMix | None = None
    try:
        labelings = [saved.frontier.free().labels, saved.frontier.little().labels]
        while len(found) < POINTS:
            point = saved.built.peak_point(labelings)
            constraint = replace(saved, memory=replace(saved.memory, point=point), like=saved)
            if mix is not None:
                held = [evaluate(constraint.built.problem, labels)[1] for labels in labelings]
                if fits(sum(share * size for share, size in zip(mix.shares, held, strict=True)), saved.budget):
                    break
                known = found[0].frontier.bound(saved.budget)
                if constraint.frontier.bound_at(mix.price, saved.budget) <= known:
                    break
            found.insert(0, constraint)
            if searched.impossible:  # its plan of least memory is all that is asked for
                break
            mix = best_within(searched, constraint.built, constraint.frontier, saved.budget, first=True)
            labelings = [*mix.labelings]
    except InfeasibleError:  # raised again where this constraint is searched
        pass
    return found
