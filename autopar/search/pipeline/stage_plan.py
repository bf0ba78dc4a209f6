"""`StagePlan`: a plan with stages, from a plan for the devices of one of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.costs.memory import format_bytes
from autopar.errors import InfeasibleError
from autopar.ir.graph import copy_graph
from autopar.ir.layout import At, Layout, Placement, Replicate
from autopar.ir.plan import Certificate, Pipeline, Plan, Predicted, Scatter
from autopar.ir.program import Program
from autopar.passes import as_planned
from autopar.passes.pipeline.scatter_sends import scatter_sends
from autopar.pipeline.schedules import Order, device_of, splits
from autopar.pipeline.stage_graphs import StageGraphs
from autopar.search.emitted.rewritten import unverified
from autopar.search.options import Search
from autopar.search.pipeline.cuts import ForwardOrder, balanced_cuts, forward_order, named_cuts, random_cuts
from autopar.search.pipeline.shape import PipelineShape, ScheduledStages
from autopar.search.pipeline.stage_devices import StageDevices, predicted_alone
from autopar.search.pipeline.stage_memory import StageMemory, memory_of_stages, peaks
from autopar.search.pipeline.stage_times import (
    StageTime,
    busiest,
    most_sent,
    sent_inside,
    step_seconds,
    times_on,
)
from autopar.sharding.candidates import REPLICATE
from autopar.sharding.dims import analyze

INSIDE = "; the devices of a stage: "
"""Between what a certificate says of stages and of what is inside them."""


@dataclass(frozen=True)
class StagePlan:
    """A model cut into stages.

    Attributes:
        plan: for the devices of a stage, if these had the whole model; its ``stages`` are known.
        memory: of each stage.
        times: of each stage.
        holders: the stage that holds each parameter; None: all do.
        homes: the stage that has each result; None: all do.
        devices: along the axis of the stages.
    """

    plan: Plan
    memory: Sequence[StageMemory]
    times: Sequence[StageTime]
    holders: Mapping[str, int | None]
    homes: Mapping[str, int | None]
    devices: StageDevices

    def seconds(self, actions: Order) -> float:
        """Of a step."""
        return step_seconds(self.times, actions)

    def busiest(self, actions: Order) -> float:
        """Seconds that the device works which has the most to do: no step is shorter."""
        return busiest(self.times, actions)

    def peak(self, actions: Order) -> dict[str, float]:
        """Bytes by category, on the device that holds the most; as of one with the least memory, where these differ."""
        held, room = self.fullest(actions)
        return {category: size / room for category, size in held.items()}

    def fullest(self, actions: Order) -> tuple[dict[str, float], float]:
        """Bytes by category on the device that has the least memory left, and its `Predicted.room`."""
        each = zip(peaks(self.memory, actions), self.devices.room, strict=True)
        return max(each, key=lambda own: sum(own[0].values()) / own[1])

    def needed(self, actions: Order) -> list[float]:
        """Bytes on each device along the axis, as multiples of its `StageDevices.room`."""
        each = zip(peaks(self.memory, actions), self.devices.room, strict=True)
        return [sum(held.values()) / room for held, room in each]

    def whole(self, scheduled: ScheduledStages, seconds: float, any_memory: Certificate | None = None) -> Plan:
        """The finished plan for the whole mesh: everything is alike on all stages, but for parameters and results.

        Args:
            scheduled: the stages, and their schedule.
            seconds: of a step.
            any_memory: of the plan for a stage's devices without a budget, whose bound holds within one, too; default:
                of this plan.
        """
        plan, shape, stages = self.plan, scheduled.shape, self.plan.stages
        devices, predicted = device_of(scheduled.actions), self.predicted
        if self.devices.groups:
            alone = predicted_alone(scheduled.part, plan, self.devices)
            plan = replace(plan, predicted=alone.predicted, modules=alone.modules)
            predicted = replace(self, plan=plan).predicted
            kinds = map(self.devices.kind, devices)
            stages = tuple(replace(stage, group=kind) for stage, kind in zip(stages, kinds, strict=True))
        index, everywhere = list(dict(shape.axes)).index(shape.axis), Replicate()

        def wide(layout: Layout, placement: Placement = everywhere) -> Layout:
            return (*layout[:index], placement, *layout[index:])

        def at(stage: int | None) -> Placement:
            return everywhere if stage is None else At(devices[stage])

        return replace(
            plan,
            axes=shape.axes,
            parameters={name: wide(layout, at(self.holders[name])) for name, layout in plan.parameters.items()},
            batch={name: wide(layout) for name, layout in plan.batch.items()},
            results={name: wide(layout, at(self.homes.get(name))) for name, layout in plan.results.items()},
            consumer_layouts={name: wide(layout) for name, layout in plan.consumer_layouts.items()},
            choices={name: (*names[:index], REPLICATE, *names[index:]) for name, names in plan.choices.items()},
            stages=stages,
            pipeline=Pipeline(shape.axis, scheduled.schedule, shape.places),
            predicted=predicted(shape, scheduled.actions, seconds),
            certificate=_certificate(plan, seconds, shape, any_memory or plan.certificate, self.devices),
        )

    def predicted(self, shape: PipelineShape, actions: Order, seconds: float) -> Predicted:
        """What a step costs on each device: memory and what is sent are those of the device with the most."""
        alone, devices = self.plan.predicted, device_of(actions)
        peak, room = self.fullest(actions)
        inside, collectives = sent_inside(self.times, devices)
        return replace(
            alone,
            step_seconds=seconds,
            # Of a device, on average.
            compute_seconds=alone.compute_seconds / shape.devices,
            communication_seconds=alone.communication_seconds / shape.devices,
            chunked_seconds=alone.chunked_seconds / shape.devices,
            peak_bytes=peak,
            room=room,
            waiting_seconds=0.0,  # each graph of a stage takes at least as long as its launches
            memory_bytes={category: peak.get(category, 0.0) for category in alone.memory_bytes},
            communication_bytes={
                **inside,
                shape.axis: self.plan.microbatches * most_sent(self.times, devices),
            },
            collectives=collectives,
        )


def staged(
    program: Program,
    plan: Plan,
    shape: PipelineShape,
    devices: StageDevices,
    search: Search,
    ways: Sequence[Scatter],
    weights: Sequence[float] = (),
) -> list[StagePlan]:
    """A program cut into stages under a plan: as it is, and where stages send in parts, if that makes a difference.

    Args:
        program: of one microbatch.
        plan: for the devices of a stage, if these had the whole model.
        shape: of the stages.
        devices: along the axis of the stages.
        search: for which it is cut.
        ways: to send in parts.
        weights: by which the seconds of each stage are multiplied where stages are cut; default: 1.

    Raises:
        InfeasibleError: the model has too few modules.
    """
    padded = as_planned(program, plan)
    dims, places = analyze(padded), shape.coordinates
    orders = {m: forward_order(padded, dims, replace(plan, cluster=m)) for m in dict.fromkeys(devices.machines)}
    own_orders = [orders[devices.machines[c]] for c in places]
    plan = replace(plan, stages=own_orders[0].stages(_cuts(own_orders, search, shape, devices, weights)))
    split = any(splits(name) for name in shape.schedules)
    both = in_parts(unverified(program, plan), plan, ways)
    return [measured(own, local, devices, places, split) for own, local in both]


def measured(plan: Plan, local: Program, devices: StageDevices, places: Sequence[int], split: bool) -> StagePlan:
    """A plan with stages, and what its graphs hold and take.

    Args:
        plan: for the devices of a stage.
        local: the program that was rewritten under it.
        devices: along the axis of the stages.
        places: the coordinate of each stage.
        split: whether the backward may be in two parts.
    """
    cutting = StageGraphs(local, len(plan.stages))
    holders = {name: stages[0] if len(stages := cutting.holders(name)) < cutting.stages else None
               for name in plan.parameters}  # fmt: skip
    homes = {o.name: cutting.result_stage(o, v) for o, v in cutting.described if o.kind == "result" and v is not None}
    # In this order: memory needs to know which tensors share storages, and propagates that through the graph.
    memory = memory_of_stages(cutting, plan, split)
    times = times_on(cutting, plan, devices, places, split, together=plan.overlap)
    return StagePlan(plan, memory, times, holders, homes, devices)


def in_parts(local: Program, plan: Plan, ways: Sequence[Scatter]) -> list[tuple[Plan, Program]]:
    """A rewritten program and its plan, and those that differ where stages send in parts."""
    found = [(plan, local)]
    for scatter in ways:
        own = replace(plan, scatter=scatter)
        apart = scatter_sends(replace(local, graph=copy_graph(local.graph)), own)
        # No more nodes: nothing that is sent is replicated, and so nothing was scattered.
        if len(apart.graph.graph.nodes) > len(local.graph.graph.nodes):
            found.append((own, apart))
    return found


def suitable(ways: Sequence[StagePlan], actions: Order) -> list[StagePlan]:
    """Those that send in parts, if any, where these actions send."""
    sending = sending_stages(actions)
    return [w for w in ways if w.plan.scatter is None or w.plan.scatter.behind == sending]


def fastest(ways: Sequence[StagePlan], actions: Order) -> StagePlan:
    """The one that takes the least time."""
    return min(suitable(ways, actions), key=lambda way: way.seconds(actions))


def sending_stages(actions: Order) -> tuple[int, ...]:
    """The stages of which the next one is on another device."""
    devices = device_of(actions)
    return tuple(s for s, (a, b) in enumerate(itertools.pairwise(devices)) if a != b)


def missing(plan: Plan, needed: float, memory: float) -> InfeasibleError:
    """Says what is missing where at least so many bytes are needed, which of them are most in a plan, and a remedy."""
    peak = plan.predicted.peak_bytes
    largest = max(peak, key=peak.__getitem__)
    return InfeasibleError(
        f"no pipeline was found that needs less than {format_bytes(needed)} on a device, "
        f"{format_bytes(needed - memory)} more than the budget of {format_bytes(memory)}, most of it {largest}; ask "
        "for more stages or more microbatches, or for a schedule with fewer of them in flight, such as 1f1b",
        needed=needed,
        budget=memory,
    )


def _cuts(
    orders: Sequence[ForwardOrder],
    search: Search,
    shape: PipelineShape,
    devices: StageDevices,
    weights: Sequence[float],
) -> list[int]:
    """Where the stages after the first begin, from the forward order with the seconds of each stage's devices."""
    if shape.modules:
        return named_cuts(orders[0], shape.modules)
    if search.recipe == "random":
        return random_cuts(orders[0], shape.stages, search.seed)
    return balanced_cuts(orders, devices.links(shape.coordinates), weights)


def kinds_in_order(shape: PipelineShape, devices: StageDevices) -> str:
    """What a certificate says of devices that differ: how many of each, in the order of the pipeline."""
    if devices.alike:
        return ""
    row = shape.places or range(shape.devices)
    runs = [(kind, len(list(own))) for kind, own in itertools.groupby(map(devices.kind, row))]
    return f" ({', then '.join(f'{count} of {kind}' for kind, count in runs)})"


def _certificate(
    plan: Plan, seconds: float, shape: PipelineShape, any_memory: Certificate, along: StageDevices
) -> Certificate:
    """The bound that the devices of a pipeline cannot all be faster than their average, if none ever idles."""
    inside, devices = plan.certificate, shape.devices
    space = (
        f"stages cut anywhere, alike inside, in any order, on {devices} devices of axis {shape.axis}"
        f"{kinds_in_order(shape, along)}, {shape.virtual} each, {plan.microbatches} microbatches{INSIDE}{inside.space}"
    )
    checked = None if any_memory.checked is None else any_memory.checked / devices
    # What the search counts twice, such as a move for two users, the graph may do once.
    bound = min(any_memory.lower_bound / devices, seconds)
    return replace(inside, objective=seconds, lower_bound=bound, space=space, checked=checked)
