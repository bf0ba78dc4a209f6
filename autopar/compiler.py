"""The compiler, top to bottom: what happens between `parallelize` and a module that runs on a mesh."""

from __future__ import annotations

import functools
import gc
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import autopar.strategies  # noqa: F401  registers every rule
from autopar import cache, tree
from autopar.abridge import abridge
from autopar.canonical import canonical
from autopar.capture import Batch, LossFunction, capture
from autopar.check import check
from autopar.cluster import Cluster, Link
from autopar.cost.memory import parse_bytes
from autopar.dims import Dims, analyze
from autopar.errors import InfeasibleError, PassError, PlanError
from autopar.extrapolate import peak_of_blocks
from autopar.liveness import Moment, moments, peak_memory
from autopar.microbatch import TIME, cut_microbatches
from autopar.passes.annotate_layouts import annotate_layouts
from autopar.passes.apply_precision import apply_precision
from autopar.passes.bucket_collectives import bucket_collectives
from autopar.passes.cut_pipeline import cut_pipeline
from autopar.passes.eliminate_dead_code import eliminate_dead_code
from autopar.passes.hoist_steady import hoist_steady
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.insert_offload import insert_offload
from autopar.passes.insert_recompute import insert_recompute
from autopar.passes.localize_random import localize_random
from autopar.passes.localize_shapes import localize_shapes
from autopar.passes.lower_operators import lower_operators
from autopar.passes.pad_dims import pad, pad_dims
from autopar.passes.replay_random import replay_random
from autopar.passes.replicate_random import replicate_random
from autopar.passes.scatter_sends import scatter_sends
from autopar.pipeline.asked import restrictions_inside
from autopar.pipeline.table import as_text
from autopar.pipelines import Inside, Works, best_pipeline, least_seconds
from autopar.plan import INTERRUPTED, TIME_LIMIT, Plan
from autopar.precision import Precision
from autopar.predict import predict
from autopar.program import Program, copy_graph, values_of
from autopar.recompute import uniform
from autopar.search.build import WHOLE, Share
from autopar.search.counts import best_count
from autopar.search.find import OFFLOAD, SCHEDULE, Peak, Progress, Search, find_plan, require_splits
from autopar.search.in_time import along_samples
from autopar.search.padding import paddings
from autopar.search.quotient import Quotient, quotient
from autopar.search.random_plan import random_plan
from autopar.search.recipes import roles_of
from autopar.search.restrict import Restrictions, complete, pin_modules, read_pins
from autopar.search.rival import NOBODY, NoFasterError, Rival
from autopar.search.roles import DATA, Roles, by_roles

Pass = Callable[[Program, Plan], Program]

logger = logging.getLogger("autopar")

PASSES: tuple[Pass, ...] = (
    pad_dims,
    annotate_layouts,
    insert_recompute,
    hoist_steady,
    insert_collectives,
    localize_shapes,
    localize_random,
    lower_operators,
    cut_pipeline,
    insert_offload,
    bucket_collectives,
    eliminate_dead_code,
    scatter_sends,
)

DETERMINISTIC_PASSES: tuple[Pass, ...] = (
    pad_dims,
    annotate_layouts,
    insert_recompute,
    hoist_steady,
    replicate_random,
    insert_collectives,
    localize_shapes,
    replay_random,
    lower_operators,
    cut_pipeline,
    insert_offload,
    bucket_collectives,
    eliminate_dead_code,
    scatter_sends,
)
"""Instead of `PASSES` where the ranks together draw the very numbers that one device would."""


TIME_PASSES: tuple[Pass, ...] = (
    annotate_layouts,
    insert_collectives,
    localize_shapes,
    lower_operators,
    eliminate_dead_code,
)
"""For the axis of time, along which microbatches follow one another."""

DETERMINISTIC_TIME_PASSES: tuple[Pass, ...] = (annotate_layouts, replicate_random, *TIME_PASSES[1:])


