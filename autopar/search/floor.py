"""`least_plans`: plans that keep as little as they can, whatever the budget.

What would be enough must not depend on what was asked for. So where nothing fits, plans that need little are made anew
from these, and not from the ones that the search has come across on the way to its budget.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from autopar.dims import Dims
from autopar.plan import LEANER, Certificate, Plan
from autopar.program import Program
from autopar.redistribute import Machine, Tables
from autopar.search.build import build
from autopar.search.counted import Memory
from autopar.search.find import plan_of, state_bytes
from autopar.search.frontier import Frontier, Mix
from autopar.search.minimise import Limits
from autopar.search.options import Job
from autopar.search.quotient import Quotient


def least_plans(program: Program, dims: Dims, job: Job, classes: Quotient) -> Iterator[Plan]:
    """Those of least memory when the backward pass begins, and at the heaviest moment of that and of the fastest plan.

    Args:
        program: canonical program.
        dims: its dimension analysis.
        job: what was searched for; its budget makes no difference.
        classes: which nodes share a decision.

    Raises:
        InfeasibleError: the restrictions leave no plan.
    """
    search = job.search
    machine = Machine(tuple(job.axes), tuple(job.axes.values()), job.cluster.link_for(dict(job.axes)), job.cluster.device)
    tables, state = Tables(machine), state_bytes(program, job.optimizer, gradients=False)
    regions = search.regions and bool(program.pins)
    memory = Memory(state, True, search.again, regions=regions, share=job.share)
    limits = Limits(search.gap, time.monotonic() + search.time_limit / 2)
    certificate = Certificate(0.0, 0.0, "", LEANER)
    for _ in range(2):
        built = build(program, dims, classes, tables, memory, job.restrictions)
        frontier = Frontier(built.problem, limits)
        point = frontier.least()
        mix = Mix(point.labels, point.labels, 0.0, point.cost, point.memory)
        plan = plan_of(program, dims, classes, built, mix, certificate, job, tables)
        yield replace(plan, held=job.restrictions.held)
        if built.heaviest is None:
            return
        memory = replace(memory, moment=built.heaviest([frontier.free().labels, point.labels]))
