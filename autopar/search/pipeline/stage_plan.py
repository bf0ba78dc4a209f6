"""`StagePlan`: a plan with stages, from a plan for the devices of one of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.costs.cluster import Link
from autopar.costs.memory import format_bytes
from autopar.errors import InfeasibleError
from autopar.ir.graph import copy_graph
from autopar.ir.layout import At, Layout, Placement, Replicate
from autopar.ir.plan import Certificate, Pipeline, Plan, Scatter
from autopar.ir.program import Program
from autopar.passes.pad_dims import pad
from autopar.passes.pipeline.scatter_sends import scatter_sends
from autopar.pipeline.schedules import Order, device_of, splits
from autopar.pipeline.stage_graphs import FORWARD, INPUT, WEIGHT, StageGraphs
from autopar.search.formulation.memory_model import Share
from autopar.search.options import Search
from autopar.search.peak import unverified
from autopar.search.pipeline.cuts import ForwardOrder, balanced_cuts, line_of, named_cuts, random_cuts
from autopar.search.pipeline.shape import PipelineShape
from autopar.search.pipeline.stage_memory import StageMemory, held_by, peaks
from autopar.search.pipeline.stage_times import StageTime, busiest, most_sent, sent_inside, step_seconds, taken_by
from autopar.sharding.candidates import REPLICATE
from autopar.sharding.dims import analyze

INSIDE = "; the devices of a stage: "
"""Between what a certificate says of stages and of what is inside them."""


@dataclass(frozen=True)
class StagePlan:
    """A model cut into stages.

    Attributes:
        plan: for the devices of a stage, if these had the whole model; its ``stages`` are known.
        shape: of the stages.
        held: what each stage holds.
        taken: what each stage takes.
        holders: the stage that holds each parameter; None: all do.
        homes: the stage that has each result; None: all do.
    """

    plan: Plan
    shape: PipelineShape
    held: Sequence[StageMemory]
    taken: Sequence[StageTime]
    holders: Mapping[str, int | None]
    homes: Mapping[str, int | None]

    def seconds(self, actions: Order) -> float:
        """Of a step."""
        return step_seconds(self.taken, actions)

    def busiest(self, actions: Order) -> float:
        """Seconds that the device works which has the most to do: no step is shorter."""
        return busiest(self.taken, actions)

    def peak(self, actions: Order) -> dict[str, float]:
        """Bytes by category, on the device that holds the most."""
        return max(peaks(self.held, actions), key=lambda held: sum(held.values()))

    def whole(self, schedule: str, actions: Order, seconds: float) -> Plan:
        """The plan for the whole mesh under a schedule that takes so many seconds."""
        plan, a = self.plan, self.shape
        peak, devices = self.peak(actions), device_of(actions)
        sent = plan.microbatches * most_sent(self.taken, devices)
        inside, collectives = sent_inside(self.taken, devices)
        predicted = replace(
            plan.predicted,
            step_seconds=seconds,
            compute_seconds=plan.predicted.compute_seconds / a.devices,  # of a device, on average
            peak_bytes=peak,
            memory_bytes={category: peak.get(category, 0.0) for category in plan.predicted.memory_bytes},
            communication_bytes={**inside, a.axis: sent},
            collectives=collectives,
        )
        holders, homes = ({n: None if s is None else devices[s] for n, s in stages.items()}
                          for stages in (self.holders, self.homes))  # fmt: skip
        wide = _widened(plan, a, schedule, holders, homes)
        return replace(wide, predicted=predicted, certificate=_certificate(plan, seconds, a))


def staged(
    program: Program,
    plan: Plan,
    shape: PipelineShape,
    link: Link,
    search: Search,
    ways: Sequence[Scatter],
) -> list[StagePlan]:
    """A program cut into stages under a plan: as it is, and where stages send in parts, if that makes a difference.

    Args:
        program: of one microbatch.
        plan: for the devices of a stage, if these had the whole model.
        shape: of the stages.
        link: between stages.
        search: for which it is cut.
        ways: to send in parts.

    Raises:
        InfeasibleError: the model has too few modules.
    """
    padded = pad(program, plan.padding)
    line = line_of(padded, analyze(padded), plan)
    plan = replace(plan, stages=line.stages(_cuts(line, search, shape, link)))
    split = any(splits(name) for name in shape.schedules)
    found = []
    for own, local in in_parts(unverified(program, plan), plan, ways):
        cutting = StageGraphs(local, shape.stages)
        holders = {name: stages[0] if len(stages := cutting.holders(name)) < shape.stages else None
                   for name in plan.parameters}  # fmt: skip
        held, taken = held_by(cutting, own, split), taken_by(cutting, own, link, split)
        found.append(StagePlan(own, shape, held, taken, holders, homes_of(cutting)))
    return found


def in_parts(local: Program, plan: Plan, ways: Sequence[Scatter]) -> list[tuple[Plan, Program]]:
    """A rewritten program and its plan, and those that differ where stages send in parts."""
    found = [(plan, local)]
    for scatter in ways:
        own = replace(plan, scatter=scatter)
        apart = scatter_sends(replace(local, graph=copy_graph(local.graph)), own)
        if len(apart.graph.graph.nodes) > len(local.graph.graph.nodes):
            found.append((own, apart))
    return found


def suitable(ways: Sequence[StagePlan], actions: Order) -> list[StagePlan]:
    """Those that send in parts, if any, where these actions send."""
    behind = sends_behind(actions)
    return [w for w in ways if w.plan.scatter is None or w.plan.scatter.behind == behind]


def fastest(ways: Sequence[StagePlan], actions: Order) -> StagePlan:
    """The one that takes the least time."""
    return min(suitable(ways, actions), key=lambda way: way.seconds(actions))


def sends_behind(actions: Order) -> tuple[int, ...]:
    """The stages of which the next one is on another device."""
    devices = device_of(actions)
    return tuple(s for s, (a, b) in enumerate(itertools.pairwise(devices)) if a != b)


def homes_of(cutting: StageGraphs) -> dict[str, int | None]:
    """The stage that has each result; None: all do."""
    return {o.name: cutting.result_stage(o, v) for o, v in cutting.described if o.kind == "result" and v is not None}


def share_of(actions: Order, stages: int) -> Share:
    """What the device with the most microbatches under way holds."""
    most = 0
    for row in actions:
        under_way = 0
        split = any(a.kind == INPUT for a in row)
        for action in row:
            under_way += 1 if action.kind == FORWARD else -1 if not split or action.kind == WEIGHT else 0
            most = max(most, under_way)
    return Share(states=1 / len(actions), activations=most / stages)


def missing(plan: Plan, needed: float, memory: float) -> InfeasibleError:
    """Says what is missing where at least so many bytes are needed, which of them are most in a plan, and a remedy."""
    peak = plan.predicted.peak_bytes
    largest = max(peak, key=peak.__getitem__)
    return InfeasibleError(
        f"no pipeline was found that needs less than {format_bytes(needed)} on a device, "
        f"{format_bytes(needed - memory)} more than the budget of {format_bytes(memory)}, most of it {largest}; ask "
        "for more stages or more microbatches, or for a schedule with fewer of them under way, such as 1f1b",
        needed=needed,
        budget=memory,
    )


def _cuts(line: ForwardOrder, search: Search, shape: PipelineShape, link: Link) -> list[int]:
    if shape.modules:
        return named_cuts(line, shape.modules)
    if search.recipe == "random":
        return random_cuts(line, shape.stages, search.seed)
    return balanced_cuts(line, shape.stages, link)


def _certificate(plan: Plan, seconds: float, shape: PipelineShape) -> Certificate:
    """The bound that the devices of a pipeline cannot all be faster than their average, if none ever waits."""
    inside, devices = plan.certificate, shape.devices
    space = (
        f"stages cut anywhere, alike inside, in any order, on {devices} devices of axis {shape.axis}, "
        f"{shape.virtual} each, {plan.microbatches} microbatches{INSIDE}{inside.space}"
    )
    checked = None if inside.checked is None else inside.checked / devices
    # What the search counts twice, such as a move for two users, the graph may do once.
    bound = min(inside.lower_bound / devices, seconds)
    return replace(inside, objective=seconds, lower_bound=bound, space=space, checked=checked)


def _widened(
    plan: Plan, a: PipelineShape, schedule: str, holders: Mapping[str, int | None], homes: Mapping[str, int | None]
) -> Plan:
    """The plan of the whole mesh: everything is alike on all stages, but for parameters and results."""
    axes = dict(a.axes)
    index, everywhere = list(axes).index(a.axis), Replicate()

    def wide(layout: Layout, placement: Placement = everywhere) -> Layout:
        return (*layout[:index], placement, *layout[index:])

    def at(device: int | None) -> Placement:
        return everywhere if device is None else At(device)

    return replace(
        plan,
        axes=tuple(axes.items()),
        parameters={name: wide(layout, at(holders[name])) for name, layout in plan.parameters.items()},
        batch={name: wide(layout) for name, layout in plan.batch.items()},
        results={name: wide(layout, at(homes.get(name))) for name, layout in plan.results.items()},
        consumer_layouts={name: wide(layout) for name, layout in plan.consumer_layouts.items()},
        choices={name: (*names[:index], REPLICATE, *names[index:]) for name, names in plan.choices.items()},
        pipeline=Pipeline(a.axis, schedule),
    )
