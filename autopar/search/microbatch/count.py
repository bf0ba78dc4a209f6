"""How many microbatches: one, and twice as many for as long as memory is short and more make the step faster."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from autopar.errors import InfeasibleError
from autopar.ir.plan import Certificate, Plan
from autopar.ir.program import Program
from autopar.search.budget.cutoff import NO_CUTOFF, Cutoff, PrunedError
from autopar.search.emitted.peak import least_state
from autopar.search.finished_plan import joint_certificate
from autopar.search.microbatch.split import microbatch_program
from autopar.search.options import Job
from autopar.search.padding import best_padded
from autopar.search.solver.highs import requested

MANY = 8
"""Microbatches of a step that needs about the least memory: what one of them saves is little beside states."""

WORTH = 0.98
"""Where twice as many microbatches need more than this share of the memory, even more will not do."""


def plan_of_count(program: Program, count: int, job: Job) -> Plan:
    """The best plan of so many microbatches, if it is faster than the job's cutoff.

    Raises:
        InfeasibleError: none fits.
        PrunedError: none is faster.
    """
    if job.search.check:  # all that the certificate says is checked, which a search that was cut off cannot be
        job = replace(job, cutoff=NO_CUTOFF)
    return best_padded(program, microbatch_program(program, count, deterministic=job.deterministic), job)


def fewest_that_fit(program: Program, job: Job, most: int) -> Plan:
    """The best plan of 1, 2, 4, ... microbatches, whichever is about the first number of which a plan fits.

    Where one needs four times the memory, the next number is 4: half of the samples need half of the bytes, or more.

    Args:
        program: of the whole batch.
        job: what is searched for.
        most: microbatches to try.

    Raises:
        InfeasibleError: none fits, or none was found within a search's time limit.
    """
    count, least, deadline = 1, math.inf, time.monotonic() + job.search.time_limit
    while True:
        try:
            return plan_of_count(program, count, job)
        except InfeasibleError as e:
            if not _is_short(e) and (e.needed is None or e.needed >= WORTH * least):
                raise
            needed = e.needed or job.memory  # pruned ones say no need
            least, times = e.needed or least, 1.0 if job.memory is None or needed is None else needed / job.memory
            count *= 2 ** max(1, int(math.log2(times)))
            if count > most or time.monotonic() > deadline or not has_room_for_state(program, job):
                raise


def _is_short(error: InfeasibleError) -> bool:
    """Whether it is memory that makes plans slower than the cutoff: in more microbatches, one may be faster."""
    return isinstance(error, PrunedError) and not error.in_any_memory


def has_room_for_state(program: Program, job: Job) -> bool:
    """Whether the parameters and their state fit, whatever the number of microbatches."""
    return job.memory is None or least_state(program, job.optimizer, job.axes) <= job.memory


def _refuse(program: Program, job: Job) -> None:
    """Say what a step in many microbatches needs, where the states of parameters alone do not fit: little besides them.

    Raises:
        InfeasibleError: if the batch divides so.
    """
    try:
        part = microbatch_program(program, MANY, deterministic=job.deterministic)
    except InfeasibleError:
        return
    best_padded(program, part, job)


def best_count(program: Program, job: Job) -> Plan:
    """The fastest plan of 1, 2, 4, ... microbatches, if it is faster than the job's cutoff.

    A step is not faster in more microbatches than its memory asks for: kernels are smaller, and parameters that are
    not saved are gathered more often.

    Raises:
        InfeasibleError: none fits; the error is that of the least need.
        PrunedError: none is faster.
    """
    best: Plan | None = None
    error: InfeasibleError | None = None
    if not has_room_for_state(program, job):
        _refuse(program, job)
    certificates: list[Certificate] = []
    pruned: list[float] = []
    tried: list[int] = []
    count = 1
    while best is None or (best.certificate.binds and not requested()):
        tried.append(count)
        try:
            found = plan_of_count(program, count, job if best is None else replace(job, cutoff=Cutoff.of(best)))
        except PrunedError as e:
            pruned.append(e.bound)
            if best is not None or not _is_short(e):
                break
        except InfeasibleError as e:
            # A number of microbatches that needs hardly less than the one before is the last: more will not fit either.
            less = e.needed is not None and (error is None or e.needed < WORTH * (error.needed or 0.0))
            if best is not None or not less:
                error = error or e
                break
            error = e
        else:
            certificates.append(found.certificate)
            if best is not None and found.certificate.objective >= best.certificate.objective:
                break
            best = found
        count *= 2
    if best is None and pruned:
        raise PrunedError(min(pruned))
    if best is None:
        assert error is not None
        raise error
    numbers = f"{', '.join(map(str, tried))} microbatches; " if len(tried) > 1 else ""
    space = f"{numbers}{best.certificate.space}"
    return replace(best, certificate=joint_certificate(best.certificate, certificates, pruned, space))
