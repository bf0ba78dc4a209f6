"""`best_pipeline`: which stages, how many microbatches and which schedule, around the search inside a stage.

It is a branch and bound, the most promising first. A subproblem that is open has the seconds that it may lead to, and a
bound that holds for all of it; a step expands one of them, and may leave several that are known better:

1. An axis of the mesh for the stages, or a factor of one, with a number of microbatches. Its bound costs
   nothing: all devices at the peak of their arithmetic or memory, and the bubble that a pipeline of one stage a device
   cannot avoid. Looking into it plans the devices of a stage as if they had the whole model and any memory: no pipeline
   there is faster than that by more than the number of its devices, in so many microbatches or in more.
2. So many stages on each device. The planned model is cut into them.
3. A schedule. It is simulated.
4. A pipeline that is known to the second, but needs more memory than there is. It is searched within the budget.

A subproblem with more seconds than the best plan takes is left open. To have no stages at all is a subproblem, too.
Before anything is planned, the order is by estimates: of kernels, of how much longer plans nearby took, and of what
plans need (`autopar.search.microbatch.needed_bytes`). At the end the bounds of what is open are raised
(`autopar.search.microbatch.memory_floor`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from autopar.errors import InfeasibleError
from autopar.ir.plan import TIME_LIMIT, Certificate, Plan
from autopar.ir.program import Program
from autopar.pipeline.schedules import Order, order, placed, require_numbers, splits, suits_one_microbatch
from autopar.search.budget.budget_problem import peak_bytes
from autopar.search.budget.cutoff import Cutoff
from autopar.search.budget.lagrangian import fits
from autopar.search.microbatch.flat import best_flat, first_flat, flat_in_any_memory
from autopar.search.microbatch.needed_bytes import slowdown
from autopar.search.microbatch.split import microbatch_program, require_early_backward
from autopar.search.options import Job
from autopar.search.padding import best_padded
from autopar.search.pipeline.deep_models import RepeatedStages, require_blocks
from autopar.search.pipeline.fit_stages import search_within_budget
from autopar.search.pipeline.search_tree import SearchTree, Subproblem, least_seconds
from autopar.search.pipeline.shape import MeshKey, PipelineShape, Possible, ScheduledStages
from autopar.search.pipeline.space import bubble, counts, idle_factor, in_every_order, pipeline_shapes
from autopar.search.pipeline.stage_peak import scatters, stage_plans
from autopar.search.pipeline.stage_plan import INSIDE, StagePlan, kinds_in_order, missing, suitable
from autopar.search.solver.highs import requested

LIMITS, TO_BOUND = 4.5, 1.0
"""So many time limits of one search are for all pipelines together, once a plan is known; and for the bound of what is
not planned by then."""


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
    floor = least_seconds(program, job.cluster.device, math.prod(job.axes.values()))
    shapes = pipeline_shapes(job.search, job.axes, program.training, factored)
    orders = tuple(own for shape in shapes for own in in_every_order(shape, job.cluster, job.search))
    tree = SearchTree(program, job, orders, floor, time.monotonic() + LIMITS * job.search.time_limit)
    if tree.search.stages_open:
        least = tree.kernels_without_stages()
        expand = partial(_plan_without_stages, tree)
        rows = tree.rows_of_device(1, 1)
        tree.open.append(Subproblem(
            least.typical, least.bound, expand, least.bound, unplanned=rows, second=tree.is_rough, flat=True
        ))  # fmt: skip
    for count, shapes_of_mesh in _counts(tree):
        _open_microbatches(tree, count, shapes_of_mesh)
    while not tree.is_late() and (node := tree.next()) is not None:
        try:
            node.expand()
        except InfeasibleError as e:
            tree.errors.append(e)
    if not tree.random:
        _raise_bound(tree)
    return _result(tree)


def _raise_bound(tree: SearchTree) -> None:
    """Raise the bounds of what is not planned, the lowest first, as long as there is time."""
    late = max(tree.deadline, time.monotonic()) + TO_BOUND * tree.search.time_limit
    while (least := tree.least_open()) is not None and (weakest := tree.weakest(least)) is not None:
        mesh, count, room = weakest
        tree.say(f"bound of {count} microbatches {f'along {mesh[1]}' if mesh else 'without stages'}")
        try:
            if requested() or time.monotonic() > late or not tree.memory_floor(mesh).improve(count, room, late):
                return
        except InfeasibleError:
            return
        tree.raise_bounds(mesh)


def _counts(tree: SearchTree) -> list[tuple[int, tuple[PipelineShape, ...]]]:
    """Numbers of microbatches, each with the shapes on one mesh and axis that may have it; of a random plan one."""
    shapes, seed = [a for a in tree.shapes if _has_enough_layers(tree, a)], tree.search.seed
    if tree.random and shapes:
        shapes = [shapes[seed % len(shapes)]]
    grouped: dict[MeshKey, list[PipelineShape]] = {}
    for a in shapes:
        grouped.setdefault(a.mesh, []).append(a)
    found = []
    for own in grouped.values():
        allowed = {a: counts(tree.program, tree.search, a) for a in own}
        numbers = sorted({n for each in allowed.values() for n in each})
        if tree.random:
            numbers = [numbers[seed % min(len(numbers), 3)]]  # of many, each microbatch would have few samples
        found += [(n, tuple(a for a in own if n in allowed[a])) for n in numbers]
    return found


def _has_enough_layers(tree: SearchTree, a: PipelineShape) -> bool:
    """Whether there is a layer for each stage, where three are captured for many."""
    try:
        require_blocks(tree.program, a)
    except InfeasibleError as e:
        tree.errors.append(e)
        return False
    return True


def _plan_without_stages(tree: SearchTree) -> None:
    """Plan the whole model on all devices, in whatever memory; that within the budget is left open."""
    free = flat_in_any_memory(tree.program, replace(tree.job, rough=tree.is_rough))
    tree.flat = own = free.certificate
    if tree.memory is None:
        tree.add(free)
        return
    seconds = free.predicted.step_seconds
    tree.compare(seconds, tree.expected(None, free.microbatches), None, tree.rows_of_device(1, free.microbatches))
    # One search of a deep model leads to a plan; all of them take longer than any stage.
    expand = partial(_fit_roughly, tree, own) if tree.is_rough else partial(_fit_without_stages, tree)
    tree.open.append(Subproblem(
        seconds, own.lower_bound, expand, own.checked, unmeasured=True, second=tree.is_rough, again=tree.is_rough,
        flat=True,
    ))  # fmt: skip


def _fit_roughly(tree: SearchTree, free: Certificate) -> None:
    """A first plan within the budget without stages; the best one is left open."""
    tree.say("without stages")
    expand, bound = partial(_fit_without_stages, tree), free.lower_bound
    tree.open.append(Subproblem(bound, bound, expand, free.checked, unmeasured=True, again=True, flat=True))
    try:
        tree.add(first_flat(tree.program, replace(tree.job, cutoff=Cutoff(tree.seconds)), tree.most_without_stages))
    except InfeasibleError as e:
        tree.fail(e)


def _fit_without_stages(tree: SearchTree) -> None:
    """The best within the budget without stages."""
    try:
        found = best_flat(tree.program, replace(tree.job, cutoff=Cutoff(tree.seconds)))
    except InfeasibleError as e:
        tree.fail(e)
        return
    tree.add(found)
    tree.flat = found.certificate


def _open_microbatches(tree: SearchTree, count: int, shapes: tuple[PipelineShape, ...]) -> None:
    """Leave a number of microbatches on a mesh open; the shapes differ in the number of stages on a device."""
    first = shapes[0]
    for a in shapes:
        tree.tried.setdefault(a, []).append(count)
    kernels = tree.kernels(first, count)
    least = kernels.bound * min(idle_factor(a, count, tree.speeds(a), tree.alone) for a in shapes)
    seconds = kernels.typical * (1 + min(bubble(a, name, count, tree.alone) for a in shapes for name in a.schedules))
    expand = partial(_plan_stage_devices, tree, count, shapes)
    tree.open.append(Subproblem(
        max(least, seconds), least, expand, least, unplanned=tree.rows_of_device(first.devices, count),
        slower=tree.slower(first.devices, count), spread=tree.spread(first, count), of=(first.mesh, count),
        room=tree.room(first, count),
    ))  # fmt: skip


def _plan_stage_devices(tree: SearchTree, count: int, shapes: tuple[PipelineShape, ...]) -> None:
    """Plan the devices of a stage, if they had the whole model and any memory.

    Raises:
        InfeasibleError: the model does not allow it.
    """
    first = shapes[0]  # the devices of a stage are the same for all
    tree.say(f"{first.devices} devices along {first.axis}, {count} microbatches")
    possible = [(a, allowed) for a in shapes if (allowed := _allowed(tree, a, count))]
    if not possible:
        return
    part = microbatch_program(tree.program, count, deterministic=tree.job.deterministic)
    if tree.is_rough:
        tree.rough[first.mesh, count] = possible
    _plan_in_any_memory(tree, part, possible)


def _plan_in_any_memory(tree: SearchTree, part: Program, possible: Possible) -> None:
    """Plan the devices of a stage for any memory; to cut the model into stages is left open for each shape.

    Args:
        tree: grows.
        part: of one microbatch.
        possible: shapes on one mesh, each with the schedules that it may follow.
    """
    (first, _), *_ = possible
    key, count = (first.mesh, part.microbatches), part.microbatches
    free = best_padded(tree.program, part, replace(tree.job_inside(first), rough=key in tree.rough))
    tree.free[key] = free
    own, seconds = free.certificate, free.predicted.step_seconds / first.devices
    tree.compare(seconds, tree.expected(first, count), first.mesh, tree.rows_of_device(first.devices, count))
    tree.bound_multiples(first, count)
    checked = None if own.checked is None else own.checked / first.devices
    for a, allowed in possible:
        promised = seconds * (1 + min(bubble(a, name, count, tree.alone) for name in allowed))
        least = tree.kernels(a, count).bound * idle_factor(a, count, tree.speeds(a), tree.alone)
        bound = max(own.lower_bound / a.devices, least)
        expand = partial(_cut_into_stages, tree, part, a, allowed)
        slower = tree.slower(a.devices, count)
        tree.open.append(Subproblem(promised, bound, expand, checked, slower=slower))


def _plan_anew(tree: SearchTree, part: Program, mesh: MeshKey) -> None:
    """Search once more what fits as it was roughly planned: within the memory there may be a better one."""
    key = mesh, part.microbatches
    possible = tree.rough.pop(key, None)
    if possible is not None:
        tree.blocks.pop(key, None)
        _plan_in_any_memory(tree, part, possible)


def _allowed(tree: SearchTree, a: PipelineShape, count: int) -> tuple[str, ...]:
    """The schedules that work for so many microbatches."""
    found = []
    for schedule in a.schedules:
        try:
            require_numbers(schedule, a.devices, count, a.virtual)
            found.append(schedule)
        except ValueError as e:
            tree.errors.append(InfeasibleError(f"no pipeline: {e}"))
    if found and tree.program.training and count == 1 and not any(suits_one_microbatch(name) for name in found):
        tree.errors.append(InfeasibleError(
            'in a pipeline of one microbatch all stages but one wait: pin {"microbatches": n} with n of at least 2'
        ))  # fmt: skip
        return ()
    return tuple(found)


def _cut_into_stages(tree: SearchTree, part: Program, a: PipelineShape, schedules: Sequence[str]) -> None:
    """Cut the model, planned for any memory, into stages.

    Raises:
        InfeasibleError: it has too few modules.
    """
    what = f"{a.devices} devices along {a.axis}, {a.stages} stages, {part.microbatches} microbatches"
    tree.say(what)
    own = tree.free[a.mesh, part.microbatches].certificate
    orders = {name: placed(order(name, a.devices, part.microbatches, a.virtual), a.places) for name in schedules}
    cuts = _free_stages(tree, part, a, tuple(orders.values()))
    names, seed = list(orders), tree.search.seed
    for schedule in [names[seed % len(names)]] if tree.random else names:
        scheduled = tree.scheduled(part, a, schedule, orders[schedule])
        ways = suitable(cuts, scheduled.actions)
        if tree.random:
            ways = [ways[seed % len(ways)]]
        # No simulation yet: no step is shorter than its busiest device works.
        promised = min(w.busiest(scheduled.actions) for w in ways)
        checked = None if own.checked is None else own.checked / a.devices
        bound = own.lower_bound / a.devices
        expand = partial(_simulate, tree, scheduled, ways)
        slower = tree.slower(a.devices, part.microbatches, scheduled.activation_share, split=splits(schedule))
        tree.open.append(Subproblem(promised, bound, expand, checked, schedule, slower=slower))


def _free_stages(tree: SearchTree, part: Program, a: PipelineShape, orders: Sequence[Order]) -> list[StagePlan]:
    """The plan for any memory, in stages; a deep model's layers are rewritten once for all shapes and schedules."""
    key = a.mesh, part.microbatches
    devices = tree.devices(a)
    plan = replace(tree.free[key], cluster=devices.whole)
    if part.repeat is None:
        return stage_plans(part, plan, a, devices, tree.search, orders)
    if key not in tree.blocks:
        tree.blocks[key] = RepeatedStages(part, plan, a, devices, part.training)
    return tree.blocks[key].staged(a, scatters(a.axis, orders))