def program_of(
    model: nn.Module,
    batch: Batch,
    *,
    loss_fn: LossFunction | None = None,
    training: bool | None = None,
    precision: Precision | None = None,
) -> Program:
    """Capture a model, under a precision policy, and bring its graph into canonical form."""
    compute = None if precision is None else precision.compute
    program = capture(model, batch, loss_fn=loss_fn, training=training, compute=compute)
    if precision is not None:
        program = apply_precision(program, precision, [t.dtype for t in tree.flatten(batch, "batch")[0]])
    program = canonical(program)
    logger.debug("captured %s operators, fingerprint %s", len(program.calls), program.fingerprint)
    return program


def program_to_plan(
    model: nn.Module,
    batch: Batch,
    *,
    loss_fn: LossFunction | None = None,
    precision: Precision | None = None,
    search: Search | None = None,
    progress: Progress | None = None,
) -> Program:
    """What `program_of` captures, or less: alike blocks need not all be captured for a plan of the whole model."""
    search = search or Search()

    def make(model: nn.Module) -> Program:
        return program_of(model, batch, loss_fn=loss_fn, precision=precision)

    if search.recipe == "random" or not search.tie_layers or search.stage_modules:
        return make(model)

    def say(text: str) -> None:
        logger.info("%s", text)
        if progress:
            progress(text, math.inf, 0.0)

    return abridge(model, make, search.layouts, say)


def solve(
    program: Program,
    axes: Mapping[str, int],
    cluster: Cluster | str | Path,
    *,
    memory: str | float | None = None,
    optimizer: str = "adamw",
    search: Search | None = None,
    restrictions: Restrictions | None = None,
    progress: Progress | None = None,
    deterministic: bool = False,
    factored: bool = False,
) -> Plan:
    """Analyze a program, enumerate candidates and search; the plan carries its prediction and certificate.

    Where memory is short, this is done for several numbers of microbatches, unless one is pinned. A plan that was found
    before is read, see `autopar.cache`; one whose search did not end by itself is not kept.

    Args:
        program: of the whole batch.
        axes: name and size of each mesh axis, outermost first.
        cluster: the devices.
        memory: bytes of a device; None for no limit.
        optimizer: whose state is counted.
        search: limits and pins.
        restrictions: what is decided already.
        progress: called with ``(phase, incumbent, bound)``.
        deterministic: random numbers are those of one device.
        factored: a pipeline's stages may take a factor of an axis; the plan is then for a mesh with one axis more.
    """
    search, machine = _with_table(search or Search()), Cluster.resolve(cluster)
    budget = None if memory is None else parse_bytes(memory)

    def attempt(search: Search, count: int, rival: Rival) -> Plan:
        part = in_microbatches(program, count, deterministic=deterministic)
        rival = NOBODY if search.check else rival  # all that the certificate says is checked
        plan = _best_padded(part, axes, machine, budget, optimizer, search, restrictions, progress, rival)
        return replace(plan, fingerprint=program.fingerprint, microbatches=part.microbatches)

    with _collector_paused():
        dims, kind = analyze(program), f"random numbers {'at once' if deterministic else 'apart'}, factored {factored}"
        file = cache.file_of(program, dims, axes, machine, budget, optimizer, search, restrictions, kind)
        if file is not None and (known := cache.load(file, program)) is not None:
            if progress:
                progress(f"plan of an earlier search, {file}", math.inf, 0.0)
            return known

        def without_stages(search: Search) -> Plan:
            if search.microbatches or budget is None or search.recipe == "random" or program.loss is None:
                return attempt(search, search.microbatches or 1, NOBODY)
            return best_count(functools.partial(attempt, search))

        def flat() -> Plan:
            try:
                return without_stages(search)
            except InfeasibleError as e:
                if not (search.offload_at_last and machine.device.host_bandwidth and e.needed):
                    raise
            return without_stages(replace(search, pins={**search.pins, OFFLOAD: "search"}))

        def part(count: int) -> Program:
            return in_microbatches(program, count, deterministic=deterministic)

        def inside(part: Program, asked: Inside) -> Plan:
            limits = restrictions_inside(restrictions, axes, asked.axis)
            found = _best_padded(
                part, asked.axes, asked.machine, asked.memory, optimizer, asked.search, limits, progress,
                Rival(asked.beat), asked.share, asked.peak,
            )  # fmt: skip
            return replace(found, fingerprint=program.fingerprint, microbatches=part.microbatches)

        if search.pipelines:
            if program.training:
                _require_early_backward(program)
            works = Works(part, inside, lambda part, plan: _rewrite(part, plan, PASSES), flat)
            floor = least_seconds(dims, machine, math.prod(axes.values()))
            plan = best_pipeline(program, axes, machine, search, budget, works, floor, progress, factored)
        else:
            plan = flat()
        if file is not None and plan.certificate.method not in (TIME_LIMIT, INTERRUPTED):
            cache.store(file, plan)
        return plan


