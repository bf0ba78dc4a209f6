"""A plan within a memory budget that holds for the graph that is emitted, not for an estimate.

The search counts memory by a constraint: parameters, optimizer state and what is live while one operator runs, at the
program point of the peak (`autopar.search.formulation.program_point`). A constraint is a relaxation: it leaves out
other program points, and copies. So the graph of the plan found is rewritten and its peak is measured; if that exceeds
the budget, the constraint is tightened by the excess and the search goes on. The bound is that of the constraint as it
was at first.
"""

from __future__ import annotations

import math
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
from autopar.search.budget.lagrangian import fits, solve
from autopar.search.budget.layer_groups import in_groups
from autopar.search.budget.memory_constraint import MemoryConstraint
from autopar.search.budget.pareto import MAX_PRICES, Frontier, within
from autopar.search.budget.use_slack import use_slack
from autopar.search.formulation.build import Formulation
from autopar.search.formulation.pins import Restrictions
from autopar.search.solver.certify import Claim
from autopar.search.solver.layer_mix import LayerMix
from autopar.search.solver.minimize import Limits
from autopar.search.solver.problem import Ints, evaluate

MORE_PRICES = 3
"""Multipliers tried for a constraint that is tightened."""

ROUNDS, BETTER = 8, 1
"""How often a constraint is tightened, and how often one is tried between two of which only the tighter one fits."""

CLOSE = 0.97
"""A plan that uses this share of the budget is not improved by loosening its constraint again."""

MOMENTS = 3
"""At most this many program points have a constraint."""

HOPELESS = 1.25
"""Where the plan that saves least needs this multiple of the budget, a pipeline stage is given up."""

SMALL = 1500
"""Problems of at most this many labels go to the ILP with the memory constraint, where multipliers leave a gap."""


def plan_within(searched: BudgetProblem) -> Plan:
    """The best plan of one problem, within the budget if there is one.

    Raises:
        InfeasibleError: nothing fits.
    """
    job, limits = searched.job, searched.limits
    saved = None if job.memory is None else _saved(searched, job.restrictions)
    if saved is not None and saved.relaxed and job.cutoff.price:
        # The plan to beat was short of memory, so this one will be: its multiplier is the first to try.
        bound = saved.frontier.bound_at(job.cutoff.price, saved.budget)
        job.cutoff.require_less(bound)
        return _fitting(searched, saved, bound)
    if saved is not None and not searched.whole:  # a stage is asked for a budget only where memory is short
        return _fitting(searched, saved, 0.0)
    built = searched.formulation(job.restrictions, searched.states_alone)
    solution = solve(built.problem, gap=limits.gap, time_limit=searched.seconds, progress=job.progress)
    searched.claims.append(Claim(built.problem, solution.lower_bound))
    job.cutoff.require_less(solution.lower_bound)
    plan = searched.plan(built, LayerMix.of(solution), solution.lower_bound, solution.method)
    if saved is not None and searched.whole:
        saved.frontier.start(_alike(saved.built, built, solution.labels), solution.lower_bound)
        if saved.relaxed and not fits(saved.frontier.free().memory, saved.budget):
            # The relaxation does not fit, so the plan's graph cannot: it need not be measured.
            return _fitting(searched, saved, solution.lower_bound)
    plan, enough = searched.measured(plan)
    return plan if enough or saved is None else _fitting(searched, saved, solution.lower_bound)