def _simulate(tree: SearchTree, scheduled: ScheduledStages, cuts: Sequence[StagePlan]) -> None:
    """Seconds under a schedule; where it does not fit, a search within the budget is left open."""
    seconds, cut = min(((cut.seconds(scheduled.actions), cut) for cut in cuts), key=lambda found: found[0])
    whole = cut.whole(scheduled, seconds)
    needed, own = peak_bytes(whole), whole.certificate
    tree.certificates.append(own)  # its bound is that of all schedules, in whatever memory
    if tree.memory is not None and not fits(needed, tree.memory):
        tree.lightest = whole if tree.lightest is None else min(tree.lightest, whole, key=peak_bytes)
        expand = partial(search_within_budget, tree, scheduled, seconds, needed)
        slower = slowdown(needed, tree.memory, split=splits(scheduled.schedule))
        tree.open.append(Subproblem(
            seconds, own.lower_bound, expand, own.checked, scheduled.schedule, needed, slower=slower
        ))  # fmt: skip
        return
    if seconds < tree.seconds:
        tree.best = whole
    if (scheduled.shape.mesh, scheduled.part.microbatches) in tree.rough:
        expand = partial(_plan_anew, tree, scheduled.part, scheduled.shape.mesh)
        tree.open.append(Subproblem(own.lower_bound, own.lower_bound, expand, own.checked))