def _with_table(search: Search) -> Search:
    """The search with the text of a schedule by hand: plans are kept for that, and not for the name of its file."""
    if SCHEDULE not in search.pins:
        return search
    return replace(search, pins={**search.pins, SCHEDULE: as_text(search.pins[SCHEDULE])})


def _best_padded(
    program: Program,
    axes: Mapping[str, int],
    machine: Cluster,
    memory: float | None,
    optimizer: str,
    search: Search,
    restrictions: Restrictions | None,
    progress: Progress | None,
    rival: Rival,
    share: Share = WHOLE,
    peak: Callable[[Program], Peak] | None = None,
) -> Plan:
    """The best plan that is found.

    Where parameters have dims that an axis does not divide, it is searched twice: without padding, and then with it for
    a plan that is faster. Each search has half of the time limit.
    """
    roles, dims = roles_of(search.recipe, axes, search.roles), analyze(program)
    limits = read_pins(program, dims, search.layouts, axes, restrictions)
    helps = any(role != DATA for role in roles)  # parameters need not divide to be replicated
    options = paddings(program, dims, axes, limits.layouts, search=search.padding and helps)
    if search.recipe == "random":
        options = (options[search.seed % len(options)],)
    search = replace(search, time_limit=search.time_limit / len(options))
    found: list[Plan] = []
    bounds: list[float] = []
    errors: list[InfeasibleError] = []
    for shapes in options:
        padded = pad(program, shapes)
        dims = analyze(padded) if shapes else dims
        try:
            # A later shape lives with the mesh that there is; roles say more clearly what is wrong.
            if None in roles and (restrictions is None or not restrictions.layouts):
                require_splits(dims, axes)
            held = peak(padded) if peak else None
            known = Rival.of(found[0]) if found and not search.check else rival
            plan = _solve(
                padded, dims, axes, machine, memory, optimizer, search, roles, limits, progress, known, share, held
            )
        except InfeasibleError as e:
            errors.append(e)
            bounds += [e.bound] if isinstance(e, NoFasterError) else []
            continue
        found.append(replace(plan, padding=shapes))
    if not found:
        raise min(errors, key=lambda e: math.inf if e.needed is None else e.needed)
    best = _of_whole_model(min(found, key=lambda plan: plan.certificate.objective), program)
    if len(options) == 1 or search.recipe == "random":
        return best
    bound = min(*bounds, *(plan.certificate.lower_bound for plan in found), best.certificate.objective)
    verified = [plan.certificate.checked for plan in found]
    checked = None if None in verified else min(b for b in verified if b is not None)
    methods = [plan.certificate.method for plan in found]
    method = next((m for m in (INTERRUPTED, TIME_LIMIT) if m in methods), best.certificate.method)
    space = f"parameters as they are, or all padded whose dims an axis does not divide; {best.certificate.space}"
    return replace(
        best,
        certificate=replace(best.certificate, lower_bound=bound, space=space, method=method, checked=checked),
    )


def _of_whole_model(plan: Plan, program: Program) -> Plan:
    """The plan with the parameters that the program leaves out."""
    repeat = program.repeat
    if repeat is None:
        return plan
    parameters = {whole: layout for name, layout in plan.parameters.items() for whole in repeat.names(name)}
    padding = {whole: shape for name, shape in plan.padding.items() for whole in repeat.names(name)}
    return replace(plan, parameters=parameters, padding=padding)


