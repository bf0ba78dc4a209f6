"""Start and end of tasks of devices that share cores: kernels are the faster, the fewer devices have any."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from autopar.simulate.tasks import COMPUTE, Task

Times = tuple[list[float], list[float], list[int]]
"""Start and end of each task, and their positions in the order in which they end."""


def run_together(
    tasks: Sequence[Task],
    waiting: Sequence[Sequence[int]],
    pending: list[int],
    launched: Sequence[float],
    members: Sequence[Sequence[int]],
    group_of: Sequence[int],
) -> Times:
    """Run tasks by time, as `autopar.simulate.engine.simulate` does without; those of a deadlock never end.

    Tasks say what they take while all devices compute. While ``n`` of ``d`` devices do, each is ``d / n`` times as
    fast, but no more than its own ``alone``: processor sharing. All that runs has one rate, so that a kernel ends when
    a clock of that rate has come so far, and only what begins or ends changes the rate.

    Args:
        tasks: in program order.
        waiting: positions of the tasks that wait for each.
        pending: how many ends each group waits for; it is counted down.
        launched: when each task's launch ends.
        members: positions of the tasks that start together, by group.
        group_of: the group of each task.
    """
    alone, devices = max(t.alone for t in tasks), len({t.device for t in tasks})
    start, end, done = [math.nan] * len(tasks), [math.nan] * len(tasks), list[int]()
    now = work = 0.0  # seconds, and seconds that each kernel would have come to while all devices compute
    startable = [(max(launched[i] for i in members[g]), g) for g, count in enumerate(pending) if not count]
    heapq.heapify(startable)
    by_work: list[tuple[float, int]] = []  # kernels that run, by the work at which they end
    by_time: list[tuple[float, int]] = []  # other tasks, by the second
    while startable or by_work or by_time:
        rate = min(alone, max(1.0, devices / len(by_work))) if by_work else 1.0
        begins = startable[0][0] if startable else math.inf
        sent = by_time[0][0] if by_time else math.inf
        computed = now + (by_work[0][0] - work) / rate if by_work else math.inf
        then = max(now, min(begins, sent, computed))
        work += (then - now) * rate
        now = then
        if begins <= min(sent, computed):
            _, group = heapq.heappop(startable)
            for index in members[group]:
                start[index], seconds = now, tasks[index].seconds
                if tasks[index].category == COMPUTE:
                    heapq.heappush(by_work, (work + seconds, index))
                else:
                    heapq.heappush(by_time, (now + seconds, index))
            continue
        _, index = heapq.heappop(by_time if sent <= computed else by_work)
        end[index] = now
        done.append(index)
        for waiter in waiting[index]:
            group = group_of[waiter]
            pending[group] -= 1
            if not pending[group]:
                heapq.heappush(startable, (max(now, *(launched[i] for i in members[group])), group))
    return start, end, done
