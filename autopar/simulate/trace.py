"""A timeline for people: the Trace Event Format that Perfetto and chrome://tracing open.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from autopar.simulate.tasks import COMPUTE
from autopar.simulate.timeline import Timeline

MICROSECONDS = 1e6
HOST = "host launches"


def beside(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """As `chrome_trace`, of several timelines of one device: a process each, which have these names."""
    events: list[dict[str, Any]] = []
    for number, (name, timeline) in enumerate(timelines.items()):
        own = replace(timeline, tasks=tuple(replace(task, device=number) for task in timeline.tasks))
        events += chrome_trace(own, {number: name})["traceEvents"]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def chrome_trace(timeline: Timeline, names: Mapping[int, str] = {}) -> dict[str, Any]:
    """Plain data for ``json.dump``: a process per device, a thread per stream and for the host, memory as a counter.

    Times are in microseconds, memory in bytes.

    Args:
        timeline: what is shown.
        names: of devices that are not called by their number.
    """
    events: list[dict[str, Any]] = []
    # The format numbers processes and threads; names are events of their own.
    threads: dict[tuple[int, str], int] = {}
    for device in timeline.devices:
        events += _named(device, 0, "process", names.get(device, f"device {device}"), device)
        streams = dict.fromkeys(task.stream for task in timeline.tasks if task.device == device)
        launched = any(task.host for task in timeline.tasks if task.device == device)
        # As in profiles of torch: the host on top, the compute stream below it, then the links.
        ordered = [*([HOST] if launched else []), *sorted(streams, key=lambda name: (name != COMPUTE, name))]
        for number, stream in enumerate(ordered, start=1):
            threads[device, stream] = number
            events += _named(device, number, "thread", stream, number)
    for task, start, end, launched_at in zip(
        timeline.tasks, timeline.start.tolist(), timeline.end.tolist(), timeline.launched.tolist(), strict=True
    ):
        if task.host:
            begin = launched_at - task.host
            events.append(_complete(task.name, "launch", task.device, threads[task.device, HOST], begin, task.host))
        thread = threads[task.device, task.stream]
        events.append(_complete(task.name, task.category, task.device, thread, start, end - start))
    for device in timeline.devices:
        events += _counters(timeline, device)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(pid: int, tid: int, what: str, name: str, index: int) -> Iterator[dict[str, Any]]:
    """Name of a process or thread, and its position among the others."""
    yield {"ph": "M", "pid": pid, "tid": tid, "name": f"{what}_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "tid": tid, "name": f"{what}_sort_index", "args": {"sort_index": index}}


def _complete(name: str, category: str, pid: int, tid: int, start: float, seconds: float) -> dict[str, Any]:
    times = {"ts": start * MICROSECONDS, "dur": seconds * MICROSECONDS}
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, **times}


def _counters(timeline: Timeline, device: int) -> Iterator[dict[str, Any]]:
    times, by_category = timeline.memory(device)
    for column, time in enumerate(times.tolist()):
        held = {name: float(sizes[column]) for name, sizes in by_category.items()}
        yield {"ph": "C", "name": "memory", "pid": device, "ts": time * MICROSECONDS, "args": held}
