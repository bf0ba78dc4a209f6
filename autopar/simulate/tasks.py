"""What the simulator runs: tasks on streams of devices."""

from __future__ import annotations

from dataclasses import dataclass

COMPUTE, COMMUNICATION = "compute", "communication"
"""Categories that the figures of a `Timeline` count; any other, such as ``"wait"``, is only shown."""


@dataclass(frozen=True, slots=True)
class Task:
    """Something that occupies a stream for a while.

    A stream runs its tasks one after another, in the order of the list they are given in, as CUDA streams do. A
    device's host launches the tasks of all its streams in that order too and never waits for them. So a task starts
    when its launch has ended, the task before it on its stream has, and so have all that it is ``after``.

    Attributes:
        name: for people.
        device: whose stream.
        stream: such as ``"compute"``, or a level of links.
        seconds: from start to end.
        after: positions, in the same list, of the tasks that must have ended.
        category: ``"compute"``, ``"communication"`` or a word of the caller's.
        host: seconds the device's host needs to launch it.
        group: tasks of one group start at the same time, when the last of them can: the members of a collective.
        at_start: bytes by category that its start adds (or frees, if negative) on its device.
        at_end: the same of its end.
        alone: how many times as fast a kernel is while no other device computes, see `autopar.costs.device.Device`.
    """

    name: str
    device: int
    stream: str
    seconds: float
    after: tuple[int, ...] = ()
    category: str = COMPUTE
    host: float = 0.0
    group: int | None = None
    at_start: tuple[tuple[str, float], ...] = ()
    at_end: tuple[tuple[str, float], ...] = ()
    alone: float = 1.0

    def __str__(self) -> str:
        return f"{self.name} (device {self.device}, {self.stream})"
