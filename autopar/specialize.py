"""`specialize`: from shapes and modes to a `Step`, in agreement with every other rank of the mesh."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate as TorchReplicate

from autopar._torch_compat import FakeTensorMode
from autopar.capture.state.hooks import without_hooks
from autopar.compiler import program_of, rewrite, solve
from autopar.costs.cluster import Cluster
from autopar.errors import InfeasibleError, PlanError, RankError
from autopar.ir.layout import Layout, Replicate, Split
from autopar.ir.node_info import graph_info, info
from autopar.ir.ops.collectives import GROUP_ARGUMENT
from autopar.ir.ops.random import generator_digest
from autopar.ir.plan import Plan
from autopar.ir.precision import Precision
from autopar.ir.program import Program, draws
from autopar.ir.signature import binding
from autopar.ir.structure import same_graph
from autopar.passes import DETERMINISTIC_PASSES, PASSES, Pass
from autopar.runtime.dtensor import Placements, from_placements
from autopar.runtime.mesh import MeshContext, refined
from autopar.runtime.state.parameters import plain_parameters
from autopar.runtime.step.bind import bind
from autopar.runtime.step.microbatch_step import MicrobatchStep, cut_microbatches, whole_type
from autopar.runtime.step.partition import cut
from autopar.runtime.step.pipeline_step import PipelineStep, cut_stages, inside, line_of
from autopar.runtime.step.step import BoundaryLayouts, Step
from autopar.search.formulation.pins import Restrictions
from autopar.search.microbatch.split import microbatch_program
from autopar.search.options import OFFLOAD, RECOMPUTE, STAGE_AXIS, Search
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

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes that rewrite the graph."""
        return DETERMINISTIC_PASSES if self.deterministic else PASSES


@dataclass(frozen=True)
class Request:
    """What a call looks like.

    Attributes:
        skeleton: of the arguments, with their floats.
        shapes: global shape and dtype of each batch tensor, and behind them of each float.
        layouts: of batch tensors that are DTensors already, as torch's placements.
        rows: layouts of batch tensors of which each rank passes its own rows, by index.
        differentiable: batch tensors that require a gradient.
    """

    skeleton: binding.Arguments
    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    layouts: Mapping[int, Placements]
    rows: Mapping[int, Layout] = field(default_factory=dict)
    differentiable: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Specialization:
    """A step and where it comes from.

    Attributes:
        program: as captured.
        part: the program of one microbatch, which is planned for; the same where there is one only.
        plan: of the part.
        step: what runs.
        seed: of the step's random numbers, the same on every rank; None where it draws from the default generator, or
            not at all.
        states_away: parameters whose optimizer state is offloaded between the optimizer's steps.
        place: this rank's mesh context on the plan's axes: those of the mesh, or finer ones, where stages take a
            factor of one.
    """

    program: Program
    part: Program
    plan: Plan
    step: Step
    place: MeshContext
    seed: int | None = None
    states_away: frozenset[str] = frozenset()

    @property
    def written(self) -> list[str]:
        """Parameters that the model itself writes."""
        return [o.name for o in self.program.outputs if o.kind == "parameter"]


def specialize(
    model: nn.Module,
    request: Request,
    options: CompileOptions,
    place: MeshContext,
    *,
    placements: Mapping[str, Placements] | None,
    weights: str = "",
    known: Sequence[Specialization] = (),
) -> Specialization:
    """Capture, plan, rewrite, bind and cut; every rank calls it with a batch of the same global shapes.

    Args:
        model: with DTensor parameters, or plain ones where there is no mesh.
        request: the call.
        options: what the user asked for.
        place: this rank's mesh context.
        placements: of the parameters, which stay; None: they are decided now.
        weights: a checksum that must be the same on every rank.
        known: for the same shapes and modes and another state of the model; one whose graph is the same goes on.

    Raises:
        RankError: the ranks disagree, or one does not answer.
    """
    program = place.together(lambda: _capture(model, request, options, place), "capturing the model")
    _compare(program, request, weights, place)
    for other in known:
        if same_graph(program, other.program):
            return replace(other, program=program)
    plan = place.decide(
        lambda: plan_again(program, request, options, place, placements).to_dict(), "the plan, which rank 0 searches"
    )
    chosen = Plan.from_dict(plan)
    place = refined(place, chosen.axes)

    def build() -> tuple[Step, str, frozenset[str]]:
        local = rewrite(program, chosen, passes=options.passes)
        away = graph_info(local.graph).offloaded_states
        names = {name: name for name, _ in place.axes}
        coordinates = dict(zip(names, place.coordinates, strict=True))
        bound = replace(local, graph=bind(local.graph, place.groups or names, coordinates))
        types = _types(local, chosen)
        if chosen.pipeline is not None:
            if options.deterministic and any(draws(n) for n in local.graph.graph.nodes):
                raise InfeasibleError(
                    "random operators of one stage would leave the generators of the others behind: leave "
                    "deterministic=True out, or the pipeline"
                )
            line, within = line_of(chosen, place), inside(place, chosen)
            parts, cutting = cut_stages(bound, chosen, line)
            inner = _types(local, chosen.inner)
            step = PipelineStep(bound, parts, types, place, cutting=cutting, line=line, within=within, inner=inner)
            return step, collective_order(local), away
        if local.microbatches == 1:
            return Step(local, cut(bound), types, place), collective_order(local), away
        return MicrobatchStep(local, cut_microbatches(bound), types, place), collective_order(local), away

    step, order, away = place.together(build, "rewriting the graph")
    place.agree(order, "the order of collectives", "use the same versions of autopar and torch on every rank")
    part = microbatch_program(program, chosen.microbatches, deterministic=options.deterministic)
    return Specialization(program, part, chosen, step, place, _seed(step.program, options, place), away)


