"""`best_pipeline`: which stages, how many microbatches and which schedule, around the search inside a stage.

It is a branch and bound, the most promising first. What is not looked into yet waits with the seconds that it may lead
to and a bound that holds for all of it; a step looks into one of these, and may leave several that are known better:

1. A place for the stages (an axis of the mesh, or a factor of one) with a number of microbatches. Its bound costs
   nothing: all devices at the peak of their arithmetic or memory, and the bubble that a pipeline of one stage a device
   cannot avoid. Looking into it plans the devices of a stage as if they had the whole model and any memory: no pipeline
   there is faster than that by more than the number of its devices, in so many microbatches or in more.
2. So many stages on each device. The planned model is cut into them.
3. A schedule. It is simulated.
4. A pipeline that is known to the second, but needs more memory than there is. It is searched within the budget.

What waits with more seconds than the best plan found takes is left there. To have no stages at all waits with the rest.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from autopar.costs.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.ir.plan import TIME_LIMIT, Plan
from autopar.ir.program import Program
from autopar.pipeline.schedules import Order, order, require_numbers, suits_one_microbatch
from autopar.search.budget.cutoff import Cutoff
from autopar.search.budget.lagrangian import fits
from autopar.search.flat import best_flat, flat_in_any_memory
from autopar.search.microbatch.count import plan_of_microbatch
from autopar.search.microbatch.split import microbatch_program, require_early_backward
from autopar.search.options import Job
from autopar.search.pipeline.deep_models import RepeatedStages, require_blocks
from autopar.search.pipeline.fit_stages import search_within_budget
from autopar.search.pipeline.record import (
    MeshKey,
    PipelineProblem,
    ScheduledPart,
    SearchRecord,
    StagePosition,
    Subproblem,
)
from autopar.search.pipeline.shape import PipelineShape
from autopar.search.pipeline.space import bubble, counts, pipeline_shapes, waits
from autopar.search.pipeline.stage_peak import scatters, stage_plans
from autopar.search.pipeline.stage_plan import INSIDE, StagePlan, missing, suitable
from autopar.sharding.candidates import candidates
from autopar.sharding.dims import analyze
from autopar.sharding.operator_cost import arithmetic_dtype, operator_work

LIMITS = 5
"""So many time limits of one search are for all pipelines together, once a plan is known."""


def best_pipeline(program: Program, job: Job, factored: bool) -> Plan:
    """The fastest plan with the stages that are asked for; where they are searched, with or without.

    Args:
        program: of the whole batch.
        job: what is searched for, on the whole mesh.
        factored: whether stages may take a factor of an axis.

    Raises:
        InfeasibleError: the mesh, the model or the schedule allows none, or nothing fits.
    """
    if program.training:
        require_early_backward(program)
    floor = least_seconds(program, job.cluster, math.prod(job.axes.values()))
    shapes = tuple(pipeline_shapes(job.search, job.axes, program.training, factored))
    problem = PipelineProblem(program, job, shapes, floor, time.monotonic() + LIMITS * job.search.time_limit)
    known = SearchRecord()
    if problem.search.stages_open:
        known.open.append(Subproblem(floor, floor, partial(_plan_without_stages, problem, known), floor))
    for position in _positions(problem, known):
        _open_microbatches(problem, known, position, 0)
    while promising := [node for node in known.open if known.promised(node) < known.seconds]:
        if known.is_late(problem.deadline):
            break
        node = min(promising, key=lambda o: (o.schedule in known.heavy, known.promised(o)))
        known.open.remove(node)
        try:
            node.expand()
        except InfeasibleError as e:
            known.errors.append(e)
    return _result(problem, known)


def _positions(problem: PipelineProblem, known: SearchRecord) -> list[StagePosition]:
    """Where stages may lie; of a random plan one."""
    shapes, seed = [a for a in problem.shapes if _has_enough_layers(problem, known, a)], problem.search.seed
    if problem.random and shapes:
        shapes = [shapes[seed % len(shapes)]]
    grouped: dict[MeshKey, list[PipelineShape]] = {}
    for a in shapes:
        grouped.setdefault((a.axes, a.axis), []).append(a)
    found = []
    for own in grouped.values():
        allowed = {a: counts(problem.program, problem.search, a) for a in own}
        numbers = sorted({n for each in allowed.values() for n in each})
        if problem.random:
            numbers = [numbers[seed % min(len(numbers), 3)]]
        found.append(StagePosition(tuple(own), tuple((n, tuple(a for a in own if n in allowed[a])) for n in numbers)))
    return found


def _has_enough_layers(problem: PipelineProblem, known: SearchRecord, a: PipelineShape) -> bool:
    """Whether there is a layer for each stage, where three are captured for many."""
    try:
        require_blocks(problem.program, a)
    except InfeasibleError as e:
        known.errors.append(e)
        return False
    return True


def _plan_without_stages(problem: PipelineProblem, known: SearchRecord) -> None:
    """Plan the whole model on all devices, in whatever memory; that within the budget is left open."""
    free = flat_in_any_memory(problem.program, problem.job)
    known.flat = own = free.certificate
    if problem.memory is None:
        known.add(free)
        return
    expand = partial(_fit_without_stages, problem, known)
    known.open.append(Subproblem(free.predicted.step_seconds, own.lower_bound, expand, own.checked))


def _fit_without_stages(problem: PipelineProblem, known: SearchRecord) -> None:
    """The best within the budget without stages."""
    try:
        found = best_flat(problem.program, replace(problem.job, cutoff=Cutoff(known.seconds)))
    except InfeasibleError as e:
        known.fail(e)
        return
    known.add(found)
    known.flat = found.certificate


def _open_microbatches(problem: PipelineProblem, known: SearchRecord, position: StagePosition, number: int) -> None:
    """Leave a position with its next number of microbatches open.

    Args:
        problem: what is searched.
        known: grows.
        position: where the stages lie.
        number: index of the number of microbatches; beyond the last there is nothing to do.
    """
    if number >= len(position.numbers):
        return
    count, shapes = position.numbers[number]
    for a in shapes:
        known.tried.setdefault(a, []).append(count)
    # In more microbatches the devices of a stage are not faster.
    coarser = [p for (where, n), p in known.free.items() if where == position.key and count % n == 0]
    devices, least = shapes[0].devices, problem.floor * min(waits(a, count) for a in shapes)
    alike = max(coarser, key=lambda p: p.certificate.lower_bound, default=None)
    bound, seconds = least, least
    checked: float | None = least
    if alike is not None:
        bound = max(least, alike.certificate.lower_bound / devices)
        checked = None if alike.certificate.checked is None else max(least, alike.certificate.checked / devices)
        waiting = min(bubble(a, name, count) for a in shapes for name in a.schedules)
        seconds = alike.predicted.step_seconds / devices * (1 + waiting)
    expand = partial(_plan_stage_devices, problem, known, position, number)
    known.open.append(Subproblem(max(bound, seconds), bound, expand, checked))


def _plan_stage_devices(problem: PipelineProblem, known: SearchRecord, position: StagePosition, number: int) -> None:
    """Plan the devices of a stage, if they had the whole model and any memory.

    Raises:
        InfeasibleError: the model does not allow it.
    """
    (count, shapes), first = position.numbers[number], position.shapes[0]
    known.say(problem.job, f"{first.devices} devices along {first.axis}, {count} microbatches")
    try:
        possible = [(a, allowed) for a in shapes if (allowed := _allowed(problem, known, a, count))]
        if not possible:
            return
        part = microbatch_program(problem.program, count, deterministic=problem.job.deterministic)
        free = plan_of_microbatch(problem.program, part, problem.job_inside(first))
        known.free[position.key, count] = free
        own, seconds = free.certificate, free.predicted.step_seconds / first.devices
        checked = None if own.checked is None else own.checked / first.devices
        for a, allowed in possible:
            promised = seconds * (1 + min(bubble(a, name, count) for name in allowed))
            bound = max(own.lower_bound / a.devices, problem.floor * waits(a, count))
            expand = partial(_cut_into_stages, problem, known, part, a, allowed)
            known.open.append(Subproblem(promised, bound, expand, checked))
    finally:
        _open_microbatches(problem, known, position, number + 1)


def _allowed(problem: PipelineProblem, known: SearchRecord, a: PipelineShape, count: int) -> tuple[str, ...]:
    """The schedules that work for so many microbatches."""
    found = []
    for schedule in a.schedules:
        try:
            require_numbers(schedule, a.devices, count, a.virtual)
            found.append(schedule)
        except ValueError as e:
            known.errors.append(InfeasibleError(f"no pipeline: {e}"))
    if found and problem.program.training and count == 1 and not any(suits_one_microbatch(name) for name in found):
        known.errors.append(InfeasibleError(
            'in a pipeline of one microbatch all stages but one wait: pin {"microbatches": n} with n of at least 2'
        ))  # fmt: skip
        return ()
    return tuple(found)


def _cut_into_stages(
    problem: PipelineProblem, known: SearchRecord, part: Program, a: PipelineShape, schedules: Sequence[str]
) -> None:
    """Cut the model, planned for any memory, into stages.

    Raises:
        InfeasibleError: it has too few modules.
    """
    what = f"{a.devices} devices along {a.axis}, {a.stages} stages, {part.microbatches} microbatches"
    known.say(problem.job, what)
    own = known.free[(a.axes, a.axis), part.microbatches].certificate
    orders = {name: order(name, a.devices, part.microbatches, a.virtual) for name in schedules}
    cuts = _free_stages(problem, known, part, a, tuple(orders.values()))
    names, seed = list(orders), problem.search.seed
    for schedule in [names[seed % len(names)]] if problem.random else names:
        scheduled = ScheduledPart(part, a, schedule, orders[schedule])
        ways = suitable(cuts, scheduled.actions)
        if problem.random:
            ways = [ways[seed % len(ways)]]
        promised = min(w.busiest(scheduled.actions) for w in ways)
        checked = None if own.checked is None else own.checked / a.devices
        bound = own.lower_bound / a.devices
        expand = partial(_simulate, problem, known, scheduled, ways)
        known.open.append(Subproblem(promised, bound, expand, checked, schedule))


def _free_stages(
    problem: PipelineProblem, known: SearchRecord, part: Program, a: PipelineShape, orders: Sequence[Order]
) -> list[StagePlan]:
    """The plan for any memory, in stages; a deep model's layers are rewritten once for all shapes and schedules."""
    key = (a.axes, a.axis), part.microbatches
    plan, link = known.free[key], problem.link(a)
    if part.repeat is None:
        return stage_plans(part, plan, a, link, problem.search, orders)
    if key not in known.blocks:
        known.blocks[key] = RepeatedStages(part, plan, a, link, part.training)
    return known.blocks[key].staged(a, scatters(a.axis, orders))


