"""`slack_used`: of a plan that fits, what its budget has left is used, under the layouts that it has.

The search counts memory by a row that holds for all plans, and so leaves out some of what a graph holds (see
`Variable.uncounted`); and two labelings mixed over whole layers leave up to a layer's difference unused. Here what
graphs hold is counted as well as it is known, groups of layers are decided apart
(`autopar.search.budget.layer_groups`), and what the graph that is emitted needs more or less than that is added to the
next try.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autopar.ir.plan import Plan
from autopar.search.budget.layer_groups import in_groups
from autopar.search.formulation.build import Formulation
from autopar.search.solver.layer_mix import LayerMix, mix_of
from autopar.search.solver.minimize import Limits
from autopar.search.solver.problem import Ints, Problem

TRIES = 4

FULL = 0.998
"""A plan that uses so much of the budget is not improved any more."""

Measure = Callable[[LayerMix], tuple[Plan, bool]]
"""The plan of a mix with its peak, and whether that is within the budget."""


def slack_used(built: Formulation, mix: LayerMix, plan: Plan, budget: float, limits: Limits, measure: Measure) -> Plan:
    """The plan, or a faster one under its layouts that fits as well.

    Args:
        built: the problem.
        mix: the plan's.
        plan: that fits, with its peak.
        budget: bytes.
        limits: relative gap, by which a plan has to be better to be measured, and deadline.
        measure: what a mix leads to.
    """
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
        plan, enough = measure(mix_of(built.problem, found.labelings, found.ends, counts, mix.price))
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
    nodes = tuple(n if v.uncounted is None else replace(n, memory=n.memory + v.uncounted) for n, v in pairs)
    return Problem(nodes, built.problem.edges)
