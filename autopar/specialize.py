"""`specialize`: from shapes and modes to a `Step`, in agreement with every other rank of the mesh."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate as TorchReplicate

from autopar._torch_compat import FakeTensorMode
from autopar.capture.state.hooks import without_hooks
from autopar.compiler import default_memory, program_of, rewrite, solve
from autopar.costs.budget import DefaultBudget
from autopar.costs.cluster import Cluster
from autopar.errors import InfeasibleError, PlanError
from autopar.ir.layout import Layout, Replicate, Split, TensorType, replicated
from autopar.ir.node_info import graph_info
from autopar.ir.ops.random import derive_seed, generator_digest
from autopar.ir.plan import Plan
from autopar.ir.precision import Precision
from autopar.ir.program import Program, draws
from autopar.ir.signature import binding
from autopar.ir.structure import same_graph
from autopar.passes import DETERMINISTIC_PASSES, PASSES, Pass, collector_paused
from autopar.rules.remembered import forget
from autopar.runtime.agreement.same_program import collective_order, require_same_program
from autopar.runtime.compiled.executable import Executables
from autopar.runtime.devices import reserve_of_device
from autopar.runtime.dtensor import Placements, cuts_of, from_placements
from autopar.runtime.mesh import MeshContext, with_axes
from autopar.runtime.observer import CAPTURE, REWRITE, SEARCH, Observer
from autopar.runtime.state.parameters import plain_parameters
from autopar.runtime.step.build import build_step
from autopar.runtime.step.step import Step
from autopar.search.formulation.as_before import strategies_of
from autopar.search.formulation.local_axes import require_rows
from autopar.search.formulation.pins import Restrictions
from autopar.search.microbatch.split import microbatch_program
from autopar.search.options import OFFLOAD, OVERLAP, RECOMPUTE, SHARES, STAGE_AXIS, Search
from autopar.search.pipeline.space import samples, with_count
from autopar.sharding.dims import analyze


@dataclass(frozen=True)
class CompileOptions:
    """What the user asked for.

    Attributes:
        cluster: the devices.
        memory: bytes per device; None for no limit.
        optimizer: whose state the memory counts.
        search: limits and pins.
        plan: to be used instead of searching.
        loss_fn: for models that do not return their loss.
        inputs: ``global`` or ``local``.
        deterministic: random numbers are those of one device.
        loss: which scalar of the output is the loss.
        precision: policy of the parameters' and the computation's dtypes; None: the model's own.
        check: a plan is compared with the eager model before its first step.
        compiler: makes what runs in the place of local graphs; None: they run as they are.
        fused: it fuses kernels, and costs are counted so.
        observer: is told what happens before a first step.
    """

    cluster: Cluster
    memory: float | None
    optimizer: str
    search: Search
    plan: Plan | None
    loss_fn: Any
    inputs: str
    deterministic: bool = False
    loss: Any = None
    precision: Precision | None = None
    check: bool = False
    compiler: Executables[Any] | None = None
    fused: bool = False
    observer: Observer = field(default_factory=Observer)

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes that rewrite the graph."""
        return DETERMINISTIC_PASSES if self.deterministic else PASSES


@dataclass(frozen=True)
class Request:
    """What a call looks like.

    Attributes:
        skeleton: of the arguments, with their floats.
        shapes: global shape and dtype of each batch tensor, and after them of each float.
        layouts: of batch tensors that are DTensors already, as torch's placements.
        rows: layouts of batch tensors of which each rank passes its own rows, by index.
        differentiable: batch tensors that require a gradient.
        split: batch tensors of which each of several workers has its own rows.
    """

    skeleton: binding.Arguments
    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    layouts: Mapping[int, Placements]
    rows: Mapping[int, Layout] = field(default_factory=dict)
    differentiable: frozenset[int] = frozenset()
    split: tuple[int, ...] = ()


