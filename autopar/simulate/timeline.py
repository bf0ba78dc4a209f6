"""What a simulation found: when each task ran, and the figures that follow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.simulate.tasks import COMMUNICATION, COMPUTE, Task


@dataclass(frozen=True, eq=False)
class Timeline:
    """When each task ran.

    A step splits on every device into ``busy``, ``exposed_communication`` and the seconds in which neither computation
    nor communication ran.

    Attributes:
        tasks: as they were given.
        start: seconds at which each starts; the step begins at 0.
        end: seconds at which each ends.
        launched: seconds at which the host has launched each.
        sequence: positions of the tasks in an order in which none comes before what it waits for.
    """

    tasks: tuple[Task, ...]
    start: NDArray[np.float64]
    end: NDArray[np.float64]
    launched: NDArray[np.float64]
    sequence: NDArray[np.int64]

    @property
    def step_seconds(self) -> float:
        """From the first launch to the end of the last task."""
        return float(self.end.max(initial=0.0))

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """Devices that have tasks, ascending."""
        return tuple(sorted(self._positions))

    @cached_property
    def busy(self) -> dict[int, float]:
        """Seconds in which each device computes."""
        return {device: self._covered(device, COMPUTE) for device in self.devices}

    @cached_property
    def exposed_communication(self) -> dict[int, float]:
        """Seconds in which each device communicates and does not compute."""
        # The length of the union of both, less that of the computation.
        return {d: self._covered(d, COMPUTE, COMMUNICATION) - self.busy[d] for d in self.devices}

    @property
    def bubble(self) -> dict[int, float]:
        """Share of the step in which each device does not compute."""
        step = self.step_seconds
        return {device: 1 - busy / step if step else 0.0 for device, busy in self.busy.items()}

    @property
    def mean_bubble(self) -> float:
        """Mean over the devices; where all compute equally long, ``(step - busy) / step`` of the zero-bubble paper."""
        return sum(self.bubble.values()) / max(1, len(self.devices))

    def memory(self, device: int) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
        """Bytes on a device over time.

        Args:
            device: one of `devices`; any other holds nothing.

        Returns:
            Seconds of each change, ascending, and the bytes of each category from that change on. At the same time,
            what ending tasks free comes before what starting tasks allocate.
        """
        changes: list[tuple[float, bool, int, tuple[tuple[str, float], ...]]] = []
        for position, index in enumerate(self._positions.get(device, ())):
            task, start, end = self.tasks[index], float(self.start[index]), float(self.end[index])
            if task.at_start:
                changes.append((start, True, position, task.at_start))
            if task.at_end:
                # A task without duration frees in its turn among those that start at that time, after it has allocated.
                changes.append((end, end == start, position, task.at_end))
        changes.sort(key=lambda change: change[:3])
        names = sorted({name for *_, deltas in changes for name, _ in deltas})
        bytes_ = np.zeros((len(names), len(changes)))
        for column, (*_, deltas) in enumerate(changes):
            for name, size in deltas:
                bytes_[names.index(name), column] += size
        return np.array([change[0] for change in changes]), dict(zip(names, bytes_.cumsum(axis=1), strict=True))

    def peak_memory(self, device: int) -> dict[str, float]:
        """Bytes by category when a device holds the most; their sum is the peak."""
        _, by_category = self.memory(device)
        if not by_category:
            return {}
        # Not the peak of each category: those are at different times.
        peak = int(np.argmax(sum(by_category.values())))
        return {name: float(held[peak]) for name, held in by_category.items()}

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data: seconds, shares of the step and bytes."""
        return {
            "step_seconds": self.step_seconds,
            "bubble": self.mean_bubble,
            "devices": [
                {
                    "device": device,
                    "busy_seconds": self.busy[device],
                    "bubble": self.bubble[device],
                    "exposed_communication_seconds": self.exposed_communication[device],
                    "peak_memory_bytes": self.peak_memory(device),
                }
                for device in self.devices
            ],
        }

    @cached_property
    def _positions(self) -> dict[int, list[int]]:
        """Positions of each device's tasks, in sequence."""
        positions: dict[int, list[int]] = {}
        for index in self.sequence.tolist():
            positions.setdefault(self.tasks[index].device, []).append(index)
        return positions

    def _covered(self, device: int, *categories: str) -> float:
        """Seconds in which a device runs a task of one of these categories."""
        chosen = [index for index in self._positions[device] if self.tasks[index].category in categories]
        return _union(zip(self.start[chosen].tolist(), self.end[chosen].tolist(), strict=True))


def _union(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals.

    >>> _union([(0, 2), (5, 6), (1, 3)])
    4.0
    """
    total, reached = 0.0, 0.0  # by start: each adds what lies beyond the furthest end so far
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
