"""Variants of a plan besides its layouts: how many microbatches, whether dims are padded, whether to offload.

Stages are in `autopar.search.pipeline`, which plans what is inside of them by these functions.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.errors import InfeasibleError
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.search.budget.cutoff import NO_CUTOFF, Cutoff
from autopar.search.microbatch.count import best_count
from autopar.search.microbatch.split import hint_of_loss, microbatch_program
from autopar.search.options import OFFLOAD, Job
from autopar.search.padding import best_padded
from autopar.search.peak import StageMeter


def plan_of_whole(program: Program, job: Job, cutoff: Cutoff = NO_CUTOFF) -> Plan:
    """The best plan without stages, if it beats the cutoff; where nothing fits, offloading is searched, too.

    Raises:
        InfeasibleError: nothing fits.
        PrunedError: nothing is faster than the cutoff.
    """
    search = job.search
    try:
        return _by_count(program, job, cutoff)
    except InfeasibleError as e:
        if not (search.offload_at_last and job.cluster.device.host_bandwidth and e.needed):
            raise
    offloaded = replace(search, pins={**search.pins, OFFLOAD: "search"})
    return _by_count(program, replace(job, search=offloaded), cutoff)


def plan_in_any_memory(program: Program, job: Job) -> Plan:
    """The best plan without stages, whatever it needs."""
    return plan_of_count(program, replace(job, memory=None), job.search.microbatches or 1)


def _by_count(program: Program, job: Job, cutoff: Cutoff) -> Plan:
    """The best of as many microbatches as are pinned, or as short memory asks for."""
    search = job.search

    def attempt(count: int, cutoff: Cutoff) -> Plan:
        # Where all that the certificate says is checked, a plan that is slower than the cutoff is searched to its end.
        return plan_of_count(program, job if search.check else replace(job, cutoff=cutoff), count)

    if search.microbatches or job.memory is None or search.recipe == "random":
        return attempt(search.microbatches or 1, cutoff)
    if program.loss is not None:
        return best_count(attempt, cutoff)
    try:
        return attempt(1, cutoff)
    except InfeasibleError as e:
        hint = hint_of_loss(program)
        if not hint:
            raise
        raise InfeasibleError(f"{e}{hint}", needed=e.needed, budget=e.budget, least=e.least) from e


def plan_of_count(program: Program, job: Job, count: int) -> Plan:
    """The best plan in so many microbatches."""
    return plan_of_part(program, part_of(program, job, count), job)


def part_of(program: Program, job: Job, count: int) -> Program:
    """The program of one of so many microbatches."""
    return microbatch_program(program, count, deterministic=job.deterministic)


def plan_of_part(program: Program, part: Program, job: Job, stages: StageMeter | None = None) -> Plan:
    """The best plan of a program of one microbatch, for the whole batch's program.

    Args:
        program: of the whole batch.
        part: of one microbatch.
        job: what is searched for.
        stages: measures plans by the heaviest stage of a pipeline; None: by the whole graph.
    """
    plan = best_padded(part, job, stages)
    return replace(plan, fingerprint=program.fingerprint, microbatches=part.microbatches)
