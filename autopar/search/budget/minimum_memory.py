"""`minimum_memory_plan`: a plan that saves as little for backward as possible, whatever the budget.

An error that says how much memory would be enough must say the same for every budget that is too small. So where
nothing fits, memory repair starts from this plan, and not from one that the search met on the way to its budget.
"""

from __future__ import annotations

import time
from dataclasses import replace

from autopar.ir.plan import MEMORY_REPAIR, Certificate, Plan
from autopar.ir.program import Program
from autopar.search.budget.pareto import Frontier
from autopar.search.formulation.build import Formulation, build
from autopar.search.formulation.memory_model import MemoryModel
from autopar.search.options import Job
from autopar.search.peak import state_bytes
from autopar.search.read_plan import plan_of
from autopar.search.solver.layer_mix import LayerMix
from autopar.search.solver.minimize import Limits
from autopar.sharding.dims import Dims
from autopar.sharding.layer_classes import LayerClasses
from autopar.sharding.redistribute import Machine, Tables


def minimum_memory_plan(program: Program, dims: Dims, job: Job, classes: LayerClasses) -> Plan:
    """The plan of least memory at the peak of two plans: the fastest, and the one that saves the least.

    Args:
        program: canonical program.
        dims: its dimension analysis.
        job: what was searched for; its budget makes no difference.
        classes: which nodes share a decision.

    Raises:
        InfeasibleError: the restrictions leave no plan.
    """
    links = job.cluster.link_for(dict(job.axes))
    tables = Tables(Machine(tuple(job.axes), tuple(job.axes.values()), links, job.cluster.device))
    limits = Limits(job.search.gap, time.monotonic() + job.search.time_limit / 2)

    def formulate(memory: MemoryModel) -> Formulation:
        return build(program, dims, classes, tables, memory, job.restrictions)

    memory = _memory_model(program, job)
    built = formulate(memory)
    frontier = Frontier(built.problem, limits)
    if built.peak_point is not None:
        point = built.peak_point([frontier.free().labels, frontier.least().labels])
        built = formulate(replace(memory, point=point))
        frontier = Frontier(built.problem, limits)
    least = frontier.least()
    certificate = Certificate(least.cost, 0.0, "any plan", MEMORY_REPAIR)
    return plan_of(program, dims, classes, built, LayerMix.of(least), certificate, job, tables)


def _memory_model(program: Program, job: Job) -> MemoryModel:
    """Everything counts, and nothing is offloaded."""
    return MemoryModel(
        state_bytes(program, job.optimizer, gradients=False),
        activations=True,
        recompute=job.search.recompute,
        regions=job.search.regions and bool(program.pins),
        share=job.share,
    )
