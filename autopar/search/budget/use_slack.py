"""`slack_used`: of a plan that fits, what its budget has left is used, under the layouts that it has.

The search counts memory by a row that holds for all plans, and so leaves out some of what a graph holds (see
`Variable.unseen`); and two labelings mixed over whole layers leave up to a layer's difference unused. Here what
graphs hold is counted as well as it is known, groups of layers are decided apart
(`autopar.search.budget.layer_groups`), and what the graph that is emitted needs more or less than that is added to the
next try.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autopar.ir.plan import Plan
from autopar.search.budget.layer_groups import in_groups
from autopar.search.formulation.build import Formulation
from autopar.search.program_search import ProgramSearch
from autopar.search.solver.layer_mix import LayerMix, mix_of
from autopar.search.solver.problem import Ints, Problem

TRIES = 4

FULL = 0.998
"""A plan that uses so much of the budget is not improved any more."""


def slack_used(
    searched: ProgramSearch, built: Formulation, mix: LayerMix, plan: Plan, bound: float, method: str
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
    counts = np.array([v.count for v in variables])
    seen = _as_in_graphs(built)
    chosen = [v.candidate == v.candidate[x] for v, x in zip(variables, mix.labelings[-1], strict=True)]
    best, known = plan, mix
    fitting, failing = -np.inf, np.inf
    room = _room(seen, mix, counts, plan, budget)
    for _ in range(TRIES):
        if limits.expired():
            break
        found = in_groups(seen, chosen, counts, room, replace(known, memory=np.inf), limits.gap)
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
        room = _room(seen, found, counts, plan, budget)
        if not fitting < room < failing:
            room = (fitting + failing) / 2
    return best


def _room(seen: Problem, mix: LayerMix, counts: Ints, plan: Plan, budget: float) -> float:
    """Bytes for what is counted where what is not stays the same."""
    return mix_of(seen, mix.labelings, mix.ends, counts).memory + budget - _peak(plan)


def _peak(plan: Plan) -> float:
    return sum(plan.predicted.peak_bytes.values())


def _as_in_graphs(built: Formulation) -> Problem:
    """The problem with memory as graphs have it."""
    pairs = zip(built.problem.nodes, built.variables, strict=True)
    nodes = tuple(n if v.unseen is None else replace(n, memory=n.memory + v.unseen) for n, v in pairs)
    return Problem(nodes, built.problem.edges)
