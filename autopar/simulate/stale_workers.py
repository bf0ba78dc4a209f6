"""How many steps workers of asynchronous SGD make in a second: an event simulation of computing, links and waiting.

A worker computes, sends a gradient to the owners of the parameters, and goes on when the values of all of them are
there. An owner answers at once, unless the worker is more than ``staleness`` steps ahead of the slowest. A device's
link sends one message at a time, and receives one at a time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.costs.cluster import Link

COMPUTED, PUSH, ANSWER, LEAVES = "computed", "push", "answer", "leaves: "

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


class Run:
    """Queues and clocks, by worker; owners are the first of them."""

    def __init__(
        self, seconds: Sequence[Sequence[float]], size: float, link: Link, staleness: int, owners: int
    ) -> None:
        workers = len(seconds)
        self.seconds, self.link, self.bound, self.owners = seconds, link, staleness, owners
        self.part = size / owners
        self.sending, self.receiving = [0.0] * workers, [0.0] * workers
        self.clocks = [[0] * workers for _ in range(owners)]
        self.read = [[0] * workers for _ in range(owners)]
        self.held: list[set[int]] = [set() for _ in range(owners)]
        self.missing, self.steps, self.computing = [0] * workers, [0] * workers, [0.0] * workers
        self.arrivals: list[list[tuple[int, int]]] = [[] for _ in range(owners)]
        """Of each owner ``(worker, version it had read)``, as `autopar.StaleGradients` records it."""
        # Time, a number that breaks ties, what happens, the worker and the owner that it is between.
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
        self.happens(at + seconds, COMPUTED, worker)

    def send(self, at: float, what: str, worker: int, owner: int) -> None:
        """A part between a worker and an owner: a gradient (`PUSH`) or values (`ANSWER`)."""
        if worker == owner:
            self.happens(at, what, worker, owner)
            return
        source = worker if what == PUSH else owner
        start = max(at, self.sending[source])
        self.sending[source] = start + self.part / self.link.bandwidth
        # What the receiver takes first is what leaves first, whoever decided first to send.
        self.happens(start, LEAVES + what, worker, owner)

    def leave(self, now: float, what: str, worker: int, owner: int) -> None:
        """A part begins to arrive, behind what arrives there already."""
        target = owner if what == PUSH else worker
        self.receiving[target] = max(now, self.receiving[target]) + self.part / self.link.bandwidth
        self.happens(self.receiving[target] + self.link.latency, what, worker, owner)

    def run(self, steps: int) -> float:
        """Until every worker has made so many steps; the time that this takes."""
        for worker in range(len(self.seconds)):
            self.compute(0.0, worker)
        now = 0.0
        while min(self.steps) < steps:
            now, _, what, worker, owner = heapq.heappop(self.events)
            if what.startswith(LEAVES):
                self.leave(now, what.removeprefix(LEAVES), worker, owner)
            elif what == COMPUTED:
                self.missing[worker] = self.owners
                # Each begins with another owner, or all would wait for the same.
                for i in range(self.owners):
                    self.send(now, PUSH, worker, (worker + i) % self.owners)
            elif what == PUSH:
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
        self.arrivals[owner].append((worker, self.read[owner][worker]))
        clocks[worker] += 1
        held.add(worker)
        for released in sorted(w for w in held if clocks[w] - min(clocks) <= self.bound):
            held.discard(released)
            self.read[owner][released] = len(self.arrivals[owner])
            self.send(now, ANSWER, released, owner)


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

    >>> link = Link("any", bandwidth=1e9, latency=1e-12)
    >>> uneven = [[1.0, 3.0], [3.0, 1.0]]
    >>> [round(stale_rate(uneven, 0, link, staleness=s, owners=2).steps_per_second, 2) for s in (0, 1)]
    [0.67, 1.0]
    """
    if not all(own and all(0 < s < math.inf for s in own) for own in seconds):
        raise ValueError(f"seconds={seconds}: expected seconds above 0 of at least one step of each worker")
    run = Run(seconds, size, link, staleness, owners)
    taken = run.run(steps)
    total = sum(run.steps)
    # What is under way when the time is over counts as computing up to there at the most.
    share = min(1.0, sum(run.computing) / (taken * len(seconds)))
    stale = [version - read for log in run.arrivals for version, (_, read) in enumerate(log)]
    return StaleRate(total / taken, 1.0 - share, sum(stale) / len(stale), max(stale))