@dataclass(frozen=True)
class Specialization:
    """A step, and the program and plan that it was built from.

    Attributes:
        program: as captured.
        part: the program of one microbatch, which the plan is for; the same as ``program`` where there is one.
        plan: of the part.
        step: what runs.
        seed: of the step's random numbers, the same on every rank; None where it draws from the default generator, or
            not at all.
        offloaded_states: parameters whose optimizer state is offloaded between the optimizer's steps.
        context: this rank's mesh context on the plan's axes: those of the mesh, or finer ones, where stages take a
            factor of one.
    """

    program: Program
    part: Program
    plan: Plan
    step: Step
    context: MeshContext
    seed: int | None = None
    offloaded_states: frozenset[str] = frozenset()

    @property
    def written(self) -> list[str]:
        """Parameters that the model itself writes."""
        return [o.name for o in self.program.outputs if o.kind == "parameter"]


def specialize(
    model: nn.Module,
    request: Request,
    options: CompileOptions,
    context: MeshContext,
    *,
    placements: Mapping[str, Placements] | None,
    weights: str = "",
    known: Sequence[Specialization] = (),
    before: Specialization | None = None,
    unread: frozenset[str] = frozenset(),
) -> Specialization:
    """Capture, plan, rewrite, bind and cut; every rank calls it with a batch of the same global shapes.

    Args:
        model: with DTensor parameters, or plain ones where there is no mesh.
        request: the call.
        options: what the user asked for.
        context: this rank's mesh context.
        placements: of the parameters, which stay; None: they are decided now.
        weights: a checksum that must be the same on every rank.
        known: for the same shapes and modes and another state of the model; one whose graph is the same goes on.
        before: of another shape, whose operators are split alike where that is possible: a call waits for this plan.
            None: all is searched.
        unread: parameters that no graph has read so far, whose layouts may become others.

    Raises:
        RankError: the ranks disagree, or one does not answer.
    """
    # Workers that train apart begin together: with the same parameters, and under one plan, so that the ranks at one
    # place in each hold the same shards. Later each is by itself.
    agreed = context.everyone if placements is None else context
    # Each phase that may fail on one rank alone ends in a meeting of all ranks, so that none waits for a failed one.
    observer = options.observer
    with observer.phase(CAPTURE):
        program = agreed.together(lambda: _capture(model, request, options, context), "capturing the model")
        require_same_program(program, request.shapes, weights, agreed)
        require_rows(program, request.split)
    # Another Python state of the model need not mean another graph.
    for other in known:
        if same_graph(program, other.program):
            return replace(other, program=replace(program, cuts=other.program.cuts))
    if placements is not None:
        program = _cut_as_laid_out(program, placements, options, context)
    # As plain data: a broadcast pickles it, which depends on classes otherwise.
    with observer.phase(SEARCH):
        data, claimed = agreed.decide(
            lambda: _as_data(plan_again(program, request, options, context, placements, before, unread)),
            "the plan, which rank 0 searches",
        )
    plan = Plan.from_dict(data)
    plan = replace(plan, certificate=replace(plan.certificate, claimed=claimed))
    if context.workers is not None and not plan.workers:
        plan = plan.of_workers(((context.workers.axis, context.workers.count),), context.workers.role)
    with observer.phase(REWRITE):
        context = with_axes(context, plan.axes)
        local, step, order = agreed.together(lambda: _build(program, plan, options, context), "rewriting the graph")
        agreed.agree(order, "the order of collectives", "use the same versions of autopar and torch on every rank")
    part = microbatch_program(program, plan.microbatches, deterministic=options.deterministic)
    offloaded = graph_info(local.graph).offloaded_states
    forget()  # another shape has other operators
    return Specialization(program, part, plan, step, context, _seed(step.program, options, context), offloaded)


