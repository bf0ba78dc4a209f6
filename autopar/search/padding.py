"""`best_padded`: the plan of a program, with and without padding of dims that an axis does not divide."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from autopar.errors import InfeasibleError
from autopar.ir.layout import Factor, Split, TensorType
from autopar.ir.plan import INTERRUPTED, TIME_LIMIT, Certificate, Plan
from autopar.ir.program import Program
from autopar.passes.copy_for_backward import with_copies
from autopar.passes.pad_dims import attention_heads, pad
from autopar.search.budget.budget_problem import BudgetProblem
from autopar.search.budget.cutoff import Cutoff, PrunedError
from autopar.search.budget.pareto import Frontier
from autopar.search.budget.repair import costed, repaired
from autopar.search.find import Begun, begin, frontier_of, require_splits
from autopar.search.finished_plan import Shapes, finished_plan, joint_certificate
from autopar.search.formulation.axis_roles import DATA, SEQUENCE, TENSOR, by_roles
from autopar.search.formulation.pins import Pinned, Restrictions, complete, pin_modules, read_pins
from autopar.search.formulation.recipes import roles_of
from autopar.search.formulation.secondary import secondary_copies
from autopar.search.options import Job
from autopar.search.predict import predict
from autopar.search.random_plan import random_plan
from autopar.search.rounds import EXACT_AXES
from autopar.sharding.dims import Dims, analyze
from autopar.sharding.layer_classes import LayerClasses, layer_classes


def best_padded(program: Program, part: Program, job: Job) -> Plan:
    """The best plan that is found for a part of a program, as a plan of that program.

    Where parameters have dims that an axis does not divide, there are two searches: without padding, and with it. Each
    has half of the time limit. That whose first plan is faster goes on; the other one does where it may find a faster
    plan yet.

    Args:
        program: of the whole batch.
        part: of one microbatch; the program itself where there is only one.
        job: what is searched for.

    Raises:
        InfeasibleError: nothing fits; the error of the search that needs the least.
    """
    begun: list[tuple[Begun, Shapes]] = []
    pruned: list[float] = []
    errors: list[InfeasibleError] = []
    options = _options(part, job)
    for shapes, own in options:
        padded = _padded(part, shapes, own)
        dims = analyze(padded)
        fastest = min((each.plan for each, _ in begun), key=_seconds, default=None)
        try:
            # A batch of another shape is planned for parameters that have their layouts already: it has to make do with
            # the mesh. And roles say more clearly what is wrong.
            if None in roles_of(job.search.recipe, job.axes, job.search.roles) and not job.restrictions.layouts:
                require_splits(dims, job.axes)
            begun.append((_begin(padded, dims, replace(own, cutoff=_cutoff(fastest, job))), shapes))
        except InfeasibleError as e:
            errors.append(e)
            pruned += [e.bound] if isinstance(e, PrunedError) else []
    found: list[tuple[Plan, Shapes]] = []
    for each, shapes in sorted(begun, key=lambda option: _seconds(option[0].plan)):
        fastest = min((plan for plan, _ in found), key=_seconds, default=None)
        try:
            found.append((each.rest(None if each.is_beaten(fastest) else _cutoff(fastest, job)), shapes))
        except PrunedError as e:
            errors.append(e)
            pruned.append(e.bound)
    if not found:
        raise min(errors, key=lambda e: (e.needed or math.inf, isinstance(e, PrunedError) and e.in_any_memory))
    best, shapes = min(found, key=lambda option: _seconds(option[0]))
    certificate = best.certificate
    if len(options) > 1:  # a random plan has one
        certificate = _of_all_options(certificate, [plan.certificate for plan, _ in found], pruned)
    return finished_plan(best, program, part, shapes, certificate)


def seconds_by_memory(program: Program, part: Program, job: Job, state_share: float) -> list[Frontier]:
    """Of the problem with each way to pad, of which a plan of a part of a program solves one, seconds by memory.

    Args:
        program: of the whole batch.
        part: of one microbatch; the program itself where there is only one.
        job: what is searched for.
        state_share: of parameters and optimizer states, what counts as memory.
    """
    found = []
    for shapes, own in _options(part, job):
        padded = _padded(part, shapes, own)
        dims = analyze(padded)
        classes, limited = _limited(padded, dims, own)
        found.append(frontier_of(padded, dims, limited, classes, state_share))
    return found


def _options(part: Program, job: Job) -> list[tuple[Shapes, Job]]:
    """Ways to pad, and what is searched for with each."""
    axes, search = job.axes, job.search
    roles, dims = roles_of(search.recipe, axes, search.roles), analyze(part)
    limits = read_pins(part, dims, search.layouts, axes, job.restrictions)
    helps = any(role != DATA for role in roles)  # parameters need not divide to be replicated
    # Elsewhere the batch is there to be split, and weights with padded heads are gathered from what is kept.
    tensor = search.padding and any(role in (TENSOR, SEQUENCE) for role in roles)
    options = paddings(part, dims, axes, limits.layouts, search=search.padding and helps, with_heads=tensor)
    if search.recipe == "random":
        options = (options[search.seed % len(options)],)
    search = replace(search, time_limit=search.time_limit / len(options))
    return [(shapes, replace(job, search=search, restrictions=limits)) for shapes in options]


def _padded(part: Program, shapes: Shapes, job: Job) -> Program:
    padded = pad(part, shapes)
    return with_copies(padded) if job.search.secondary else padded


def _seconds(plan: Plan) -> float:
    return plan.certificate.objective


def _cutoff(best: Plan | None, job: Job) -> Cutoff:
    """Of the best plan of another search; what was cut off cannot be checked, so that a checked one has none."""
    return job.cutoff if best is None or job.search.check else Cutoff.of(best)


def _of_all_options(best: Certificate, found: Sequence[Certificate], pruned: Sequence[float]) -> Certificate:
    """The best plan's certificate, about plans with and without padding."""
    space = f"parameters as they are, or all padded whose dims an axis does not divide; {best.space}"
    methods = [certificate.method for certificate in found]
    method = next((m for m in (INTERRUPTED, TIME_LIMIT) if m in methods), best.method)
    return joint_certificate(best, found, pruned, space, method)


