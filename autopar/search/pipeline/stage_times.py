"""`StageTime`: seconds of each stage of a pipeline and what it sends, from the graphs that its devices run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.costs.cluster import Link
from autopar.costs.collectives import wire_bytes
from autopar.ir.graph import values_of
from autopar.ir.node_info import info
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.pipeline.schedules import Order, device_of, in_two_parts, order_of
from autopar.pipeline.stage_graphs import BACKWARD, FORWARD, INPUT, WEIGHT, StageGraph, StageGraphs
from autopar.search.pipeline.stage_devices import StageDevices, devices_along
from autopar.simulate import Task, pipeline, simulate
from autopar.simulate.graph_tasks import GraphSeconds, node_seconds
from autopar.simulate.p2p_order import receives


@dataclass(frozen=True)
class StageTime:
    """Seconds of one stage, and what it sends.

    Attributes:
        forward: of a microbatch.
        backward: of a microbatch, in one piece.
        for_input: of a backward pass in two parts, that for the gradient of the input; 0: it was not cut so.
        for_weights: the other part. Both take longer than one piece, in which kernels of one hide what the other sends.
        before: once a step, before the microbatches.
        after: once a step, after them; what is computed from the stage's own sums runs with the last of them.
        after_parts: the same where backward passes are in two parts.
        send: from the stage to the next, in the direction in which more is sent.
        occupied: of that, what each of the two devices loses for its kernels, see `autopar.costs.device.Link.occupies`.
        to_next: bytes that a microbatch sends to the next stage.
        to_previous: bytes that it sends to the previous one.
        messages_to_next: in how many messages.
        messages_to_previous: likewise.
        inside: bytes that one of its devices sends to the others in a step, by axis.
        collectives: of a step, how many of each kind there are along each axis.
        alone: how many times as fast its device is while the others do nothing.
    """

    forward: float
    backward: float
    for_input: float
    for_weights: float
    before: float
    after: float
    after_parts: float
    send: float
    occupied: float
    to_next: float
    to_previous: float
    messages_to_next: float
    messages_to_previous: float
    inside: Mapping[str, float]
    collectives: Mapping[tuple[str, str], float]
    alone: float = 1.0

    def of(self, kind: str) -> float:
        """Seconds of an action."""
        return {FORWARD: self.forward, BACKWARD: self.backward, INPUT: self.for_input, WEIGHT: self.for_weights}[kind]


def step_seconds(stages: Sequence[StageTime], order: Order) -> float:
    """Seconds of a step in which the devices do this."""
    return simulate(step_tasks(stages, order)).step_seconds


def busiest(stages: Sequence[StageTime], order: Order) -> float:
    """Seconds that the device works which has the most to do in a step: no step is shorter.

    Of devices that share cores, the mean counts, or that device while it has all that it can use.
    """
    once = np.array([s.before for s in stages]) + _after(stages, order)
    each = np.bincount(device_of(order), once, len(order))  # stages of one device add up
    for device, row in enumerate(order):
        each[device] += sum(times * stages[s].of(kind) for (s, kind), times in Counter(a[:2] for a in row).items())
    return float(max(each.mean(), each.max() / _alone(stages)))


def _after(stages: Sequence[StageTime], order: Order) -> NDArray[np.float64]:
    """Seconds of each stage after the microbatches of a step."""
    return np.array([s.after_parts if in_two_parts(order) else s.after for s in stages])


def _alone(stages: Sequence[StageTime]) -> float:
    return max(s.alone for s in stages)


def step_tasks(
    stages: Sequence[StageTime], order: Order, saved: ArrayLike = 0.0, saved_for_weight: ArrayLike | None = None
) -> list[Task]:
    """The tasks of such a step; what a microbatch leaves on a stage is as in `autopar.simulate.pipeline_tasks`."""
    devices = device_of(order)

    def each(name: str) -> NDArray[np.float64]:
        return np.array([getattr(s, name) for s in stages])

    ends = [np.bincount(devices, own, len(order)) for own in (each("before"), _after(stages, order))]
    sends = [s.send for s in stages[:-1]]
    return pipeline(
        order, each("forward"), each("for_input"), each("for_weights"), sends, backward=each("backward"),
        saved=saved, saved_for_weight=saved_for_weight, before=ends[0], after=ends[1], received=receives(order),
        occupied=[s.occupied for s in stages[:-1]], alone=_alone(stages),
    )  # fmt: skip


def plan_tasks(local: Program, plan: Plan) -> list[Task]:
    """The tasks of a plan with stages; of ``activations``, each device holds microbatches.

    In the graphs of a plan that overlaps, collectives run beside kernels.

    Args:
        local: the program that was rewritten under the plan.
        plan: the plan.
    """
    order = order_of(plan)
    return step_tasks(times_of_plan(local, plan, together=plan.overlap), order, saved=len(order) / len(plan.stages))


def times_of_plan(local: Program, plan: Plan, *, together: bool = False) -> list[StageTime]:
    """The times of each stage of a plan; the arguments are those of `plan_tasks` and `times_of_stages`."""
    assert plan.pipeline is not None
    order, devices = order_of(plan), devices_along(plan.cluster, dict(plan.axes), plan.pipeline.axis)
    cutting = StageGraphs(local, len(plan.stages))
    return times_on(cutting, plan.inner, devices, device_of(order), in_two_parts(order), together=together)


def most_sent(stages: Sequence[StageTime], devices: Sequence[int]) -> float:
    """Bytes that the device which sends the most sends for a microbatch, to those of other stages."""
    sent = np.zeros(max(devices) + 1)
    for stage, device in enumerate(devices):
        for size, other in ((stages[stage].to_next, stage + 1), (stages[stage].to_previous, stage - 1)):
            # Stages of one device pass values on in memory.
            if 0 <= other < len(devices) and devices[other] != device:
                sent[device] += size
    return float(sent.max())


def sent_inside(
    stages: Sequence[StageTime], devices: Sequence[int]
) -> tuple[dict[str, float], dict[str, dict[str, int]]]:
    """Bytes and collectives of a step along the axes of the devices of a stage: those of the device with the most."""
    own = [[s for s, d in zip(stages, devices, strict=True) if d == device] for device in set(devices)]
    sizes = {axis: max(sum(s.inside[axis] for s in each) for each in own) for axis in stages[0].inside}
    counts: dict[str, dict[str, int]] = defaultdict(dict)
    for axis, kind in sorted({key for stage in stages for key in stage.collectives}):
        most = max(sum(s.collectives.get((axis, kind), 0.0) for s in each) for each in own)
        counts[axis][kind] = round(most)
    return sizes, dict(counts)


def times_of_stages(
    cutting: StageGraphs, plan: Plan, link: Link, split: bool, *, together: bool = False
) -> list[StageTime]:
    """The times of each stage.

    Args:
        cutting: of the rewritten program, in stages.
        plan: for the devices of a stage.
        link: between stages.
        split: whether backward passes are cut in two parts, too.
        together: whether collectives run beside kernels, as the order of the graphs allows; else nodes run one after
            the other, as the search prices them.
    """
    found = _Seconds(cutting, plan, link, together)
    before, after = found.per_step(BACKWARD)
    after_parts = found.per_step(WEIGHT)[1] if split else [0.0] * cutting.stages
    stages = []
    for s in range(cutting.stages):
        send = max(found.send(cutting.received(s + 1)), found.send(cutting.returned(s)))
        to_next, to_previous = cutting.received(s + 1), cutting.returned(s - 1)
        parts = [found.of(cutting.microbatch_graph(s, kind)) if split else 0.0 for kind in (INPUT, WEIGHT)]
        inside, collectives = found.sent_inside(s)
        stages.append(
            StageTime(
                forward=found.of(cutting.microbatch_graph(s, FORWARD)),
                backward=found.of(cutting.microbatch_graph(s, BACKWARD)),
                for_input=parts[0],
                for_weights=parts[1],
                before=before[s],
                after=after[s],
                after_parts=after_parts[s],
                send=send,
                occupied=_lost(send, link),
                to_next=found.size(to_next),
                to_previous=found.size(to_previous),
                messages_to_next=float(len(to_next)),
                messages_to_previous=float(len(to_previous)),
                inside=inside,
                collectives=collectives,
                alone=plan.cluster.device.alone,
            )
        )
    return stages


def times_on(
    cutting: StageGraphs, plan: Plan, devices: StageDevices, places: Sequence[int], split: bool, *, together: bool
) -> list[StageTime]:
    """The times of each stage on its own devices; what stages borrow of each other comes over the slowest link.

    Args:
        cutting: of the rewritten program, in stages.
        plan: for the devices of a stage.
        devices: along the axis of the stages.
        places: the coordinate of each stage.
        split: whether backward passes are cut in two parts, too.
        together: whether collectives run beside kernels, see `times_of_stages`.
    """
    link, machines = devices.slowest_link, [devices.machines[c] for c in places]
    known = {
        m: times_of_stages(cutting, replace(plan, cluster=m), link, split, together=together)
        for m in dict.fromkeys(machines)
    }
    return with_links([known[m][s] for s, m in enumerate(machines)], devices.links(places))


def with_links(times: Sequence[StageTime], links: Sequence[Link]) -> list[StageTime]:
    """Stages that send over links of their own."""
    if len(set(links)) <= 1:
        return list(times)
    found = list(times)
    for s, link in enumerate(links):
        there = link.latency * times[s].messages_to_next + times[s].to_next / link.bandwidth
        back = link.latency * times[s + 1].messages_to_previous + times[s + 1].to_previous / link.bandwidth
        found[s] = replace(times[s], send=max(there, back), occupied=_lost(max(there, back), link))
    return found


def _lost(send: float, link: Link) -> float:
    """What each end of a message loses: a device in a collective sends and receives, and these do one of both."""
    return link.occupies * send / 2


class _Seconds:
    """Seconds of graphs and of what is sent."""

    def __init__(self, cutting: StageGraphs, plan: Plan, link: Link, together: bool) -> None:
        self.cutting, self.link = cutting, link
        self.seconds = {} if together else node_seconds(cutting.program, plan)
        self.together = GraphSeconds(cutting.program, plan) if together else None
        self.sizes = dict(plan.axes)

    def of(self, piece: StageGraph) -> float:
        """Of a graph."""
        if self.together:
            return self.together.of(piece.nodes)
        return float(sum(self.seconds.get(n.name, 0.0) for n in piece.nodes))

    def size(self, names: Sequence[str]) -> float:
        """Bytes of values."""
        return float(sum(v.nbytes for n in names for v in values_of(self.cutting.node(n)) if v is not None))

    def send(self, names: Sequence[str]) -> float:
        """Of sending values, each with a message of its own."""
        # A message for each value, as the executor sends them.
        return self.link.latency * len(names) + self.size(names) / self.link.bandwidth

    def sent_inside(self, stage: int) -> tuple[dict[str, float], dict[tuple[str, str], float]]:
        """Bytes by axis, and how many collectives, that a stage's devices exchange in a step."""
        cutting = self.cutting
        runs = [(cutting.microbatch_graph(stage, kind), cutting.program.microbatches) for kind in (FORWARD, BACKWARD)]
        runs += [
            (piece, 1)
            for piece in (cutting.hoisted_graph(stage), *(cutting.final_graph(stage, n) for n in range(cutting.rounds)))
        ]
        sizes = dict.fromkeys(self.sizes, 0.0)
        counts: dict[tuple[str, str], float] = defaultdict(float)
        for piece, times in runs:
            for node in piece.nodes:
                collective = info(node).collective
                if collective is not None:
                    sent = wire_bytes(collective.kind, collective.bytes, self.sizes[collective.axis])
                    sizes[collective.axis] += times * float(sent)
                    counts[collective.axis, collective.kind] += times * collective.members
        return sizes, dict(counts)

    def per_step(self, kind: str) -> tuple[list[float], list[float]]:
        """Of what each stage does before the microbatches, and after them; their last graph is of this kind."""
        cutting = self.cutting
        before = [self.of(cutting.hoisted_graph(s)) for s in range(cutting.stages)]
        after = [0.0] * cutting.stages
        for name, source, target in cutting.parameter_transfers():
            for s in (source, target):
                # Sender and receiver both wait: neither has a microbatch to work on yet.
                before[s] += self.send([name])
        # Work after the microbatches comes in rounds, with transfers between stages in between.
        for level in range(cutting.rounds):
            for s in range(cutting.stages):
                after[s] += self.of(cutting.final_graph(s, level)) if level else self._with_last(s, kind)
            for name, source, target in cutting.transfers(level):
                for s in (source, target):
                    after[s] += self.send([name])
        return before, after

    def _with_last(self, stage: int, kind: str) -> float:
        """What the last microbatch takes more than others."""
        last, other = self.cutting.last_graph(stage, kind), self.cutting.microbatch_graph(stage, kind)
        return max(0.0, self.of(last) - self.of(other))