def _simulate(
    problem: PipelineProblem, known: SearchRecord, scheduled: ScheduledPart, cuts: Sequence[StagePlan]
) -> None:
    """Seconds under a schedule; where it does not fit, a search within the budget is left open."""
    actions = scheduled.actions
    seconds, cut = min(((cut.seconds(actions), cut) for cut in cuts), key=lambda found: found[0])
    whole = cut.whole(scheduled.schedule, actions, seconds)
    needed, own = _needed(whole), whole.certificate
    known.certificates.append(own)  # its bound is that of all schedules, in whatever memory
    if problem.memory is not None and not fits(needed, problem.memory):
        known.least = whole if known.least is None else min(known.least, whole, key=_needed)
        expand = partial(search_within_budget, problem, known, scheduled, seconds, needed)
        known.open.append(Subproblem(seconds, own.lower_bound, expand, own.checked, scheduled.schedule, needed))
    elif seconds < known.seconds:
        known.best = whole


def _result(problem: PipelineProblem, known: SearchRecord) -> Plan:
    """The best plan, with a certificate for all that was looked at."""
    best = known.best
    if best is None:
        needed = min((e.needed for e in known.errors if e.needed is not None), default=math.inf)
        if known.least is None or problem.memory is None:
            raise known.errors[0]
        raise missing(known.least, min(needed, _needed(known.least)), problem.memory)
    left = [o for o in known.open if o.bound < known.seconds]
    bound = min(*(c.lower_bound for c in known.certificates), *known.bounds, *(o.bound for o in left), known.seconds)
    if len({c.space for c in known.certificates}) == 1 and bound >= best.certificate.lower_bound:
        return best
    verified = [*(c.checked for c in known.certificates), *(o.checked for o in left), *known.bounds]
    checked = None if None in verified else min(b for b in verified if b is not None)
    method = TIME_LIMIT if known.stopped else best.certificate.method
    space = _space(known, problem.search.stages_open)
    certificate = replace(best.certificate, lower_bound=bound, space=space, method=method, checked=checked)
    return replace(best, certificate=certificate)


