"""What the page of a plan with stages shows besides: the schedule device by device, and what each device holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.ir.plan import Plan
from autopar.ir.plan_table import format_seconds, format_share
from autopar.ir.program import Program
from autopar.pipeline.schedules import Order, device_of, order_of
from autopar.pipeline.stage_graphs import BACKWARD, FORWARD, INPUT, WEIGHT, StageGraphs
from autopar.search.pipeline.stage_memory import StageMemory, held_by, peaks
from autopar.search.pipeline.stage_times import StageTime, step_tasks, taken_of
from autopar.simulate import COMPUTE, Task, Timeline, simulate

KINDS = {FORWARD: "forward", BACKWARD: "backward", INPUT: "backward, for the input", WEIGHT: "backward, for weights"}
ONCE, RECEIVE = "before or behind all microbatches", "receives"


@dataclass(frozen=True)
class PipelineStep:
    """The simulated step of a plan with stages.

    Attributes:
        order: what each device of the pipeline does.
        taken: what each stage takes.
        held: what each stage holds.
        timeline: of all devices of the pipeline.
    """

    order: Order
    taken: Sequence[StageTime]
    held: Sequence[StageMemory]
    timeline: Timeline

    @property
    def peaks(self) -> list[dict[str, float]]:
        """Bytes by category, of each device when it holds the most."""
        return peaks(self.held, self.order)

    @property
    def fullest(self) -> int:
        """The device that holds the most."""
        sums = [sum(held.values()) for held in self.peaks]
        return sums.index(max(sums))


def pipeline_step(local: Program, plan: Plan) -> PipelineStep:
    """Simulate the step of a plan with stages.

    Args:
        local: the program that was rewritten under the plan.
        plan: the plan.
    """
    order = order_of(plan)
    taken = taken_of(local, plan)
    held = held_by(StageGraphs(local, len(plan.stages)), plan.inner, any(a.kind == INPUT for row in order for a in row))
    saved = np.array([h.saved for h in held]), np.array([h.for_weights for h in held])
    return PipelineStep(order, taken, held, simulate(step_tasks(taken, order, *saved)))


def stage_rows(step: PipelineStep, plan: Plan) -> list[dict[str, Any]]:
    """A row for each stage: where it lies, its modules, and what a microbatch takes there and leaves."""
    rows = zip(plan.stages, device_of(step.order), step.taken, step.held, strict=True)
    return [
        {
            "device": device,
            "modules": list(stage.modules),
            "forward": taken.forward,
            "backward": taken.backward,
            "saved": held.saved,
            "parameters": held.steady.get("parameters", 0.0),
        }
        for stage, device, taken, held in rows
    ]


def device_rows(step: PipelineStep) -> list[dict[str, Any]]:
    """A row for each device: how long it computes, what it waits, and what it holds at most."""
    line = step.timeline
    return [
        {"device": d, "busy": line.busy[d], "bubble": line.bubble[d], "exposed": line.exposed_communication[d],
         "held": held}
        for d, held in enumerate(step.peaks)
    ]  # fmt: skip


def pipeline_says(step: PipelineStep, plan: Plan) -> str:
    """A sentence about the timeline."""
    line = step.timeline
    assert plan.pipeline is not None
    return (
        f"{plan.microbatches} microbatches through {len(plan.stages)} stages on {len(step.order)} devices of axis "
        f"{plan.pipeline.axis}, {plan.pipeline.order}, simulated: {format_seconds(line.step_seconds)}, of which "
        f"devices wait {format_share(line.mean_bubble)} on average. The other devices of a stage do the same."
    )


def lanes(step: PipelineStep) -> tuple[list[str], list[tuple[int, int, int]]]:
    """Names of lanes, and of each task that takes time its position, lane and kind."""
    line, named = step.timeline, dict[str, int]()
    for device in line.devices:
        for suffix in ("", " receives"):
            if any(
                t.device == device and (t.stream == COMPUTE) == (suffix == "") and t.seconds > 0 for t in line.tasks
            ):
                named[f"device {device}{suffix}"] = len(named)
    kinds = list(kinds_of(step))
    found = []
    for i, task in enumerate(line.tasks):
        lane = f"device {task.device}{'' if task.stream == COMPUTE else ' receives'}"
        if task.seconds > 0:
            found.append((i, named[lane], kinds.index(_kind(task))))
    return list(named), found


def kinds_of(step: PipelineStep) -> Mapping[str, float]:
    """Seconds of each kind of task, all devices together."""
    found: dict[str, float] = {}
    for kind in (*KINDS.values(), ONCE, RECEIVE):
        seconds = sum(t.seconds for t in step.timeline.tasks if _kind(t) == kind)
        found.update({kind: seconds} if seconds else {})
    return found


def _kind(task: Task) -> str:
    if task.stream != COMPUTE:
        return RECEIVE
    return KINDS.get(task.name[0], ONCE) if "microbatches" not in task.name else ONCE