def _seed(local: Program, options: CompileOptions, place: MeshContext) -> int | None:
    """Rank 0's generator gives the seed of what each rank draws by itself; what all draw together needs no seed.

    Raises:
        RankError: the ranks draw together from generators in different states.
    """
    if not any(draws(n) for n in local.graph.graph.nodes):
        return None
    if not options.deterministic:
        return place.decide(lambda: generator_digest(place.device), "the seed of random numbers, which rank 0 gives")
    place.agree(
        generator_digest(place.device),
        "the random generator's state (deterministic=True)",
        "call torch.manual_seed with the same seed on every rank, and draw nothing on some ranks only",
    )
    return None


def collective_order(program: Program) -> str:
    """A hash of which collectives run, on which axes and shapes, in order."""
    digest = hashlib.sha256()
    for node in program.graph.graph.nodes:
        if node.target in GROUP_ARGUMENT:
            value = node.meta.get("val")
            shape = (tuple(value.shape), str(value.dtype)) if isinstance(value, torch.Tensor) else ()
            digest.update(f"{node.target} {node.args[GROUP_ARGUMENT[node.target]]} {shape}\n".encode())
    return digest.hexdigest()[:16]


def _capture(model: nn.Module, request: Request, options: CompileOptions, place: MeshContext) -> Program:
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [
            torch.empty(shape, dtype=dtype, device=place.device, requires_grad=i in request.differentiable)
            for i, (shape, dtype) in enumerate(request.shapes)
        ]
    batch = request.skeleton.fill(fakes)
    own = nullcontext() if options.loss_fn is not None else without_hooks(model)  # else the module calls them
    with plain_parameters(model, place.device), own:
        return captured_under(model, batch, options)


def captured_under(model: nn.Module, batch: Any, options: CompileOptions) -> Program:
    """The canonical program of a model that has plain parameters."""
    return program_of(model, batch, loss_fn=options.loss_fn, loss=options.loss, precision=options.precision)


def _compare(program: Program, request: Request, weights: str, place: MeshContext) -> None:
    """What must be the same on every rank before it is worth planning."""
    shapes = str([(list(shape), str(dtype)) for shape, dtype in request.shapes])
    everyone = place.gather(
        (shapes, program.fingerprint, weights), "the shapes of the batch (do all ranks see a new one?)"
    )
    remedies = (
        ("the global shape of the batch", "pass tensors of equal shapes on every rank (drop_last=True for a sampler)"),
        ("the captured model", "build the same model, in the same mode, on every rank"),
        ("the parameters' values", "call torch.manual_seed with the same seed on every rank, or load the same weights"),
    )
    for i, (what, remedy) in enumerate(remedies):
        for rank, values in enumerate(everyone):
            if values[i] != everyone[0][i]:
                raise RankError(f"{what} differs: rank {rank} has {values[i]}, rank 0 has {everyone[0][i]}; {remedy}")


def compare_contents(digest: str, part: int, place: MeshContext) -> None:
    """Ranks that take the same part of a batch must pass the same.

    Raises:
        RankError: two do not.
    """
    first: dict[int, tuple[int, str]] = {}
    for rank, (found, own) in enumerate(place.gather((digest, part), "the batch's contents")):
        other, expected = first.setdefault(own, (rank, found))
        if found != expected:
            raise RankError(
                f"the batch's contents differ: rank {rank} has {found}, rank {other} has {expected}; pass the same "
                'batch on every rank, or inputs="local" for each rank\'s own part: a sampler takes model.data_rank '
                "and model.data_world_size"
            )


