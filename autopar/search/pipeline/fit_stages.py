"""`search_within_budget`: a pipeline that needs more memory than there is, searched until it fits."""

from __future__ import annotations

import gc
from dataclasses import replace

from autopar.errors import InfeasibleError
from autopar.ir.plan import Plan
from autopar.search.budget.cutoff import Cutoff, PrunedError
from autopar.search.budget.within_budget import HOPELESS
from autopar.search.microbatch.count import plan_of_microbatch
from autopar.search.pipeline.record import PipelineProblem, ScheduledPart, SearchRecord
from autopar.search.pipeline.shape import LightestPlan, ScheduledStages
from autopar.search.pipeline.stage_peak import fastest_stages
from autopar.search.pipeline.stage_plan import share_of

SEARCHED = 12
"""How many pipelines that do not fit as they are, are searched within the budget."""


def search_within_budget(
    problem: PipelineProblem, known: SearchRecord, scheduled: ScheduledPart, seconds: float, needed: float
) -> None:
    """Search a pipeline that takes so many seconds, and needs so many bytes, within the budget."""
    if known.searched >= SEARCHED or _is_hopeless(problem, known, scheduled):
        return
    known.searched += 1
    try:
        found = _fitting(problem, known, scheduled)
        known.add(found)
        known.costs.append((needed, found.predicted.step_seconds / seconds))
    except InfeasibleError as e:
        known.fail(e)
    if _is_hopeless(problem, known, scheduled):
        known.heavy.add(scheduled.schedule)
    if known.searched % 4 == 0:
        gc.collect()  # graphs that were measured


def _fitting(problem: PipelineProblem, known: SearchRecord, scheduled: ScheduledPart) -> Plan:
    """The best plan under a schedule that fits.

    Raises:
        InfeasibleError: none does.
        PrunedError: none is faster than the best plan.
    """
    part, shape = scheduled.part, scheduled.shape
    known.say(problem.job, f"{shape.devices} devices along {shape.axis}, {shape.stages} stages, {scheduled.schedule}")
    stages = _stages(problem, known, scheduled)
    job = problem.job_inside(shape)
    search = replace(job.search, check=False)  # the bound that holds is that of any memory
    share, cutoff = share_of(scheduled.actions, shape.stages), Cutoff(known.seconds * shape.devices)
    job = replace(job, memory=problem.memory, cutoff=cutoff, share=share, search=search, stages=stages)
    try:
        plan = plan_of_microbatch(problem.program, part, job)
    except PrunedError as e:  # of a device that has the whole model
        raise PrunedError(e.bound / shape.devices) from e
    cut = fastest_stages(part, plan, stages, search)
    found = cut.whole(scheduled.schedule, scheduled.actions, cut.seconds(scheduled.actions))
    free = known.free[(shape.axes, shape.axis), part.microbatches].certificate  # of all plans, in whatever memory
    bound = min(free.lower_bound / shape.devices, found.predicted.step_seconds)
    checked = None if free.checked is None else free.checked / shape.devices
    return replace(found, certificate=replace(found.certificate, lower_bound=bound, checked=checked))


def _is_hopeless(problem: PipelineProblem, known: SearchRecord, scheduled: ScheduledPart) -> bool:
    """Whether what needed least under any schedule needs far too much under this one."""
    lightest = known.lightest.get((scheduled.shape, scheduled.part.microbatches))
    if problem.memory is None or lightest is None or lightest.plan is None:
        return False
    needed = lightest.needed
    if lightest.schedule != scheduled.schedule:
        stages = _stages(problem, known, scheduled)
        cut = fastest_stages(scheduled.part, lightest.plan, stages, problem.search)
        needed = sum(cut.peak(scheduled.actions).values())
    return needed > HOPELESS * problem.memory


def _stages(problem: PipelineProblem, known: SearchRecord, scheduled: ScheduledPart) -> ScheduledStages:
    """What a search within the budget measures; all schedules of a shape share what is known of light plans."""
    shape, part = scheduled.shape, scheduled.part
    lightest = known.lightest.setdefault((shape, part.microbatches), LightestPlan(part))
    return ScheduledStages(shape, scheduled.schedule, scheduled.actions, problem.link(shape), lightest)
