"""Torch's own schedules and runtime of pipelines, to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any


def torch_schedule(name: str, devices: int, microbatches: int, virtual: int) -> list[list[tuple[int, str, int]]]:
    """Stage, kind (``F``, ``B``, ``I`` or ``W``) and microbatch of what each device does, in order.

    Args:
        name: of the schedule in `torch.distributed.pipelining`.
        devices: of the pipeline.
        microbatches: of a step.
        virtual: stages on each device.
    """
    from torch.distributed.pipelining.schedules import get_schedule_class

    stages = [
        SimpleNamespace(num_stages=devices * virtual, group_size=devices, group_rank=0, stage_index=i, submod=None)
        for i in range(virtual)
    ]
    made: Any = get_schedule_class(name)

    class OrderAlone(made):  # type: ignore[misc]
        def _prepare_schedule_with_comms(self, *_: Any, **__: Any) -> None:
            """Where sends and receives go takes seconds for 512 microbatches, and is not asked for."""

    schedule = OrderAlone(stages, microbatches)
    rows = []
    for device in range(devices):
        actions = [a for a in schedule.pipeline_order[device] if a is not None]
        parts = [p for a in actions for p in (a.sub_actions or (a,))]
        rows.append([(p.stage_index, p.computation_type.value, p.microbatch_index) for p in parts])
    return rows


def pipeline_runtime(
    stages: Sequence[Any], rows: Sequence[Sequence[tuple[int, str, int]]], device_of: Sequence[int], microbatches: int
) -> Callable[[], None]:
    """Torch's runtime of pipelines: what it returns works through a device's actions once.

    Args:
        stages: of this device; with the methods of torch's stages that computation and communication call.
        rows: stage, kind and microbatch of what each device does, in order; kinds are torch's.
        device_of: the device of each stage.
        microbatches: how many there are.
    """
    from torch.distributed.pipelining import schedules

    make: Any = schedules._PipelineScheduleRuntime
    runtime = make(list(stages), microbatches, backward_requires_autograd=False)
    runtime.stage_index_to_group_rank = dict(enumerate(device_of))
    # Since 2.15 a send has to be waited for. These stages do that themselves, with a timeout, and give no work.
    waits = {"SEND_F": "WAIT_SEND_F", "SEND_B": "WAIT_SEND_B"} if hasattr(schedules, "WAIT_SEND_F") else {}
    for stage in stages if waits else ():
        stage.release_fwd_send_outputs = lambda microbatch: None
    runtime.pipeline_order_with_comms = {
        device: [
            schedules._Action(s, schedules._ComputationType(k), n)
            for s, kind, n in row
            for k in (kind, *([waits[kind]] if kind in waits else []))
        ]
        for device, row in enumerate(rows)
    }
    runtime._stages_forward_initialized = True  # the stages know their shapes

    def work() -> None:
        runtime._step_microbatches([()] * microbatches, [{}] * microbatches)

    return work