def _cut_as_laid_out(
    program: Program, placements: Mapping[str, Placements], options: CompileOptions, context: MeshContext
) -> Program:
    """The program in whose factors the layouts of parameters can be expressed, as far as its operators allow it.

    Training may have cut a dim that evaluation has whole: of a head that computes logits of some words at a time, say.
    """
    named = {i.name: n for n, i in zip(program.placeholders, program.inputs, strict=True) if i.kind == "parameter"}
    cuts = {name: cuts_of(node.meta["val"].shape, placements[name]) for name, node in named.items()}
    cuts = {name: dims for name, dims in cuts.items() if any(len(sizes) > 1 for sizes in dims)}
    if cuts:  # few layouts are of a factor
        dims = analyze(program)
        present = {n: _present_layout(dims.type_of(named[n]), placements[n], options.search, context) for n in cuts}
        cuts = {name: sizes for name, sizes in cuts.items() if present[name] is None}
    return replace(program, cuts=cuts) if cuts else program


def _as_data(plan: Plan) -> tuple[dict[str, Any], bool]:
    """A plan, and whether its certificate is a file's claim."""
    return plan.to_dict(), plan.certificate.claimed


def _build(program: Program, plan: Plan, options: CompileOptions, context: MeshContext) -> tuple[Program, Step, str]:
    """The rewritten program, this rank's step of it, and a hash of its collectives."""
    with collector_paused():
        local = rewrite(program, plan, passes=options.passes)
    if plan.pipeline is not None and options.deterministic and any(draws(n) for n in local.graph.graph.nodes):
        raise InfeasibleError(
            "random operators of one stage would not advance the generators of the other stages: leave "
            "deterministic=True out, or the pipeline"
        )
    # Of the graph before it is bound: bound graphs name process groups, which have other names on other ranks.
    with collector_paused():
        step = build_step(local, plan, context, options.compiler)
    return local, step, collective_order(local)


def _seed(local: Program, options: CompileOptions, context: MeshContext) -> int | None:
    """Rank 0's generator gives the seed of what each rank draws by itself; what all draw together needs no seed.

    Raises:
        RankError: the ranks draw together from generators in different states.
    """
    if not any(draws(n) for n in local.graph.graph.nodes):
        return None
    if not options.deterministic:
        seed = context.decide(
            lambda: generator_digest(context.device), "the seed of random numbers, which rank 0 gives"
        )
        # Workers have different samples, and draw different numbers for them.
        return seed if context.workers is None else derive_seed(seed, context.workers.index)
    context.agree(
        generator_digest(context.device),
        "the random generator's state (deterministic=True)",
        "call torch.manual_seed with the same seed on every rank, and draw nothing on some ranks only",
    )
    return None


def default_budget(context: MeshContext, machine: Cluster) -> DefaultBudget:
    """Bytes that a device may use by default; of several kinds, that with the least memory by the cluster's figures."""
    if machine.groups:
        return default_memory(machine, dict(context.axes))
    world = dist.get_world_size() if context.mesh is not None else 1
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return DefaultBudget(reserve_of_device(context.device, dict(context.axes), processes))


def _capture(model: nn.Module, request: Request, options: CompileOptions, context: MeshContext) -> Program:
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [
            torch.empty(shape, dtype=dtype, device=context.device, requires_grad=i in request.differentiable)
            for i, (shape, dtype) in enumerate(request.shapes)
        ]
    batch = request.skeleton.fill(fakes)
    # The model's own hooks are called by the parallel module, around the graph; with loss_fn they are inside of it.
    hooks = nullcontext() if options.loss_fn is not None else without_hooks(model)
    # Graphs are full of cycles that stay alive, as in the search.
    with plain_parameters(model, context.device), hooks, collector_paused():
        return captured_under(model, batch, options)


def captured_under(model: nn.Module, batch: Any, options: CompileOptions) -> Program:
    """The canonical program of a model that has plain parameters."""
    return program_of(
        model, batch, loss_fn=options.loss_fn, loss=options.loss, precision=options.precision, fused=options.fused
    )