def _solve(
    program: Program,
    dims: Dims,
    axes: Mapping[str, int],
    machine: Cluster,
    memory: float | None,
    optimizer: str,
    search: Search,
    roles: Roles,
    limits: Restrictions,
    progress: Progress | None,
    rival: Rival,
    share: Share,
    held: Peak | None,
) -> Plan:
    """The best plan, or a random one, of a program whose dims are decided."""
    classes = quotient(program, dims, tie=search.tie_layers or search.recipe == "random")
    limits = pin_modules(program, dims, classes, search.layouts, axes, limits)
    if search.recipe == "random":
        fixed = {key: complete(key[1], layout) for key, layout in limits.layouts.items()}
        again = search.again == "search"
        away = search.offload and machine.device.host_bandwidth > 0
        drawn = random_plan(program, dims, axes, machine, search.seed, fixed, optimizer, again, search.regions, away)
        return predict(program, dims, drawn)
    plan = find_plan(
        program,
        dims,
        axes,
        machine,
        memory=memory,
        peak=held or (lambda plan: peak_of(program, plan, classes)),
        optimizer=optimizer,
        search=search,
        restrictions=by_roles(program, dims, classes, axes, roles, limits),
        classes=classes,
        progress=progress,
        rival=rival,
        share=share,
    )
    return predict(program, dims, plan, classes)


def in_microbatches(program: Program, count: int, *, deterministic: bool = False) -> Program:
    """The program of one of ``count`` microbatches, whose sum is the step.

    Args:
        program: of the whole batch.
        count: microbatches.
        deterministic: random numbers are drawn for the whole batch at once, as one device would.

    Raises:
        InfeasibleError: the samples do not divide, or something needs the whole batch at once.
    """
    if count == 1 or not program.training:
        return program
    _require_early_backward(program)
    key = ("in_microbatches", count, deterministic)
    if key in program.memo:
        known: Program = program.memo[key]
        return known
    try:
        found = _in_microbatches(program, count, deterministic, tie=True)
    except InfeasibleError:  # what is alike may have to be cut in unlike ways
        found = _in_microbatches(program, count, deterministic, tie=False)
    if program.repeat is not None:
        shorter = in_microbatches(program.repeat.shorter, count, deterministic=deterministic)
        found = replace(found, repeat=replace(program.repeat, shorter=shorter))
    program.memo[key] = found
    return found


def _in_microbatches(program: Program, count: int, deterministic: bool, *, tie: bool) -> Program:
    """The program of a microbatch, if nodes that are ``tie``d are cut alike."""
    steps = DETERMINISTIC_TIME_PASSES if deterministic else TIME_PASSES
    program = replace(program, repeat=None)
    with _collector_paused():
        dims, axes = analyze(program), {TIME: count}
        classes = quotient(program, dims, tie=tie)
        limits = along_samples(program, dims, classes, count)
        search = Search(gap=0.0, padding=False, pins={"recompute": "none"})
        plan = find_plan(program, dims, axes, _slow_clock(), search=search, restrictions=limits, classes=classes)
        return cut_microbatches(program, _rewrite(program, plan, steps), count)


@functools.cache
def _slow_clock() -> Cluster:
    """A machine whose collectives take so long that a plan has only those that it must have."""
    return replace(Cluster.preset("cpu"), links=(Link("time", 1e12, 1.0),), group_sizes=())


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector: it would scan a captured graph's millions of objects over and over."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def peak_of(program: Program, plan: Plan, classes: Quotient | None = None) -> dict[str, float]:
    """Bytes by category at the moment when a device holds the most, in the graph that a plan gives."""
    if program.repeat is None:
        return peak_memory(_rewrite(program, plan, PASSES, verified=False), plan)
    classes = classes or quotient(program, analyze(program))
    shorter = program.repeat.shorter

    def held(program: Program, part: Plan) -> list[Moment]:
        return moments(_rewrite(program, part, PASSES, verified=False), part)

    parts = [(share, part) for share, part in uniform(plan, classes.count) if share > 0]
    known = [(share, held(program, part), held(shorter, part)) for share, part in parts]
    return peak_of_blocks(known, program.repeat)


