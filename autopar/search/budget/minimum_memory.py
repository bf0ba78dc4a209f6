"""`minimum_memory_plan`: a plan that saves as little for backward as possible, whatever the budget.

An error that says how much memory would be enough must say the same for every budget that is too small. So where
nothing fits, memory repair starts from this plan, and not from one that the search met on the way to its budget.
"""

from __future__ import annotations

import time
from dataclasses import replace

from autopar.ir.plan import Certificate, Plan
from autopar.search.budget.budget_problem import BudgetProblem
from autopar.search.budget.pareto import Frontier
from autopar.search.read_plan import plan_of
from autopar.search.solver.layer_mix import LayerMix
from autopar.search.solver.minimize import Limits


def minimum_memory_plan(searched: BudgetProblem, certificate: Certificate) -> Plan:
    """The plan of least memory at the peak of two plans: the fastest, and the one that saves the least.

    Args:
        searched: what was searched; its budget makes no difference.
        certificate: of the plan, whose bound holds for all plans.

    Raises:
        InfeasibleError: the restrictions leave no plan.
    """
    job = searched.job
    limits = Limits(job.search.gap, time.monotonic() + job.search.time_limit / 2)
    memory = searched.states_and_activations(offload=False)
    built = searched.formulation(job.restrictions, memory)
    frontier = Frontier(built.problem, limits)
    if built.peak_point is not None:
        point = built.peak_point([frontier.free().labels, frontier.least().labels])
        built = searched.formulation(job.restrictions, replace(memory, point=point))
        frontier = Frontier(built.problem, limits)
    mix = LayerMix.of(frontier.least())
    return plan_of(searched.program, searched.dims, searched.classes, built, mix, certificate, job, searched.tables)
