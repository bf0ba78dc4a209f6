"""`tightened`: a memory constraint that is tightened until the graph of its best plan fits.

A constraint leaves out program points and copies, so that the best plan within it may exceed the budget. Then the
constraint gets as many bytes less as the measured peak is too high, and the search goes on. Once a plan fits, the room
between the last plan that does and the first that does not is bisected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InfeasibleError
from autopar.ir.plan import LAGRANGIAN, Plan
from autopar.search.budget.budget_problem import BudgetProblem, missing, peak_bytes
from autopar.search.budget.layer_groups import in_groups
from autopar.search.budget.memory_constraint import MemoryConstraint
from autopar.search.budget.pareto import MAX_PRICES, Frontier, within
from autopar.search.budget.use_slack import use_slack
from autopar.search.formulation.build import Formulation
from autopar.search.solver.layer_mix import LayerMix
from autopar.search.solver.problem import Ints

MORE_PRICES = 3
"""Multipliers tried for a constraint that is tightened."""

ROUNDS, BETTER = 8, 1
"""How often a constraint is tightened, and how often one is tried between two of which only the tighter one fits."""

CLOSE = 0.97
"""A plan that uses this share of the budget is not improved by loosening its constraint again."""

HOPELESS = 1.25
"""Where the plan of least memory needs this multiple of the budget, no more is tried: of a pipeline stage at once, else
where a further constraint leads to no less, or nothing is in flight."""


def lesser(a: Plan | None, b: Plan) -> Plan:
    """The plan of two that needs less."""
    return b if a is None or peak_bytes(b) < peak_bytes(a) else a


def tightened(
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
    tries = _Tightening(searched, built, memory, method or LAGRANGIAN)
    room = tries.first_room(constraint, bound)
    thorough = 1 if searched.whole or np.isinf(room) else 0
    before, left = (np.inf, np.inf), BETTER
    for turn in range(ROUNDS):
        try:
            mix = best_within(searched, built, frontier, room, first=turn <= thorough)
        except InfeasibleError:
            if tries.best is not None:
                break
            # Its graph may need less than the constraint says, and leave room for a better plan.
            mix = least_mix(frontier)
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
    plan = tries.result(bound)
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
        plan = self.searched.plan(self.built, least_mix(frontier), bound, self.method)
        self.least, enough = self.searched.measured(plan)
        if not enough and peak_bytes(self.least) > HOPELESS * self.memory:
            raise missing(self.memory, self.least)
        if enough:  # else what saves least is not what needs least
            room = frontier.least().memory + self.memory - peak_bytes(self.least)
        return room

    def measure(self, mix: LayerMix, bound: float) -> float:
        """The peak of a solution's plan, which is remembered if it is the best or the least so far."""
        plan, enough = self.searched.measured(self.searched.plan(self.built, mix, bound, self.method))
        self.least = lesser(self.least, plan)
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

    def result(self, bound: float) -> Plan:
        """The fastest plan that fits, with the budget's slack used; else the one that needs least."""
        if self.best is None or self.mix is None:
            assert self.least is not None  # something was measured
            return self.least
        if not self.searched.whole:  # pipelines are many
            return self.best
        return use_slack(self.searched, self.built, self.mix, self.best, bound, self.method)


def least_mix(frontier: Frontier) -> LayerMix:
    """All members in the state of least memory."""
    return LayerMix.of(frontier.least())


def best_within(
    searched: BudgetProblem, built: Formulation, frontier: Frontier, memory: float, first: bool
) -> LayerMix:
    """The best solution within a memory constraint; after the first, fewer multipliers are tried."""
    limits = searched.limits

    def alike(labels: Ints) -> list[NDArray[np.bool_]]:
        return same_candidates(built, built, labels)

    counts = np.array([v.count for v in built.variables])
    mix = within(frontier, memory, counts, alike, searched.job.progress, MAX_PRICES if first else MORE_PRICES)
    if mix.cost - frontier.bound(memory) <= limits.gap * mix.cost:
        return mix
    if counts.max() == 1:  # no layers to split over, so that multipliers do not reach what lies between two of them
        return in_groups(built.problem, alike(mix.labelings[-1]), counts, memory, mix, limits.gap)
    return mix


def same_candidates(built: Formulation, other: Formulation, labels: Ints) -> list[NDArray[np.bool_]]:
    """For each variable its labels that differ at most in their state from those of a problem of the same variables."""
    return [v.candidate == w.candidate[x] for v, w, x in zip(built.variables, other.variables, labels, strict=True)]