def _begin(program: Program, dims: Dims, job: Job) -> Begun:
    """The first plan, or a random one, of a program whose dims are decided."""
    if job.search.recipe == "random":
        classes = layer_classes(program, dims)
        limits = pin_modules(program, dims, classes, job.search.layouts, job.axes, job.restrictions)
        drawn = _random(program, dims, job, limits)
        drawn = replace(drawn, quantized=job.quantized, secondary=job.search.secondary)
        return Begun.of(predict(program, dims, drawn))
    classes, job = _limited(program, dims, job)
    try:
        return begin(program, dims, job, classes)
    except InfeasibleError as e:
        if job.stages is not None:  # pipelines are many, of which some fit sooner
            raise
        error = e
    # Plans that are found axis by axis, or from three captured layers, have no minimum-memory plan.
    exact = program.repeat is None and len(job.axes) <= EXACT_AXES
    found = repaired(BudgetProblem.of(program, dims, classes, job), error, from_minimum=exact)
    return Begun.of(costed(predict(program, dims, found, classes)))


def _limited(program: Program, dims: Dims, job: Job) -> tuple[LayerClasses, Job]:
    """Which nodes share a decision, and the job with what roles and pins leave open."""
    axes, search = job.axes, job.search
    classes = layer_classes(program, dims, tie=search.tie_layers)
    limits = pin_modules(program, dims, classes, search.layouts, axes, job.restrictions)
    limits = by_roles(program, dims, classes, axes, roles_of(search.recipe, axes, search.roles), limits)
    return classes, replace(job, restrictions=secondary_copies(dims, classes, axes, search.secondary, limits))


