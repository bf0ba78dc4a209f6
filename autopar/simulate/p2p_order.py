"""When the devices of a pipeline send and receive: between which of their actions.

Everything is sent as soon as it is computed. The receiver begins to receive it before the action that it runs at that
time, so that the transfer overlaps the action. Any two devices exchange their messages in one order, that of a timeline
in which all actions take equally long: so there is no deadlock, even where a link transfers one message at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from functools import lru_cache

from autopar.pipeline.schedules import BACKWARD_WEIGHT, FORWARD, Action, Order, device_of
from autopar.simulate.engine import simulate
from autopar.simulate.pipeline_tasks import arrivals, pipeline
from autopar.simulate.tasks import COMPUTE

Step = tuple[int, str, int]
"""Stage, kind and microbatch; kinds are those of actions, and ``SEND_F``, ``RECV_F``, ``SEND_B`` and ``RECV_B``."""

DELAY = 0.1
"""Of a message, in units of an action: so short that nobody waits who would not wait for a shorter one."""


@lru_cache(maxsize=64)  # the search asks for each plan that it simulates, and the runtime in every step
def communicate(order: Order) -> tuple[tuple[Step, ...], ...]:
    """What each device does, with sends and receives.

    >>> from autopar.pipeline.schedules import order
    >>> for row in communicate(order("gpipe", 2, 2)):
    ...     print(*(f"{stage}{kind}{microbatch}" for stage, kind, microbatch in row))
    0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1
    1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1
    """
    devices = device_of(order)
    timeline = simulate(pipeline(order, 1, 1, 1, DELAY))
    computed = [float(end) for task, end in zip(timeline.tasks, timeline.end, strict=True) if task.category == COMPUTE]
    end = dict(zip((action for row in order for action in row), computed, strict=True))
    ends = [[end[action] for action in row] for row in order]
    slots: dict[tuple[int, int], list[tuple[float, Action, Step]]] = defaultdict(list)
    for action, (source, seconds) in arrivals(order, devices, DELAY).items():
        if source is None or not seconds:
            continue
        sent, letter = end[source], "F" if action.kind == FORWARD else "B"
        # Both sides sort by the time of sending, so a device pair agrees on the order of its messages.
        for part, one in (("SEND", source), ("RECV", action)):
            device = devices[one.stage]
            slot = bisect_right(ends[device], sent)  # before the action that is still going on
            slots[device, slot].append((sent, action, (one.stage, f"{part}_{letter}", one.microbatch)))
    rows = []
    for device, row in enumerate(order):
        steps: list[Step] = []
        for i in range(len(row) + 1):
            steps += [step for *_, step in sorted(slots[device, i])]
            steps += [(a.stage, a.kind, a.microbatch) for a in row[i : i + 1]]
        rows.append(tuple(steps))
    return tuple(rows)


def receives(order: Order) -> dict[Action, Action | None]:
    """After which action of its device the receive for each action begins; None: before the first."""
    found: dict[Action, Action | None] = {}
    for own, row in zip(order, communicate(order), strict=True):
        # The part for the weights takes what its stage has computed itself.
        receiving = [a for a in own if a.kind != BACKWARD_WEIGHT]
        by_step = {(a.stage, "RECV_F" if a.kind == FORWARD else "RECV_B", a.microbatch): a for a in receiving}
        last: Action | None = None
        for step in row:
            if step in by_step:
                found[by_step[step]] = last
            elif "_" not in step[1]:
                last = Action(*step)  # type: ignore[arg-type]
    return found