def plan_by_axes(searched: BudgetProblem, bound: float) -> Plan:
    """A plan on three axes or more: layouts axis by axis, then what is saved under these layouts.

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
        room = None if job.memory is None else part * job.memory
        try:
            built, found = descend(
                make, job.restrictions, searched.tables, room, limits.gap, searched.seconds, job.progress
            )
        except InfeasibleError as e:
            raise failure or e from e
        plan, enough = searched.measured(searched.plan(built, LayerMix.of(found), bound, "axis by axis"))
        if enough:
            return plan
        fixed = replace(job.restrictions, fixed=placements(built, found, searched.tables), free=())
        try:
            return _fitting(searched, _saved(searched, fixed), bound, "axis by axis")
        except InfeasibleError as e:
            failure = failure or e
    assert failure is not None
    raise failure


def _fitting(searched: BudgetProblem, saved: MemoryConstraint, bound: float, method: str = "") -> Plan:
    """The best plan whose graph fits, by constraints that are tightened until it does.

    The first constraints are about program points. Where these lead to no plan that fits, the next is about what is
    saved for the backward pass; then gradients count, too; then operators may not work on so much at a time. What may
    be offloaded counts little, so that such a constraint says little about short live ranges: where it leads to no plan
    in half of the time, everything stays on the device.

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
    constraints = [*points, saved, saved.narrowed(replace(saved.memory, state=searched.state_and_gradients))]
    here = [_on_device(c, searched.limits) for c in constraints] if searched.offload else []
    for claim in (c.frontier.claim(c.budget) for c in points if c.relaxed):
        searched.claims.append(claim)
        bound = max(bound, claim.bound)
    searched.job.cutoff.require_less(bound)
    _require_room(searched, [c for c in [*points, saved] if c.relaxed], bound)
    least: Plan | None = None
    capped = False
    while constraints or here:
        if not constraints:
            constraints, here = here, []
        constraint = constraints.pop(0)
        try:
            plan, found, working = _tightened(replace(searched, limits=constraint.limits), constraint, bound, method)
        except InfeasibleError as e:  # nothing works on so little
            if least is None and not here and e.needed is not None:
                raise
            if constraint.relaxed or not here:
                break
            continue
        if fits(peak_bytes(plan), memory):
            return plan
        bound = found
        better = least is None or peak_bytes(plan) < CLOSE * peak_bytes(least)
        least = _lesser(least, plan)
        if not constraints and not here and (better or not capped) and not searched.limits.expired():
            # What is left over is transient: half of what the largest operator works on may not be live at a time.
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
            least = searched.plan(constraint.built, _least(constraint.frontier), bound, "Lagrangian")
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
        while len(found) < MOMENTS:
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
            mix = _within(searched, constraint.built, constraint.frontier, saved.budget, first=True)
            labelings = [*mix.labelings]
    except InfeasibleError:  # raised again where this constraint is searched
        pass
    return found


def _lesser(a: Plan | None, b: Plan) -> Plan:
    """The plan of two that needs less."""
    return b if a is None or peak_bytes(b) < peak_bytes(a) else a


def _tightened(
    searched: BudgetProblem, constraint: MemoryConstraint, bound: float, method: str
) -> tuple[Plan, float, float]:
    """The best plan of one kind of constraint that fits; where none does, the one that needs least.

    Args:
        searched: what is searched.
        constraint: how memory is counted.
        bound: known before.
        method: that the certificate names.

    Returns:
        The plan, with its peak; a lower bound; and the most bytes that one operator takes and makes in the plan.

    Raises:
        InfeasibleError: the problem has no solution at all.
    """
    memory = searched.job.memory
    assert memory is not None
    built, frontier = constraint.built, constraint.frontier
    tries = _Tightening(searched, built, memory, method or "Lagrangian")
    room = tries.first_room(constraint, bound)
    thorough = 1 if searched.whole or np.isinf(room) else 0
    before, left = (np.inf, np.inf), BETTER
    for turn in range(ROUNDS):
        try:
            mix = _within(searched, built, frontier, room, first=turn <= thorough)
        except InfeasibleError:
            if tries.best is not None:
                break
            mix = _least(frontier)  # its graph may need less than the constraint says, and leave room for a better plan
        if constraint.relaxed:
            searched.claims.append(frontier.claim(memory))
            bound = max(bound, frontier.bound(memory))
        searched.job.cutoff.require_less(bound)
        size = tries.measure(mix, bound)
        late = searched.limits.expired()
        left -= tries.best is not None
        if late or (mix.cost, mix.memory) == before or CLOSE * memory <= size <= memory:
            break
        if tries.failing - tries.fitting < (1 - CLOSE) * memory or left < 0:
            break
        before = mix.cost, mix.memory
        room = tries.next_room(mix, size, frontier)
    plan = tries.result(frontier, bound)
    working = [v.working[x] for v, x in zip(built.variables, mix.labelings[0], strict=True) if v.working is not None]
    return plan, bound, float(max(working))


