"""Start and end of every task: streams are queues, so start times are longest paths in one graph."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from autopar.errors import DeadlockError
from autopar.simulate.shared_cores import Times, run_together
from autopar.simulate.tasks import Task
from autopar.simulate.timeline import Timeline

NAMED = 8
"""Tasks of a deadlock that its error names."""


def simulate(tasks: Sequence[Task]) -> Timeline:
    """Run tasks, each as early as its stream, its host and what it waits for allow.

    Takes time in proportion to the tasks and what they wait for. A task that starts earlier or takes less never makes
    another later: the order on a stream is given, not chosen. That does not hold where devices share cores
    (`Task.alone`): kernels are faster there, the fewer devices compute.

    Args:
        tasks: in program order: the order in which a device's host launches them, and that of each stream.

    Raises:
        ValueError: a duration is negative or not finite, or a task is after one that is not in the list.
        DeadlockError: tasks wait for one another in a circle.
    """
    tasks = tuple(tasks)
    _check(tasks)
    waits = _waits(tasks)
    launched = _launched(tasks)
    members, group_of = _groups(tasks)
    run = run_together if any(task.alone > 1 for task in tasks) else _run
    start, end, done = run(tasks, *_waiting(waits, members, group_of), launched, members, group_of)
    # A group in a circle is never startable.
    if len(done) < len(tasks):
        raise DeadlockError(_circle(tasks, waits, [members[group] for group in group_of], set(done)))
    return Timeline(tasks, np.array(start), np.array(end), np.array(launched), np.array(done, dtype=np.int64))


def _waiting(
    waits: Sequence[Sequence[int]], members: Sequence[Sequence[int]], group_of: Sequence[int]
) -> tuple[list[list[int]], list[int]]:
    """The tasks that wait for each, and how many ends each group waits for."""
    waiting: list[list[int]] = [[] for _ in waits]
    pending = [0] * len(members)
    for index, sources in enumerate(waits):
        pending[group_of[index]] += len(sources)
        for source in sources:
            waiting[source].append(index)
    return waiting, pending


def _run(
    tasks: Sequence[Task],
    waiting: Sequence[Sequence[int]],
    pending: list[int],
    launched: Sequence[float],
    members: Sequence[Sequence[int]],
    group_of: Sequence[int],
) -> Times:
    """Each task takes its seconds, whatever else runs; the arguments are those of `run_together`."""
    # Kahn's algorithm over groups of tasks that start together. It need not go by time: a start is the largest of the
    # ends that it waits for, whichever order they are found in.
    ready, start, end = list(launched), [math.nan] * len(tasks), [math.nan] * len(tasks)
    done: list[int] = []
    startable = deque(group for group, count in enumerate(pending) if not count)
    while startable:
        group = startable.popleft()
        started = max(ready[index] for index in members[group])
        for index in members[group]:
            start[index] = started
            end[index] = finish = started + tasks[index].seconds
            done.append(index)
            for waiter in waiting[index]:
                ready[waiter] = max(ready[waiter], finish)
                pending[group_of[waiter]] -= 1
                if not pending[group_of[waiter]]:
                    startable.append(group_of[waiter])
    return start, end, done


def _check(tasks: Sequence[Task]) -> None:
    for index, task in enumerate(tasks):
        for what, seconds in (("takes", task.seconds), ("is launched in", task.host)):
            if not 0 <= seconds < math.inf:
                raise ValueError(f"task {index}, {task}, {what} {seconds} seconds; durations are finite, 0 or more")
        for source in task.after:
            if not 0 <= source < len(tasks):
                raise ValueError(
                    f"task {index}, {task}, is after task {source}, which is not among the {len(tasks)}; "
                    "`after` holds positions in the list"
                )


def _waits(tasks: Sequence[Task]) -> list[tuple[int, ...]]:
    """What each task waits for: what it is after, then the one before it on its stream."""
    # In this order: `_circle` names the first that has not ended, and an explicit dependency says more.
    last: dict[tuple[int, str], int] = {}
    waits = []
    for index, task in enumerate(tasks):
        stream = task.device, task.stream
        waits.append((*task.after, last[stream]) if stream in last else task.after)
        last[stream] = index
    return waits


def _launched(tasks: Sequence[Task]) -> list[float]:
    """When each task's launch ends."""
    # The host never waits for the device, so its clock depends on nothing else.
    clock: dict[int, float] = {}
    launched = []
    for task in tasks:
        clock[task.device] = clock.get(task.device, 0.0) + task.host
        launched.append(clock[task.device])
    return launched


def _groups(tasks: Sequence[Task]) -> tuple[list[list[int]], list[int]]:
    """Members of each set of tasks that start together (most have one), and the set of each task."""
    members: list[list[int]] = []
    group_of: list[int] = []
    known: dict[int, int] = {}
    for index, task in enumerate(tasks):
        number = len(members) if task.group is None else known.setdefault(task.group, len(members))
        if number == len(members):
            members.append([])
        members[number].append(index)
        group_of.append(number)
    return members, group_of


def _circle(
    tasks: Sequence[Task], waits: Sequence[Sequence[int]], together: Sequence[Sequence[int]], done: set[int]
) -> str:
    """Follow what is waited for from the first task that never starts, until a task is met a second time."""
    # Members of a group stand for one another: one waits if any of them does. The way into the circle is left out.
    path: list[str] = []
    seen: dict[int, int] = {}
    index = min(set(range(len(tasks))) - done)
    while together[index][0] not in seen:
        seen[together[index][0]] = len(path)
        member, source = next((m, s) for m in together[index] for s in waits[m] if s not in done)
        partner = "" if member == index else f", which starts with {tasks[member]},"
        before = "" if source in tasks[member].after else ", before it on its stream"
        path.append(f"{tasks[index]}{partner} waits for {tasks[source]}{before}")
        index = source
    circle = path[seen[together[index][0]] :]
    more = [f"and {len(circle) - NAMED} more"] if len(circle) > NAMED else []
    return f"deadlock: {'; '.join([*circle[:NAMED], *more])}. Put what others wait for first on its stream"
