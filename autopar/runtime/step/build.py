"""`build_step`: from the rewritten graph of all ranks to the step of this one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from autopar.ir.node_info import info
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.pipeline.schedules import order_of
from autopar.pipeline.stage_graphs import StageGraphs
from autopar.runtime.compiled.compiler import Compiler
from autopar.runtime.compiled.executable import Executables
from autopar.runtime.compiled.recompute_cheap import recompute_cheap
from autopar.runtime.mesh import MeshContext
from autopar.runtime.step.bind import bind
from autopar.runtime.step.microbatch_step import MicrobatchStep, cut_microbatches, whole_type
from autopar.runtime.step.partition import cut
from autopar.runtime.step.pipeline_step import PipelineStep, cut_stages, stage_context, stages_on
from autopar.runtime.step.step import BoundaryLayouts, Compiled, Step


def build_step(local: Program, plan: Plan, context: MeshContext, compiler: Executables[Any] | None = None) -> Step:
    """Bind a rewritten program to this rank, and cut it into the graphs that run.

    Args:
        local: rewritten, on local tensors; it names mesh axes.
        plan: under which it was rewritten.
        context: this rank's mesh context, on the plan's axes.
        compiler: makes what runs in the place of the graphs; None: they run as they are.
    """
    names = {name: name for name, _ in context.axes}
    coordinates = dict(zip(names, context.coordinates, strict=True))
    # Without process groups, on one device, axes keep their names: no collective is left to run on them.
    bound = replace(local, graph=bind(local.graph, context.groups or names, coordinates))
    types = boundary_layouts(local, plan)
    compiled = None if compiler is None else partial(compiler.executable, blocks=local.blocks)
    if plan.pipeline is not None:
        return _pipeline_step(local, bound, plan, types, context, compiled)
    if local.microbatches == 1:
        graphs = recompute_cheap(cut(bound)) if isinstance(compiler, Compiler) else cut(bound)
        return Step(local, graphs, types, context, compiled)
    if plan.shares is None:
        return MicrobatchStep(local, cut_microbatches(bound), types, context, compiled)
    axis = plan.axis_names.index(plan.shares.axis)
    slots = plan.shares.slots[context.coordinates[axis]]
    return MicrobatchStep(local, cut_microbatches(bound), types, context, compiled, axis, slots)


def _pipeline_step(
    local: Program, bound: Program, plan: Plan, types: BoundaryLayouts, context: MeshContext, compiled: Compiled | None
) -> PipelineStep:
    assert plan.pipeline is not None
    axis = plan.axis_names.index(plan.pipeline.axis)
    order, device = order_of(plan), context.coordinates[axis]
    stage_graphs = StageGraphs(bound, len(plan.stages))
    # `types` are of the whole mesh, for DTensors; within a stage, the axis of the stages does not exist.
    return PipelineStep(
        bound,
        cut_stages(bound, stage_graphs, stages_on(device, order)),
        types,
        context,
        compiled,
        stage_graphs=stage_graphs,
        order=order,
        group=None if context.mesh is None else context.mesh.get_group(axis),
        device=device,
        stage_context=stage_context(context, plan),
        stage_types=boundary_layouts(local, plan.inner),
    )


def boundary_layouts(local: Program, plan: Plan) -> BoundaryLayouts:
    """Types, padded ones too, and layouts of what goes into a rewritten program and comes out."""
    part = local.part
    inputs = {(i.kind, i.name): info(n).type() for n, i in zip(local.placeholders, local.inputs, strict=True)}
    results = {
        o.name: (whole_type(type_, part.results.get(o.name), part.count), plan.results[o.name])
        for o, type_ in zip(local.outputs, info(local.output_node).input_types, strict=True)
        if o.kind == "result" and type_ is not None
    }
    # The last of the plan's batch tensors are computed of the whole batch, and no call passes them.
    computed = 0 if part.before is None else len(part.before.outputs)
    batch = {
        name: (whole_type(inputs["batch", name], part.rows.get(name), part.count), layout)
        for name, layout in list(plan.batch.items())[: len(plan.batch) - computed]
    }
    parameters = {name: (inputs["parameter", name], layout) for name, layout in plan.parameters.items()}
    return BoundaryLayouts(parameters, batch, results)
