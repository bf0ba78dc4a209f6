"""How many steps workers of asynchronous SGD make in a second: an event simulation of computing, links and waiting.

A worker computes, sends a gradient to the owners of the parameters, and goes on when the values of all of them are
there. An owner answers at once, unless the worker is more than ``staleness`` steps ahead of the slowest. A device's
link sends one message at a time and receives one at a time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.costs.cluster import Link

STEPS = 200
"""Steps of the slowest worker that a rate is taken over."""


@dataclass(frozen=True)
class StaleRate:
    """What a run of asynchronous workers does.

    Attributes:
        steps_per_second: of all workers together.
        waiting: the share of their time that workers do not compute.
        staleness: gradients of others that an owner has taken between a worker's reading and its gradient, in the mean.
        most: the largest number of these.
    """

    steps_per_second: float
    waiting: float
    staleness: float
    most: int


class _Run:
    """Queues and clocks, by worker; owners are the first of them."""

    def __init__(
        self, seconds: Sequence[Sequence[float]], size: float, link: Link, staleness: int, owners: int
    ) -> None:
        workers = len(seconds)
        self.seconds, self.link, self.bound, self.owners = seconds, link, staleness, owners
        self.part = size / owners
        self.sending, self.receiving = [0.0] * workers, [0.0] * workers
        self.clocks = [[0] * workers for _ in range(owners)]
        self.versions, self.read = [0] * owners, [[0] * workers for _ in range(owners)]
        self.held: list[set[int]] = [set() for _ in range(owners)]
        self.missing, self.steps, self.computing = [0] * workers, [0] * workers, [0.0] * workers
        self.stale: list[int] = []
        # Time, a number that breaks ties, what happens ("computed", "pushed", "answered"), worker and owner.
        self.events: list[tuple[float, int, str, int, int]] = []
        self._count = 0

    def happens(self, at: float, what: str, worker: int, owner: int = 0) -> None:
        """Later, in order."""
        heapq.heappush(self.events, (at, self._count, what, worker, owner))
        self._count += 1

    def compute(self, at: float, worker: int) -> None:
        """A worker begins a step."""
        own = self.seconds[worker]
        seconds = own[self.steps[worker] % len(own)]
        self.computing[worker] += seconds
        self.happens(at + seconds, "computed", worker)

    def sent(self, at: float, source: int, target: int) -> float:
        """When a part that is sent now has arrived."""
        if source == target:
            return at
        start = max(at, self.sending[source], self.receiving[target])
        self.sending[source] = self.receiving[target] = end = start + self.part / self.link.bandwidth
        return end + self.link.latency

    def run(self, steps: int) -> float:
        """Until every worker has made so many steps; the time that this takes."""
        for worker in range(len(self.seconds)):
            self.compute(0.0, worker)
        now = 0.0
        while min(self.steps) < steps:
            now, _, what, worker, owner = heapq.heappop(self.events)
            if what == "computed":
                self.missing[worker] = self.owners
                # Each begins with another owner, or all would wait for the same.
                for i in range(self.owners):
                    target = (worker + i) % self.owners
                    self.happens(self.sent(now, worker, target), "pushed", worker, target)
            elif what == "pushed":
                self.push(now, worker, owner)
            else:
                self.missing[worker] -= 1
                if not self.missing[worker]:
                    self.steps[worker] += 1
                    self.compute(now, worker)
        return now

    def push(self, now: float, worker: int, owner: int) -> None:
        """An owner takes a gradient, and answers whom it may."""
        clocks, held = self.clocks[owner], self.held[owner]
        self.stale.append(self.versions[owner] - self.read[owner][worker])
        self.versions[owner] += 1
        clocks[worker] += 1
        held.add(worker)
        for released in sorted(w for w in held if clocks[w] - min(clocks) <= self.bound):
            held.discard(released)
            self.read[owner][released] = self.versions[owner]
            self.happens(self.sent(now, owner, released), "answered", released, owner)


def stale_rate(
    seconds: Sequence[Sequence[float]], size: float, link: Link, *, staleness: int, owners: int, steps: int = STEPS
) -> StaleRate:
    """Steps per second of workers that give gradients to owners.

    Args:
        seconds: for each worker, of its successive steps, over and over: ``[[1.0], [1.0, 3.0]]``.
        size: bytes of all gradients, and of all parameters.
        link: between workers, a device's own share of it.
        staleness: steps that a worker may be ahead of the slowest.
        owners: how many own a part; the first workers.
        steps: of each worker, at least, that the rate is taken over.

    Raises:
        ValueError: a step takes no time.

    >>> link = Link("any", bandwidth=1e9, latency=0.0)
    >>> uneven = [[1.0, 3.0], [3.0, 1.0]]
    >>> [round(stale_rate(uneven, 0, link, staleness=s, owners=2).steps_per_second, 2) for s in (0, 1)]
    [0.67, 1.0]
    """
    if not all(own and all(0 < s < math.inf for s in own) for own in seconds):
        raise ValueError(f"seconds={seconds}: expected seconds above 0 of at least one step of each worker")
    run = _Run(seconds, size, link, staleness, owners)
    taken = run.run(steps)
    total = sum(run.steps)
    # What is under way when the time is over counts as computing up to there at the most.
    share = min(1.0, sum(run.computing) / (taken * len(seconds)))
    mean = sum(run.stale) / len(run.stale)
    return StaleRate(total / taken, 1.0 - share, mean, max(run.stale))