def _result(tree: SearchTree) -> Plan:
    """The best plan, with a certificate for all that was looked at.

    Raises:
        InfeasibleError: nothing fits, or nothing was possible.
    """
    best = tree.best
    if best is None:
        needed = min((e.needed for e in tree.errors if e.needed is not None), default=math.inf)
        if tree.lightest is None or tree.memory is None:
            raise tree.errors[0]
        raise missing(tree.lightest, min(needed, peak_bytes(tree.lightest)), tree.memory)
    left = [o for o in tree.open if o.bound < tree.seconds]
    bound = min(*(c.lower_bound for c in tree.certificates), *tree.pruned, *(o.bound for o in left), tree.seconds)
    if len({c.space for c in tree.certificates}) == 1 and bound >= best.certificate.lower_bound:
        return best
    # A subproblem that is left open counts with its own bound, which is as checked as the plan that it came from.
    verified = [*(c.checked for c in tree.certificates), *(o.checked for o in left), *tree.pruned]
    checked = None if None in verified else min(b for b in verified if b is not None)
    method = TIME_LIMIT if tree.stopped else best.certificate.method
    space = _space(tree)
    certificate = replace(best.certificate, lower_bound=bound, space=space, method=method, checked=checked)
    return replace(best, certificate=certificate)


def _space(tree: SearchTree) -> str:
    """What was searched, in words."""
    shapes = [
        f"{a.devices} devices of axis {a.axis}{kinds_in_order(a, tree.devices(a))}, {a.virtual} each, "
        f"{', '.join(map(str, numbers))} microbatches"
        for a, numbers in tree.tried.items()
    ]
    inside = tree.flat.space if tree.flat else tree.certificates[0].space.split(INSIDE)[-1]
    none = "no pipeline, or " if tree.search.stages_open else ""
    return f"{none}stages cut anywhere, alike inside, in any order, on {'; or '.join(shapes)}{INSIDE}{inside}"
