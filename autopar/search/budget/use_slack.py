"""`use_slack`: a plan that fits is made faster with the memory that it leaves unused, under the same layouts.

There are two reasons for slack. The memory constraint is a relaxation: it leaves out some of what emitted graphs hold
(`Variable.uncounted`), so that it had to be tightened. And a plan that is split over layers leaves up to the difference
of one layer unused. Here the former is counted as well as it is known, groups of layers are decided separately
(`autopar.search.budget.layer_groups`), and each try corrects its budget by the measured peak of the one before.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autopar.ir.plan import Plan
from autopar.search.budget.budget_problem import BudgetProblem
from autopar.search.budget.layer_groups import in_groups
from autopar.search.formulation.build import Formulation
from autopar.search.solver.layer_mix import LayerMix, mix_of
from autopar.search.solver.problem import Ints, Problem

TRIES = 4

FULL = 0.998
"""A plan that uses this share of the budget is not improved further."""


def use_slack(
    searched: BudgetProblem, built: Formulation, mix: LayerMix, plan: Plan, bound: float, method: str
) -> Plan:
    """The plan, or a faster one under its layouts that fits as well.

    Args:
        searched: what is searched, within a budget; a plan must be better by its relative gap to be measured.
        built: the problem.
        mix: the plan's solution.
        plan: that fits, with its peak.
        bound: that no plan falls below.
        method: that certificates name.
    """
    budget, limits = searched.job.memory, searched.limits
    assert budget is not None
    variables = built.variables
    # Memory as graphs have it is no relaxation, so that this may lose plans: the bound stays the caller's.
    counts = np.array([v.count for v in variables])
    as_emitted = _as_emitted(built)
    chosen = [v.candidate == v.candidate[x] for v, x in zip(variables, mix.labelings[-1], strict=True)]
    best, known = plan, mix
    fitting, failing = -np.inf, np.inf
    room = _room(as_emitted, mix, counts, plan, budget)
    for _ in range(TRIES):
        if limits.expired():
            break
        found = in_groups(as_emitted, chosen, counts, room, replace(known, memory=np.inf), limits.gap)
        # What is faster by less than the gap is not worth a measurement, which rewrites the whole graph.
        if found.cost > (1 - limits.gap) * known.cost:
            break
        found_mix = mix_of(built.problem, found.labelings, found.ends, counts, mix.price)
        plan, enough = searched.measured(searched.plan(built, found_mix, bound, method))
        if enough:
            best, known, fitting = plan, found, room
        else:
            failing = room
        if enough and _peak(plan) >= FULL * budget:
            break
        room = _room(as_emitted, found, counts, plan, budget)
        if not fitting < room < failing:  # the correction overshoots: bisect
            room = (fitting + failing) / 2
    return best


def _room(as_emitted: Problem, mix: LayerMix, counts: Ints, plan: Plan, budget: float) -> float:
    """The budget for what is counted, if the rest of the plan's peak stays the same."""
    return mix_of(as_emitted, mix.labelings, mix.ends, counts).memory + budget - _peak(plan)


def _peak(plan: Plan) -> float:
    return sum(plan.predicted.peak_bytes.values())


def _as_emitted(built: Formulation) -> Problem:
    """The problem with memory as emitted graphs have it."""
    pairs = zip(built.problem.nodes, built.variables, strict=True)
    nodes = tuple(n if v.uncounted is None else replace(n, memory=n.memory + v.uncounted) for n, v in pairs)
    return Problem(nodes, built.problem.edges)