@dataclass
class _Tightening:
    """What is known of plans within one memory constraint as it is tightened.

    Attributes:
        searched: what is searched.
        built: the problem with the constraint.
        memory: the budget, which a plan's measured peak must not exceed.
        method: that certificates name.
        best: the fastest plan whose graph fits.
        mix: its solution.
        least: the plan that needs least.
        fitting: the most bytes, as the constraint counts, of a plan whose graph fits.
        failing: the fewest of one whose graph does not.
    """

    searched: BudgetProblem
    built: Formulation
    memory: float
    method: str
    best: Plan | None = None
    mix: LayerMix | None = None
    least: Plan | None = None
    fitting: float = -math.inf
    failing: float = math.inf

    def first_room(self, constraint: MemoryConstraint, bound: float) -> float:
        """Bytes that the constraint allows at first.

        Of what is saved that is unlimited: what the cheapest plan needs beside it says how much is transient. The
        constraint of a program point says that itself.

        Raises:
            InfeasibleError: of a stage: even the plan that saves least is far over the budget.
        """
        room = math.inf if constraint.memory.point is None else self.memory
        if self.searched.whole:
            return room
        # There are other pipelines, of which some fit sooner: so the plan of least memory is looked at first.
        frontier = constraint.frontier
        plan = self.searched.plan(self.built, _least(frontier), bound, self.method)
        self.least, enough = self.searched.measured(plan)
        if not enough and peak_bytes(self.least) > HOPELESS * self.memory:
            raise missing(self.memory, self.least)
        if enough:  # else what saves least is not what needs least
            room = frontier.least().memory + self.memory - peak_bytes(self.least)
        return room

    def measure(self, mix: LayerMix, bound: float) -> float:
        """The peak of a solution's plan, which is remembered if it is the best or the least so far."""
        plan, enough = self.searched.measured(self.searched.plan(self.built, mix, bound, self.method))
        self.least = _lesser(self.least, plan)
        if enough:
            if self.best is None or mix.cost < self.best.certificate.objective:
                self.best, self.mix = plan, mix
            self.fitting = max(self.fitting, mix.memory)
        else:
            self.failing = min(self.failing, mix.memory)
        return peak_bytes(plan)

    def next_room(self, mix: LayerMix, size: float, frontier: Frontier) -> float:
        """Bytes that the constraint allows next, after a solution whose graph needs ``size`` bytes."""
        room = mix.memory + self.memory - size  # what is transient stays about the same
        if not frontier.reaches(room):  # or it shrinks with the rest
            room = mix.memory * self.memory / size
        if not self.fitting < room < self.failing:
            room = (self.fitting + self.failing) / 2 if np.isfinite(self.fitting) else self.failing * CLOSE
        return room

    def result(self, frontier: Frontier, bound: float) -> Plan:
        """The fastest plan that fits, with the budget's slack used; else the one that needs least."""
        if self.best is None:
            found = _remembered(self.searched, self.built, frontier, self.failing, bound, self.method)
            return found if self.least is None else _lesser(found, self.least)
        if self.mix is None or not self.searched.whole:  # pipelines are many
            return self.best
        return use_slack(self.searched, self.built, self.mix, self.best, bound, self.method)


def _least(frontier: Frontier) -> LayerMix:
    """All members in the state of least memory."""
    return LayerMix.of(frontier.least())


def _remembered(
    searched: BudgetProblem, built: Formulation, frontier: Frontier, memory: float, bound: float, method: str
) -> Plan:
    """Of the points found with less than ``memory`` bytes, the cheapest whose graph fits; or the one that needs least.

    A constraint says little of what is transient: its best plan may not fit while a point with less memory, known
    already, does. To measure one takes less time than another multiplier.
    """
    below = {(p.objective, p.memory): p for _, p in frontier.known if p.memory < memory}
    found: Plan | None = None
    for point in sorted(below.values(), key=lambda p: p.objective) or [frontier.least()]:
        plan, enough = searched.measured(searched.plan(built, LayerMix.of(point), bound, method))
        if enough:
            return plan
        found = _lesser(found, plan)
    assert found is not None
    return found


def _within(searched: BudgetProblem, built: Formulation, frontier: Frontier, memory: float, first: bool) -> LayerMix:
    """The best solution within a memory constraint; after the first, fewer multipliers are tried."""
    limits = searched.limits

    def alike(labels: Ints) -> list[NDArray[np.bool_]]:
        return _alike(built, built, labels)

    counts = np.array([v.count for v in built.variables])
    mix = within(frontier, memory, counts, alike, searched.job.progress, MAX_PRICES if first else MORE_PRICES)
    if mix.cost - frontier.bound(memory) <= limits.gap * mix.cost:
        return mix
    if sum(len(n.cost) for n in built.problem.nodes) <= SMALL:
        exact = solve(built.problem, budget=memory, gap=limits.gap, time_limit=searched.seconds)
        return replace(LayerMix.of(exact), price=mix.price) if exact.objective < mix.cost else mix
    if counts.max() == 1:  # no layers to split over, so that multipliers do not reach what lies between two of them
        return in_groups(built.problem, alike(mix.labelings[-1]), counts, memory, mix, limits.gap)
    return mix


def _alike(built: Formulation, other: Formulation, labels: Ints) -> list[NDArray[np.bool_]]:
    """For each variable its labels that differ at most in their state from those of a problem of the same variables."""
    return [v.candidate == w.candidate[x] for v, w, x in zip(built.variables, other.variables, labels, strict=True)]