def _space(known: SearchRecord, stages_open: bool) -> str:
    """What was searched, in words."""
    shapes = [
        f"{a.devices} devices of axis {a.axis}, {a.virtual} each, {', '.join(map(str, numbers))} microbatches"
        for a, numbers in known.tried.items()
    ]
    inside = known.flat.space if known.flat else known.certificates[0].space.split(INSIDE)[-1]
    none = "no pipeline, or " if stages_open else ""
    return f"{none}stages cut anywhere, alike inside, in any order, on {'; or '.join(shapes)}{INSIDE}{inside}"


def _needed(plan: Plan) -> float:
    return sum(plan.predicted.peak_bytes.values())


def least_seconds(program: Program, machine: Cluster, devices: int) -> float:
    """Seconds that no step falls below: what operators compute and move, at the peak, shared by so many devices."""
    device, total = machine.device, 0.0
    for operator, times in Counter(analyze(program).operators.values()).items():
        work = operator_work(operator, candidates(operator, ()), ())
        rate = device.peak(arithmetic_dtype(operator, device)) * device.efficiency
        total += times * max(float(work.flops[0]) / rate, float(work.moved[0]) / (device.bandwidth * device.streaming))
    total /= devices
    repeat = program.repeat
    return (
        total if repeat is None else float(repeat.extrapolate(total, least_seconds(repeat.shorter, machine, devices)))
    )