def _require_early_backward(program: Program) -> None:
    """Gradients can be computed before `backward` is called, which then only scales them.

    Raises:
        InfeasibleError: there is no loss, or it has to be scaled.
    """
    if program.loss is None:
        raise InfeasibleError(
            "microbatches are added up by the loss, and the model returns none: return it alone or as the only scalar, "
            "or pass loss_fn=lambda output, batch: ..."
        )
    if any(v is not None and v.dtype is torch.float16 for n in program.graph.graph.nodes for v in values_of(n)):
        raise InfeasibleError(
            "gradients of microbatches and pipelines are computed before backward() is called, and so before the loss "
            'is scaled, which float16 needs: compute in bfloat16, or leave these out (pins={"microbatches": 1})'
        )


def rewrite(program: Program, plan: Plan, *, passes: tuple[Pass, ...] = PASSES) -> Program:
    """Run the passes; the graph is copied once and verified after each. Of a plan with microbatches it is one's.

    Raises:
        PlanError: the plan is for another program.
        ValueError: the program leaves blocks out.
        PassError: a pass left an invalid graph.
    """
    if program.microbatches > 1:
        raise ValueError("the program is of one microbatch; give the whole batch's")
    if program.repeat is not None:
        raise ValueError(f"the program leaves blocks of {program.repeat.path} out; capture the whole model to run it")
    if plan.fingerprint != program.fingerprint:
        raise PlanError(
            f"the plan is for another graph (fingerprint {plan.fingerprint}, this one has {program.fingerprint}): "
            "the model, its configuration, the batch's shapes or torch differ; plan again"
        )
    if plan.pipeline is not None and program.training:
        _require_early_backward(program)
    part = in_microbatches(program, plan.microbatches, deterministic=replicate_random in passes)
    return _rewrite(part, plan.inner, passes)


def _rewrite(program: Program, plan: Plan, passes: tuple[Pass, ...], *, verified: bool = True) -> Program:
    """Run the passes; a graph that is only measured is not ``verified`` after each."""
    program = replace(program, graph=copy_graph(program.graph))
    done: tuple[str, ...] = ()
    for step in passes:
        try:
            program = replace(step(program, plan))  # a new value: it may have changed the graph in place
            if verified:
                check(program, plan)
        except (AssertionError, RuntimeError, ValueError, TypeError) as e:
            raise PassError(step.__name__, done, str(e)) from e
        done = (*done, step.__name__)
    return program


def plan(
    model: nn.Module,
    batch: Batch,
    *,
    cluster: Cluster | str | Path,
    axes: Mapping[str, int] | None = None,
    loss_fn: LossFunction | None = None,
    memory: str | float | None = None,
    optimizer: str = "adamw",
    precision: Precision | str | torch.dtype | None = None,
    search: Search | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Plan for devices that are not here: no process group, no GPU, no weights.

    Args:
        model: real, fake or on the meta device.
        batch: example of the *global* batch: tuple or dict of real, fake or meta tensors.
        cluster: a `Cluster`, a preset's name or a TOML file.
        axes: name and size of each mesh axis, outermost first; default: one axis over one innermost group.
        loss_fn: ``loss_fn(output, batch)`` for a model that does not return its loss.
        memory: budget per device, such as ``"70GiB"``; default: the device's memory less a tenth.
        optimizer: whose state the budget counts: adamw, adam, sgd, sgd-momentum, adagrad.
        precision: a `Precision`, or the dtype to compute in, such as ``"bf16"``; default: the model's own.
        search: limits and pins.
        progress: called with ``(phase, incumbent, bound)``.

    Raises:
        CaptureError, MissingRuleError, InfeasibleError: see there.
    """
    policy = Precision.resolve(precision)
    machine = Cluster.resolve(cluster)
    axes = axes or {"device": machine.group_sizes[0] if machine.group_sizes else 1}
    program = program_to_plan(model, batch, loss_fn=loss_fn, precision=policy, search=search, progress=progress)
    budget = default_memory(machine) if memory is None else memory
    return solve(
        program, axes, machine, memory=budget, optimizer=optimizer, search=search, progress=progress, factored=True
    )


def default_memory(machine: Cluster) -> float:
    """Bytes that a plan may use of a device if nobody says: nine tenths."""
    return 0.9 * machine.device.memory
