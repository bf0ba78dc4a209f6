"""What each piece of a pipeline takes, from the graphs that its devices run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from autopar.costs.cluster import Link
from autopar.costs.collectives import wire_bytes
from autopar.ir.graph import values_of
from autopar.ir.node_info import info
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.pipeline.schedules import Order, device_of, order_of
from autopar.pipeline.stage_graphs import BACKWARD, FORWARD, INPUT, StageGraph, StageGraphs
from autopar.simulate import Task, pipeline, simulate
from autopar.simulate.graph_tasks import node_seconds
from autopar.simulate.p2p_order import receives


@dataclass(frozen=True)
class StageTime:
    """Seconds of one stage, kernels and collectives one after the other, and what it sends.

    Attributes:
        forward: of a microbatch.
        backward: of a microbatch.
        for_input: of that, the part for the gradient of the input; as much where it is not split.
        before: once a step, in front of the microbatches.
        behind: once a step, behind them.
        hop: from the stage to the next, in the direction in which more is sent.
        ahead: bytes that a microbatch sends to the next stage.
        back: bytes that it sends to the one before.
        inside: bytes that one of its devices sends to the others in a step, by axis.
        collectives: of a step, how many of each kind there are along each axis.
    """

    forward: float
    backward: float
    for_input: float
    before: float
    behind: float
    hop: float
    ahead: float
    back: float
    inside: Mapping[str, float]
    collectives: Mapping[tuple[str, str], float]


def step_seconds(stages: Sequence[StageTime], order: Order) -> float:
    """Seconds of a step in which the devices do this."""
    return simulate(step_tasks(stages, order)).step_seconds


def busiest(stages: Sequence[StageTime], order: Order) -> float:
    """Seconds that the device works which has the most to do in a step."""
    devices, times = device_of(order), sum(a.kind == FORWARD for row in order for a in row) / len(stages)
    work = [s.before + times * (s.forward + s.backward) + s.behind for s in stages]
    return float(np.bincount(devices, work, len(order)).max())


def step_tasks(
    stages: Sequence[StageTime], order: Order, saved: ArrayLike = 0.0, saved_for_weight: ArrayLike | None = None
) -> list[Task]:
    """The tasks of such a step; what a microbatch leaves on a stage is as in `autopar.simulate.pipeline_tasks`."""
    devices = device_of(order)
    split = any(a.kind == INPUT for row in order for a in row)
    forward, backward = (np.array([getattr(s, name) for s in stages]) for name in ("forward", "backward"))
    for_input = np.array([s.for_input for s in stages]) if split else backward
    ends = [np.bincount(devices, [getattr(s, name) for s in stages], len(order)) for name in ("before", "behind")]
    hops = [s.hop for s in stages[:-1]]
    return pipeline(
        order, forward, for_input, backward - for_input, hops, saved=saved, saved_for_weight=saved_for_weight,
        before=ends[0], after=ends[1], received=receives(order),
    )  # fmt: skip


def plan_tasks(local: Program, plan: Plan) -> list[Task]:
    """The tasks of a plan with stages; of ``activations``, each device holds microbatches.

    Args:
        local: the program that was rewritten under the plan.
        plan: the plan.
    """
    order = order_of(plan)
    return step_tasks(taken_of(local, plan), order, saved=len(order) / len(plan.stages))


def taken_of(local: Program, plan: Plan) -> list[StageTime]:
    """What each stage of a plan takes; the arguments are those of `plan_tasks`."""
    assert plan.pipeline is not None
    link = dict(zip(plan.axis_names, plan.cluster.link_for(dict(plan.axes)), strict=True))[plan.pipeline.axis]
    split = any(a.kind == INPUT for row in order_of(plan) for a in row)
    return taken_by(StageGraphs(local, len(plan.stages)), plan.inner, link, split)


def most_sent(stages: Sequence[StageTime], devices: Sequence[int]) -> float:
    """Bytes that the device which sends the most sends for a microbatch, to those of other stages."""
    sent = np.zeros(max(devices) + 1)
    for stage, device in enumerate(devices):
        for size, other in ((stages[stage].ahead, stage + 1), (stages[stage].back, stage - 1)):
            if 0 <= other < len(devices) and devices[other] != device:
                sent[device] += size
    return float(sent.max())


def sent_inside(
    stages: Sequence[StageTime], devices: Sequence[int]
) -> tuple[dict[str, float], dict[str, dict[str, int]]]:
    """Bytes and collectives of a step along the axes of the devices of a stage: those of the device with the most."""
    own = [[s for s, d in zip(stages, devices, strict=True) if d == device] for device in set(devices)]
    sizes = {axis: max(sum(s.inside[axis] for s in held) for held in own) for axis in stages[0].inside}
    counts: dict[str, dict[str, int]] = defaultdict(dict)
    for axis, kind in sorted({key for stage in stages for key in stage.collectives}):
        most = max(sum(s.collectives.get((axis, kind), 0.0) for s in held) for held in own)
        counts[axis][kind] = round(most)
    return sizes, dict(counts)


def taken_by(cutting: StageGraphs, plan: Plan, link: Link, split: bool) -> list[StageTime]:
    """What each stage takes.

    Args:
        cutting: of the rewritten program, in stages.
        plan: for the devices of a stage.
        link: between stages.
        split: whether the backward may be in two parts.
    """
    found = _Seconds(cutting, plan, link)
    before, behind = found.per_step()
    stages = []
    for s in range(cutting.stages):
        ahead, back = cutting.received(s + 1), cutting.returned(s - 1)
        backward = found.of(cutting.microbatch_graph(s, BACKWARD))
        inside, collectives = found.sent_inside(s)
        stages.append(
            StageTime(
                forward=found.of(cutting.microbatch_graph(s, FORWARD)),
                backward=backward,
                for_input=found.of(cutting.microbatch_graph(s, INPUT)) if split else backward,
                before=before[s],
                behind=behind[s],
                hop=max(found.send(ahead), found.send(cutting.returned(s))),
                ahead=found.size(ahead),
                back=found.size(back),
                inside=inside,
                collectives=collectives,
            )
        )
    return stages


class _Seconds:
    """Seconds of graphs and of what is sent."""

    def __init__(self, cutting: StageGraphs, plan: Plan, link: Link) -> None:
        self.cutting, self.link = cutting, link
        self.seconds = node_seconds(cutting.program, plan)
        self.sizes = dict(plan.axes)

    def of(self, piece: StageGraph) -> float:
        """Of a graph."""
        return float(sum(self.seconds.get(n.name, 0.0) for n in piece.nodes))

    def size(self, names: Sequence[str]) -> float:
        """Bytes of values."""
        return float(sum(v.nbytes for n in names for v in values_of(self.cutting.node(n)) if v is not None))

    def send(self, names: Sequence[str]) -> float:
        """Of sending values, each with a message of its own."""
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
                made = info(node).collective
                if made is not None:
                    sizes[made.axis] += times * float(wire_bytes(made.kind, made.bytes, self.sizes[made.axis]))
                    counts[made.axis, made.kind] += times * made.members
        return sizes, dict(counts)

    def per_step(self) -> tuple[list[float], list[float]]:
        """Of what each stage does before the microbatches, and behind them."""
        cutting = self.cutting
        before = [self.of(cutting.hoisted_graph(s)) for s in range(cutting.stages)]
        behind = [0.0] * cutting.stages
        for name, source, target in cutting.parameter_transfers():
            for s in (source, target):
                before[s] += self.send([name])
        for level in range(cutting.rounds):
            for s in range(cutting.stages):
                behind[s] += self.of(cutting.final_graph(s, level))
            for name, source, target in cutting.transfers(level):
                for s in (source, target):
                    behind[s] += self.send([name])
        return before, behind