def plan_again(
    program: Program,
    request: Request,
    options: CompileOptions,
    context: MeshContext,
    placements: Mapping[str, Placements] | None,
    before: Specialization | None = None,
    unread: frozenset[str] = frozenset(),
) -> Plan:
    """A plan for a request: the given one if it fits, else a search, under the layouts that parameters have.

    Of those that no graph has read so far (``unread``) it decides the layouts, where theirs cannot be expressed.

    Raises:
        PlanError: the layout of a parameter cannot be expressed in this program's factors.
    """
    given = options.plan
    if given is not None and (given.fingerprint == program.fingerprint or (placements is None and program.training)):
        return given  # a wrong fingerprint is reported by the rewriting
    search = _for_further_shape(options.search, program) if placements else options.search
    part = microbatch_program(program, search.microbatches or 1, deterministic=options.deterministic)
    dims = analyze(part)
    types = {(i.kind, i.name): dims.type_of(n) for n, i in zip(part.placeholders, part.inputs, strict=True)}
    not_read = {i.name for n, i in zip(part.placeholders, part.inputs, strict=True) if not n.users}
    fixed: dict[tuple[str, str], Layout] = {}
    for (kind, name), type_ in types.items():
        if kind != "parameter":
            continue
        if placements is not None:
            present = _present_layout(type_, placements[name], search, context)
            if present is None and name in not_read:
                # Of an adapter that is switched off, say: its factors are not known here, and no layout of it counts.
                present = replicated(len(context.axes))
            if present is None and name not in unread:
                raise PlanError(
                    f"parameter {name!r} has placements {placements[name]}, which this shape of the batch or mode "
                    f"cannot express (its dims are {type_} here); call parallelize with the batch that decides, or pin "
                    "the parameter"
                )
            if present is not None:
                fixed[kind, name] = present
        elif given is not None:
            # A plan for training, and the first call evaluates: parameters are laid out as the plan says all the same.
            fixed[kind, name] = _planned(given, name)
    for index, given_layout in request.layouts.items():
        # Not an error if it cannot be expressed: the call redistributes the tensor.
        known = from_placements(types["batch", str(index)], given_layout, context.sizes)
        if known is not None:
            fixed["batch", str(index)] = known
    fixed.update({("batch", str(index)): layout for index, layout in request.rows.items()})
    if placements is not None and before is not None:
        found = _like_before(program, part, before, fixed, search, options, context)
        if found is not None:
            return found
    return _search(program, fixed, search, options, context, first=placements is None)


def _like_before(
    program: Program,
    part: Program,
    before: Specialization,
    fixed: dict[tuple[str, str], Layout],
    search: Search,
    options: CompileOptions,
    context: MeshContext,
) -> Plan | None:
    """The best plan whose operators are split as for an earlier shape; None where they cannot, or nothing fits."""
    if before.plan.pipeline is not None or program.training != before.program.training or search.recipe == "random":
        return None
    alike = strategies_of(before.plan, before.part, part, tie=search.tie_layers)
    if not alike:
        return None
    # A second search, with parameters padded, would be for other layouts of theirs.
    search = replace(search, padding=False)
    try:
        found = _search(program, fixed, search, options, context, first=False, alike=alike)
    except InfeasibleError:
        return None
    space = f"operators split as for an earlier shape; {found.certificate.space}"
    return replace(found, certificate=replace(found.certificate, space=space))


def _present_layout(type_: TensorType, present: Placements, search: Search, context: MeshContext) -> Layout | None:
    """The layout that a parameter has, in the factors of another shape or mode; None where they cannot express it."""
    # On the axis of the stages a parameter of one stage is no shard: the search gets the same stages by pins.
    is_stage_axis = [axis == search.pins.get(STAGE_AXIS) for axis, _ in context.axes]
    own = [TorchReplicate() if is_stage else p for p, is_stage in zip(present, is_stage_axis, strict=True)]
    return from_placements(type_, own, context.sizes, uneven=True)