def plan_again(
    program: Program,
    request: Request,
    options: CompileOptions,
    place: MeshContext,
    placements: Mapping[str, Placements] | None,
) -> Plan:
    """A plan for a request: the given one if it fits, else a search, under the layouts that parameters have."""
    given = options.plan
    if given is not None and (given.fingerprint == program.fingerprint or (placements is None and program.training)):
        return given  # a wrong fingerprint is reported by the rewriting
    search = _later(options.search, program) if placements else options.search
    part = microbatch_program(program, search.microbatches or 1, deterministic=options.deterministic)
    dims = analyze(part)
    everywhere = [name == search.pins.get(STAGE_AXIS) for name, _ in place.axes]
    types = {(i.kind, i.name): dims.type_of(n) for n, i in zip(part.placeholders, part.inputs, strict=True)}
    layouts: dict[tuple[str, str], Layout] = {}
    for (kind, name), type_ in types.items():
        if kind != "parameter" or (placements is None and given is None):
            continue
        if placements is None and given is not None:
            layouts[kind, name] = _planned(given, name)
            continue
        assert placements is not None
        # On the axis of the stages it lies as the same stages say.
        own = [TorchReplicate() if e else p for p, e in zip(placements[name], everywhere, strict=True)]
        layout = from_placements(type_, own, place.sizes, uneven=True)
        if layout is None:
            raise PlanError(
                f"parameter {name!r} lies as {placements[name]}, which this shape of the batch or mode cannot express "
                f"(its dims are {type_} here); call parallelize with the batch that decides, or pin the parameter"
            )
        layouts[kind, name] = layout
    for index, lies in request.layouts.items():
        known = from_placements(types["batch", str(index)], lies, place.sizes)
        if known is not None:
            layouts["batch", str(index)] = known
    layouts.update({("batch", str(index)): layout for index, layout in request.rows.items()})
    return _search(program, layouts, search, options, place, first=placements is None)


def _later(search: Search, program: Program) -> Search:
    """The search for a further shape of the batch.

    Pinned layouts have done their work once parameters lie; neither one of the batch nor a number of microbatches must
    stop a short last batch.
    """
    kept = {name: value for name, value in search.pins.items() if name in (RECOMPUTE, OFFLOAD)}
    most = search.microbatches or 1
    rows = samples(program) if program.training else 1
    count = max(n for n in range(1, most + 1) if rows % n == 0)
    return replace(search, pins={**kept, **with_count(search.pins, count)})


def _planned(plan: Plan, name: str) -> Layout:
    if name not in plan.parameters:
        raise PlanError(f"the plan has no parameter {name!r}, which the model has; plan again for this model")
    return plan.parameters[name]


def _search(
    program: Program,
    layouts: dict[tuple[str, str], Layout],
    search: Search,
    options: CompileOptions,
    place: MeshContext,
    *,
    first: bool,
) -> Plan:
    local = options.inputs == "local"
    # What lies on the mesh already lies on its axes, and so do the rows of which each rank passes its part.
    factored = first and not local and not layouts and place.spans_world

    def planned(found: Mapping[tuple[str, str], Layout]) -> Plan:
        limits = Restrictions(layouts=found, data_axes_only=local)
        return solve(
            program, dict(place.axes), options.cluster, memory=options.memory, optimizer=options.optimizer,
            search=search, restrictions=limits, deterministic=options.deterministic, factored=factored,
        )  # fmt: skip

    try:
        plan = planned(layouts)
    except InfeasibleError:
        if first or not (search.recipe or search.roles):
            raise
        search = replace(search, recipe=None, roles={})  # nor must a recipe, whose batch has to divide
        plan = planned(layouts)
    if not local or not first:
        return plan
    alike = {("batch", name): layout for name, layout in same_rows(program, plan).items()}
    if all(plan.batch[name] == layout for (_, name), layout in alike.items()):
        return plan
    return planned({**layouts, **alike})


def same_rows(program: Program, plan: Plan) -> dict[str, Layout]:
    """Layouts that give each rank the same rows of every batch tensor: those of the tensor split the most."""
    lead, rows = data_layout(program, plan)
    described = zip(program.placeholders, program.inputs, strict=True)
    values = {i.name: n.meta["val"] for n, i in described if i.kind == "batch"}
    whole = (Replicate(),) * len(lead)
    return {name: lead if v.ndim and v.shape[0] == rows else whole for name, v in values.items()}


def data_layout(program: Program, plan: Plan) -> tuple[Layout, int]:
    """How the rows of a batch are split, and how many there are."""
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


def _types(local: Program, plan: Plan) -> BoundaryLayouts:
    """Types, padded ones too, from a rewritten program."""
    part = local.part
    inputs = {(i.kind, i.name): info(n).type() for n, i in zip(local.placeholders, local.inputs, strict=True)}
    results = {
        o.name: (whole_type(type_, part.results.get(o.name), part.count), plan.results[o.name])
        for o, type_ in zip(local.outputs, info(local.output_node).input_types, strict=True)
        if o.kind == "result" and type_ is not None
    }
    more = 0 if part.before is None else len(part.before.outputs)
    batch = {
        name: (whole_type(inputs["batch", name], part.rows.get(name), part.count), layout)
        for name, layout in list(plan.batch.items())[: len(plan.batch) - more]
    }
    return BoundaryLayouts(
        {name: (inputs["parameter", name], layout) for name, layout in plan.parameters.items()}, batch, results
    )
