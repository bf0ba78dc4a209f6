"""What the page shows of a plan with stages: the schedule of each device, and its peak memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.ir.plan import Plan
from autopar.ir.plan_table import format_seconds, format_share
from autopar.ir.program import Program
from autopar.pipeline.schedules import Order, device_of, in_two_parts, order_of
from autopar.pipeline.stage_graphs import BACKWARD, FORWARD, INPUT, WEIGHT, StageGraphs
from autopar.search.pipeline.stage_memory import StageMemory, memory_of_stages, peaks
from autopar.search.pipeline.stage_times import StageTime, step_tasks, times_of_plan
from autopar.simulate import COMPUTE, Task, Timeline, simulate

KINDS = {FORWARD: "forward", BACKWARD: "backward", INPUT: "backward, for the input", WEIGHT: "backward, for weights"}
PER_STEP, RECEIVE = "before or after all microbatches", "receives"


@dataclass(frozen=True)
class SimulatedPipeline:
    """The simulated step of a plan with stages.

    Attributes:
        order: the actions of each device of the pipeline, in order.
        times: of each stage.
        memory: of each stage.
        timeline: of all devices of the pipeline.
    """

    order: Order
    times: Sequence[StageTime]
    memory: Sequence[StageMemory]
    timeline: Timeline

    @property
    def peaks(self) -> list[dict[str, float]]:
        """Bytes by category of each device at its peak."""
        return peaks(self.memory, self.order)

    @property
    def fullest(self) -> int:
        """The device with the highest peak."""
        sums = [sum(peak.values()) for peak in self.peaks]
        return sums.index(max(sums))


def simulate_pipeline(local: Program, plan: Plan) -> SimulatedPipeline:
    """Simulate the step of a plan with stages.

    Args:
        local: the program that was rewritten under the plan.
        plan: the plan.
    """
    # The times of the search: what the page shows is what the plan was chosen by.
    order, times = order_of(plan), times_of_plan(local, plan, together=plan.overlap)
    # Zero-bubble schedules run a backward pass in two parts, each of which holds something else.
    memory = memory_of_stages(StageGraphs(local, len(plan.stages)), plan.inner, in_two_parts(order))
    # The simulator follows what microbatches save; all else is constant over a step.
    saved = np.array([m.saved for m in memory]), np.array([m.saved_for_weights for m in memory])
    return SimulatedPipeline(order, times, memory, simulate(step_tasks(times, order, *saved)))


def stage_rows(step: SimulatedPipeline, plan: Plan) -> list[dict[str, Any]]:
    """A row for each stage: its device, its modules, and the seconds and saved bytes of a microbatch."""
    rows = zip(plan.stages, device_of(step.order), step.times, step.memory, strict=True)
    return [
        {
            "device": f"{device}, {stage.group}" if stage.group else device,
            "modules": list(stage.modules),
            "forward": times.forward,
            "backward": times.backward,
            "saved": memory.saved,
            "parameters": memory.whole_step.get("parameters", 0.0),
        }
        for stage, device, times, memory in rows
    ]


def device_rows(step: SimulatedPipeline) -> list[dict[str, Any]]:
    """A row for each device: seconds of computing, its bubble, exposed communication, and its peak by category."""
    timeline = step.timeline
    return [
        # By device: several stages may lie on one, and share its time.
        {"device": d, "busy": timeline.busy[d], "bubble": timeline.bubble[d],
         "exposed": timeline.exposed_communication[d], "peak": peak}
        for d, peak in enumerate(step.peaks)
    ]  # fmt: skip


def pipeline_caption(step: SimulatedPipeline, plan: Plan) -> str:
    """The sentence above the timeline."""
    timeline = step.timeline
    assert plan.pipeline is not None
    return (
        f"{plan.microbatches} microbatches through {len(plan.stages)} stages on {len(step.order)} devices of axis "
        f"{plan.pipeline.axis}, {plan.pipeline.order}, simulated: {format_seconds(timeline.step_seconds)}, of which "
        f"{format_share(timeline.mean_bubble)} is bubble on average. The other devices of a stage do the same."
    )


def lanes(step: SimulatedPipeline) -> tuple[list[str], list[tuple[int, int, int]]]:
    """Names of lanes, and position, lane and kind of each task that takes time."""
    timeline, kinds = step.timeline, list(kinds_of(step))
    timed = [(i, task) for i, task in enumerate(timeline.tasks) if task.seconds > 0]
    # A device that receives nothing gets no second lane.
    used = {_lane(task) for _, task in timed}
    ordered = [f"device {device}{suffix}" for device in timeline.devices for suffix in ("", " receives")]
    names = [name for name in ordered if name in used]
    return names, [(i, names.index(_lane(task)), kinds.index(_kind(task))) for i, task in timed]


def _lane(task: Task) -> str:
    """Computing and receiving overlap, so that each device has a lane for either."""
    return f"device {task.device}{'' if task.stream == COMPUTE else ' receives'}"


def kinds_of(step: SimulatedPipeline) -> Mapping[str, float]:
    """Seconds of each kind of task, all devices together."""
    found: dict[str, float] = {}
    for kind in (*KINDS.values(), PER_STEP, RECEIVE):
        seconds = sum(t.seconds for t in step.timeline.tasks if _kind(t) == kind)
        found.update({kind: seconds} if seconds else {})
    return found


def _kind(task: Task) -> str:
    if task.stream != COMPUTE:
        return RECEIVE
    # A task is named after its action, F3 of stage 1: the first letter is the kind.
    return KINDS.get(task.name[0], PER_STEP) if "microbatches" not in task.name else PER_STEP
