"""`minimum_memory_plan`: a plan that keeps as little as it can, whatever the budget.

What would be enough must not depend on what was asked for. So where nothing fits, a plan that needs little is made anew
from this one, and not from one that the search has come across on the way to its budget.
"""

from __future__ import annotations

import time
from dataclasses import replace

from autopar.ir.plan import MEMORY_REPAIR, Certificate, Plan
from autopar.ir.program import Program
from autopar.search.budget.pareto import Frontier
from autopar.search.formulation.build import build
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
    """That of least memory at the heaviest moment of the fastest plan and of that which keeps the least.

    Args:
        program: canonical program.
        dims: its dimension analysis.
        job: what was searched for; its budget makes no difference.
        classes: which nodes share a decision.

    Raises:
        InfeasibleError: the restrictions leave no plan.
    """
    search = job.search
    links = job.cluster.link_for(dict(job.axes))
    tables = Tables(Machine(tuple(job.axes), tuple(job.axes.values()), links, job.cluster.device))
    state = state_bytes(program, job.optimizer, gradients=False)
    regions = search.regions and bool(program.pins)
    memory = MemoryModel(state, True, search.again, regions=regions, share=job.share)
    limits = Limits(search.gap, time.monotonic() + search.time_limit / 2)
    built = build(program, dims, classes, tables, memory, job.restrictions)
    frontier = Frontier(built.problem, limits)
    if built.heaviest is not None:
        memory = replace(memory, moment=built.heaviest([frontier.free().labels, frontier.least().labels]))
        built = build(program, dims, classes, tables, memory, job.restrictions)
        frontier = Frontier(built.problem, limits)
    point = frontier.least()
    mix = LayerMix.of(point)
    certificate = Certificate(point.cost, 0.0, "any plan", MEMORY_REPAIR)
    return plan_of(program, dims, classes, built, mix, certificate, job, tables)
