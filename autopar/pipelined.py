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
from autopar.pipeline.choose import Line, balanced_cuts, line_of, named_cuts, random_cuts
from autopar.pipeline.pieces import Cutting
from autopar.pipeline.schedules import Order, device_of, order
from autopar.plan import Pipeline, Plan
from autopar.program import Program
from autopar.search.find import SCHEDULE, STAGE_AXIS, STAGES, VIRTUAL, Search
from autopar.simulate import pipeline, simulate

Inside = Callable[[Mapping[str, int], Cluster, Search], Plan]
"""``inside(axes, cluster, search)``: the plan of the devices of one stage, for the whole model."""


def microbatches(search: Search) -> int:
    """Microbatches of a pipeline: as pinned, or twice as many as it has stages."""
    return search.microbatches or 2 * _stages(search)


def _stages(search: Search) -> int:
    if not isinstance(search.stages, int):
        return len(search.stages) + 1
    return search.stages * int(search.pins.get(VIRTUAL, 1))


def pipelined(
    program: Program,
    axes: Mapping[str, int],
    machine: Cluster,
    search: Search,
    inside: Inside,
    rewrite: Callable[[Plan], Program],
) -> Plan:
    """A plan with the stages that the search asks for.

    Args:
        program: of one microbatch.
        axes: of the whole mesh.
        machine: the devices.
        search: with the pin ``stages``.
        inside: plans the devices of a stage.
        rewrite: the program under such a plan.

    Raises:
        InfeasibleError: no axis has as many devices, the model has too few modules, or the schedule asks for other
            numbers.
    """
    virtual = int(search.pins.get(VIRTUAL, 1))
    named = () if isinstance(search.stages, int) else search.stages
    count = _stages(search)
    devices = count // virtual
    axis = _axis(axes, devices, search.pins.get(STAGE_AXIS))
    schedule = str(search.pins.get(SCHEDULE, "1f1b" if virtual == 1 else "interleaved"))
    if program.microbatches == 1:
        raise InfeasibleError(
            'in a pipeline of one microbatch all stages but one wait: pin {"microbatches": n} with n of at least 2'
        )
    try:
        actions = order(schedule, devices, program.microbatches, virtual)
    except ValueError as e:
        raise InfeasibleError(f"no pipeline: {e}") from e
    links = dict(zip(axes, machine.link_for(axes), strict=True))
    within = {name: n for name, n in axes.items() if name != axis}
    apart = replace(
        search, pins={n: v for n, v in search.pins.items() if n not in (STAGES, SCHEDULE, VIRTUAL, STAGE_AXIS)}
    )
    plan = inside(within, replace(machine, axis_links=links), apart)
    padded = pad(program, plan.padding)
    line = line_of(padded, analyze(padded), plan)
    if named:
        cuts = named_cuts(line, named)
    elif search.recipe == "random":
        cuts = random_cuts(line, count, search.seed)
    else:
        cuts = balanced_cuts(line, count, links[axis])
    plan = replace(plan, stages=line.stages(cuts))
    cutting = Cutting(rewrite(plan), count)
    seconds = _step_seconds(line, cuts, actions, links[axis].latency, links[axis].bandwidth)
    return _widened(plan, axes, Pipeline(axis, schedule), cutting, device_of(actions), seconds)


def _axis(axes: Mapping[str, int], devices: int, wanted: str | None) -> str:
    """The axis along which the stages lie: the outermost of their number, or the one asked for."""
    if wanted is not None and wanted not in axes:
        raise InfeasibleError(f"pin {STAGE_AXIS!r}: the mesh has no axis {wanted!r}; it has {dict(axes)}")
    fitting = [name for name, n in axes.items() if n == devices and wanted in (None, name)]
    if not fitting:
        raise InfeasibleError(
            f"no axis of the mesh {dict(axes)} has {devices} devices for as many stages; ask for the number of stages "
            f"that an axis has (pin {VIRTUAL!r} for several on each device), or make another mesh"
        )
    return fitting[0]


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
