"""`pipelined`: a plan with stages, from a plan for the devices of one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from autopar.candidates import REPLICATE
from autopar.cluster import Cluster
from autopar.dims import analyze
from autopar.errors import InfeasibleError
from autopar.layout import At, Layout, Placement, Replicate
from autopar.passes.pad_dims import pad
from autopar.pipeline.asked import Asked, without_pipeline
from autopar.pipeline.choose import Line, balanced_cuts, line_of, named_cuts, random_cuts
from autopar.pipeline.pieces import Cutting
from autopar.pipeline.schedules import Order, device_of, order
from autopar.plan import Pipeline, Plan
from autopar.program import Program
from autopar.search.find import Search
from autopar.simulate import pipeline, simulate

Inside = Callable[[Mapping[str, int], Cluster, Search], Plan]
"""``inside(axes, cluster, search)``: the plan of the devices of one stage, for the whole model."""


def pipelined(
    program: Program,
    axes: Mapping[str, int],
    machine: Cluster,
    search: Search,
    asked: Asked,
    inside: Inside,
    rewrite: Callable[[Plan], Program],
) -> Plan:
    """A plan with the stages that are asked for.

    Args:
        program: of one microbatch.
        axes: of the whole mesh.
        machine: the devices.
        search: for which it is asked.
        asked: the pipeline.
        inside: plans the devices of a stage.
        rewrite: the program under such a plan.

    Raises:
        InfeasibleError: the model has too few modules, or the schedule asks for other numbers.
    """
    if program.training and program.microbatches == 1 and not asked.schedule.startswith("breadth-first"):
        raise InfeasibleError(
            'in a pipeline of one microbatch all stages but one wait: pin {"microbatches": n} with n of at least 2'
        )
    try:
        actions = order(asked.schedule, asked.devices, program.microbatches, asked.virtual)
    except ValueError as e:
        raise InfeasibleError(f"no pipeline: {e}") from e
    links = dict(zip(axes, machine.link_for(axes), strict=True))
    plan = inside(asked.inside(axes), replace(machine, axis_links=links), without_pipeline(search))
    padded = pad(program, plan.padding)
    line = line_of(padded, analyze(padded), plan)
    if asked.modules:
        cuts = named_cuts(line, asked.modules)
    elif search.recipe == "random":
        cuts = random_cuts(line, asked.stages, search.seed)
    else:
        cuts = balanced_cuts(line, asked.stages, links[asked.axis])
    plan = replace(plan, stages=line.stages(cuts))
    cutting = Cutting(rewrite(plan), asked.stages)
    seconds = _step_seconds(line, cuts, actions, links[asked.axis].latency, links[asked.axis].bandwidth)
    return _widened(plan, axes, Pipeline(asked.axis, asked.schedule), cutting, device_of(actions), seconds)


def _step_seconds(line: Line, cuts: list[int], actions: Order, latency: float, bandwidth: float) -> float:
    """What the schedule takes, without what comes once at its end."""
    spans = line.between(cuts)
    ahead, back = (np.array([part[a:b].sum() for a, b in spans]) for part in (line.ahead, line.back))
    hops = latency + line.sent[cuts] / bandwidth
    return simulate(pipeline(actions, ahead, back / 2, back / 2, hops)).step_seconds


def _widened(
    plan: Plan, axes: Mapping[str, int], pipeline: Pipeline, cutting: Cutting, devices: list[int], seconds: float
) -> Plan:
    """The plan of the whole mesh: everything is alike on all stages, but for parameters."""
    index, everywhere = list(axes).index(pipeline.axis), Replicate()

    def wide(layout: Layout, placement: Placement = everywhere) -> Layout:
        return (*layout[:index], placement, *layout[index:])

    parameters = {}
    for name, layout in plan.parameters.items():
        holders = cutting.holders(name)
        parameters[name] = wide(layout, At(devices[holders[0]]) if len(holders) < len(plan.stages) else everywhere)
    return replace(
        plan,
        axes=tuple(axes.items()),
        parameters=parameters,
        batch={name: wide(layout) for name, layout in plan.batch.items()},
        results={name: wide(layout) for name, layout in plan.results.items()},
        relays={name: wide(layout) for name, layout in plan.relays.items()},
        choices={name: (*names[:index], REPLICATE, *names[index:]) for name, names in plan.choices.items()},
        pipeline=pipeline,
        predicted=replace(plan.predicted, step_seconds=seconds),
    )