def _for_further_shape(search: Search, program: Program) -> Search:
    """The search for a further shape of the batch.

    Pinned layouts have no more to decide once parameters are laid out; neither one of the batch nor a number of
    microbatches must stop a short last batch.
    """
    pins = {name: value for name, value in search.pins.items() if name in (RECOMPUTE, OFFLOAD, OVERLAP)}
    most = search.microbatches or 1
    rows = samples(program) if program.training else 1
    count = max(n for n in range(1, most + 1) if rows % n == 0)
    return replace(search, pins={**pins, **with_count(search.pins, count)})


def _planned(plan: Plan, name: str) -> Layout:
    if name not in plan.parameters:
        raise PlanError(f"the plan has no parameter {name!r}, which the model has; plan again for this model")
    return plan.parameters[name]


def _search(
    program: Program,
    layouts: dict[tuple[str, str], Layout],
    search: Search,
    options: CompileOptions,
    context: MeshContext,
    *,
    first: bool,
    alike: Mapping[str, Sequence[frozenset[str] | None]] = {},
) -> Plan:
    local = options.inputs == "local"
    # Stages may take a factor of an axis only while nothing is laid out on the axes of the mesh: no parameter, and no
    # rows of which each rank passes its part.
    factored = first and not local and not layouts and context.spans_world

    def planned(fixed: Mapping[tuple[str, str], Layout]) -> Plan:
        limits = Restrictions(layouts=fixed, data_axes_only=local, strategies=alike)
        return solve(
            program, dict(context.axes), options.cluster, memory=options.memory, optimizer=options.optimizer,
            search=search, restrictions=limits, deterministic=options.deterministic, factored=factored,
            progress=options.observer.searching,
        )  # fmt: skip

    try:
        plan = planned(layouts)
    except InfeasibleError:
        if first or not (search.recipe or search.roles):
            raise
        # Nor must a recipe, whose batch has to divide, or shares, which have roles.
        pins = {name: value for name, value in search.pins.items() if name != SHARES}
        search = replace(search, recipe=None, roles={}, pins=pins)
        plan = planned(layouts)
    if not local or not first:
        return plan
    # A rank passes the same rows of all tensors, whatever the search chose: planned again with one layout for all.
    same = {("batch", name): layout for name, layout in same_rows(program, plan).items()}
    if all(plan.batch[name] == layout for (_, name), layout in same.items()):
        return plan
    return planned({**layouts, **same})


def same_rows(program: Program, plan: Plan) -> dict[str, Layout]:
    """Layouts that give each rank the same rows of every batch tensor: those of the tensor split the most."""
    layout, rows = data_layout(program, plan)
    described = zip(program.placeholders, program.inputs, strict=True)
    values = {i.name: n.meta["val"] for n, i in described if i.kind == "batch"}
    whole = (Replicate(),) * len(layout)
    return {name: layout if v.ndim and v.shape[0] == rows else whole for name, v in values.items()}


def data_layout(program: Program, plan: Plan) -> tuple[Layout, int]:
    """How the rows of a batch are split, and how many there are."""
    # Of the tensor that is split the most: others may be whole, such as position ids of one row.
    best: tuple[Layout, int] = ((Replicate(),) * len(plan.axes), 1)
    most = 0
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        value = node.meta["val"]
        if spec.kind != "batch" or value.ndim == 0:
            continue
        layout = tuple(p if p == Split(0, 0) else Replicate() for p in plan.batch[spec.name])
        parts = data_parts(layout, plan.axis_sizes)
        if parts > most:
            best, most = (layout, value.shape[0]), parts
    return best


def data_parts(layout: Layout, sizes: tuple[int, ...]) -> int:
    """Into how many parts a layout splits the rows."""
    parts = 1
    for placement, n in zip(layout, sizes, strict=True):
        parts *= n if placement == Split(0, 0) else 1
    return parts
