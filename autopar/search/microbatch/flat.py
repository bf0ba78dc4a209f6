"""`best_flat`: the best plan without pipeline stages, in as many microbatches as memory asks for.

The variants are tried from the outside in: offloading to host memory or not (`best_flat`), numbers of microbatches
(`autopar.search.microbatch.count`), padding or not (`autopar.search.padding`), and then one search
(`autopar.search.find`).
"""

from __future__ import annotations

from dataclasses import replace

from autopar.errors import InfeasibleError
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.search.budget.cutoff import NO_CUTOFF
from autopar.search.microbatch.count import best_count, fewest_that_fit, has_room_for_state, plan_of_count
from autopar.search.microbatch.split import hint_of_loss
from autopar.search.options import OFFLOAD, Job


def best_flat(program: Program, job: Job) -> Plan:
    """The best within the budget, if it is faster than the job's cutoff; only where nothing fits, with offloading.

    Raises:
        InfeasibleError: nothing fits.
        PrunedError: none is faster.
    """
    search = job.search
    try:
        return _in_microbatches(program, job)
    except InfeasibleError as e:
        # Without a number of bytes the error is not about memory, and offloading cannot help; all states are on the
        # devices when the optimizer steps.
        may_help = e.needed and has_room_for_state(program, job)
        if not (search.offload_at_last and job.cluster.device.host_bandwidth and may_help):
            raise
    return _in_microbatches(program, replace(job, search=replace(search, pins={**search.pins, OFFLOAD: "search"})))


def flat_in_any_memory(program: Program, job: Job) -> Plan:
    """The best whatever it needs, in as many microbatches as are pinned, or one."""
    return plan_of_count(program, job.search.microbatches or 1, replace(job, memory=None, cutoff=NO_CUTOFF))


def first_flat(program: Program, job: Job, most: int) -> Plan:
    """A plan within the budget, roughly the best in the fewest microbatches of which one fits: not what is to be had.

    Args:
        program: of the whole batch.
        job: what is searched for.
        most: microbatches to try.

    Raises:
        InfeasibleError: nothing fits, or nothing was found within a search's time limit.
    """
    job = replace(job, rough=True)
    if job.search.microbatches or program.loss is None:
        return plan_of_count(program, job.search.microbatches or 1, job)
    return fewest_that_fit(program, job, most)


def _in_microbatches(program: Program, job: Job) -> Plan:
    """The best in as many microbatches as are pinned; else in one where that is enough or more are not possible."""
    search = job.search
    # With any memory one microbatch is fastest: each kernel is as large as it can be.
    if search.microbatches or job.memory is None or search.recipe == "random":
        return plan_of_count(program, search.microbatches or 1, job)
    if program.loss is not None:
        return best_count(program, job)
    try:
        return plan_of_count(program, 1, job)
    except InfeasibleError as e:
        hint = hint_of_loss(program)
        if not hint:
            raise
        raise InfeasibleError(f"{e}{hint}", needed=e.needed, budget=e.budget, least=e.least) from e