def _random(program: Program, dims: Dims, job: Job, limits: Restrictions) -> Plan:
    search, machine = job.search, job.cluster
    fixed = {key: complete(key[1], layout) for key, layout in limits.layouts.items()}
    recompute, offload = search.recompute == "search", search.offload and machine.device.host_bandwidth > 0
    found = random_plan(
        program, dims, job.axes, machine, search.seed, fixed, job.optimizer, recompute, search.regions, offload
    )
    return replace(found, expert_load=search.load)


MOST, MOST_HEADS = 1.25, 1.5
"""A dim gets at most this many times longer, unless a layout that is decided already needs more; and heads do."""


def paddings(
    program: Program,
    dims: Dims,
    axes: Mapping[str, int],
    layouts: Mapping[tuple[str, str], Pinned],
    *,
    search: bool = True,
    with_heads: bool = False,
) -> tuple[Shapes, ...]:
    """Padded shapes of parameters, each a choice to search under; the first pads only what it must.

    Args:
        program: canonical program.
        dims: its dimension analysis.
        axes: name and size of each mesh axis.
        layouts: decided already, by kind and name; an uneven split of a parameter is padded.
        search: whether there is anything to choose.
        with_heads: whether the last choice has padded heads of attention, too.
    """
    sizes = tuple(axes.values())
    types = {
        i.name: dims.type_of(n)
        for n, i in zip(program.placeholders, program.inputs, strict=True)
        if i.kind == "parameter"
    }
    needed: dict[int, int] = {}  # padded size by id: factors of one name and size may be different ones
    for name, type_ in types.items():
        for placement, n in zip(layouts.get(("parameter", name), ()), sizes, strict=False):
            factors = type_.dims[placement.dim] if isinstance(placement, Split) else ()
            if len(factors) == 1 and factors[0].size % n:
                needed[id(factors[0])] = -(-factors[0].size // n) * n
    whole = {id(dim[0]): dim[0] for type_ in types.values() for dim in type_.dims if len(dim) == 1}
    useful = {key: padded_size(factor, sizes) for key, factor in whole.items()} | needed
    found = [padded_shapes(types, needed)]
    if search and any(useful[key] != whole[key].size for key in whole.keys() - needed.keys()):
        found.append(padded_shapes(types, useful))
    if with_heads:
        heads = {key: padded_size(f, sizes, MOST_HEADS, 0) for key, f in attention_heads(program, dims).items()}
        shapes = padded_shapes(types, {**heads, **useful}, heads)
        found += [shapes] * (shapes not in found)
    return tuple(found)


def padded_size(factor: Factor, sizes: tuple[int, ...], most: float = MOST, least: float = 1) -> int:
    """The next size that the last axis which does not divide a factor divides, and all that do; or its own.

    Args:
        factor: what may be padded.
        sizes: of the mesh axes.
        most: at most this many times longer.
        least: more elements than this for each device.
    """
    for n in reversed(sizes):
        if factor.size % n and factor.size > least * n:
            unit = math.lcm(n, *(m for m in sizes if factor.size % m == 0))
            longer = -(-factor.size // unit) * unit
            if longer <= most * factor.size:
                return longer
    return factor.size


def padded_shapes(
    types: Mapping[str, TensorType], sizes: Mapping[int, int], heads: Collection[int] = ()
) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters that have factors with a padded size.

    Args:
        types: of the parameters, by name.
        sizes: padded sizes, by the `id` of factors.
        heads: the `id` of those that may be one of several of a dim.
    """

    def padded(dim: Sequence[Factor]) -> int:
        own = [id(f) for f in dim if len(dim) == 1 or id(f) in heads]
        longer = sizes if len(own) == 1 else {}
        return math.prod(longer.get(id(f), f.size) if id(f) in own else f.size for f in dim)

    shapes = {name: tuple(map(padded, type_.dims)) for name, type_ in types.items()}
    return {name: shape for name, shape in shapes.items() if shape != types[name].shape}
