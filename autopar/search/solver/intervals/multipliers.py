"""Large instances: multipliers of the limits by subgradients, while messages go on; feasible labels are read off on the way."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autopar.search.solver.highs import requested
from autopar.search.solver.intervals.blocks import Blocks, Neighbors
from autopar.search.solver.intervals.descend import descend, repair
from autopar.search.solver.intervals.instance import Instance
from autopar.search.solver.intervals.messages import Messages
from autopar.search.solver.problem import Floats, Ints

SWEEPS_FIRST = 20  # before multipliers move, so that labels mean something
SWEEPS_PER_BOUND = 10
SWEEPS_PER_PRIMAL = 40
MOMENTUM = 0.9
MOST_FORBIDDEN, BLOCKS_SECONDS = 20, 6.0  # pairs whose surroundings are solved exactly, and for how long each time
FIRST_STEP, SMALLER, STALLED = 0.01, 0.7, 5

Progress = Callable[[float, float], None]


@dataclass
class Best:
    """The cheapest labels within the limit so far, and the best bound."""

    labels: Ints | None = None
    value: float = float("inf")
    bound: float = float("-inf")

    def offer(self, instance: Instance, labels: Ints) -> None:
        """Take labels if they are within the limit and better; what they cost is counted anew."""
        value = instance.value(labels)
        if value < self.value and instance.fits(labels):
            self.labels, self.value = labels, value

    def within(self, gap: float) -> bool:
        """Whether value and bound have met."""
        return self.labels is not None and self.value - self.bound <= gap * abs(self.value)


def ascend(instance: Instance, best: Best, deadline: float, gap: float, progress: Progress) -> None:
    """Raise the bound and offer labels, until they meet or time is up.

    For any multipliers, in seconds a byte, the messages' bound of the priced problem less `multipliers @ limit` is a bound.
    A step goes along the mean of what the labels of recent sweeps take too much (heavy ball), and is a share of the objective,
    which shrinks when the bound stalls.

    Args:
        instance: the problem.
        best: edited in place.
        deadline: of the monotonic clock.
        gap: relative.
        progress: called with the best value and bound.
    """
    messages, neighbors = Messages(instance), Neighbors.of(instance)
    at = np.zeros(instance.points, dtype=bool)
    at[instance.largest_live_sets()] = True
    node = np.repeat(np.arange(len(instance.begin)), instance.sizes)
    multiplier, mean = np.zeros(instance.points), np.zeros(instance.points)
    step, since, sweeps = FIRST_STEP, 0, 0
    while not requested():
        messages.sweep(sweeps % 2 == 0)
        excess = np.where(at, (instance.usage(messages.labels) - instance.limit) / max(instance.limit, 1.0), 0.0)
        mean = MOMENTUM * mean + (1 - MOMENTUM) * excess if sweeps else excess
        sweeps += 1
        if sweeps % SWEEPS_PER_BOUND == 0:
            bound = messages.bound() - float(multiplier.sum()) * instance.limit
            since = 0 if bound > best.bound + 5e-4 * abs(bound) else since + 1
            best.bound = max(best.bound, bound)
            if since >= STALLED:
                step, since = step * SMALLER, 0
        if sweeps % SWEEPS_PER_PRIMAL == 0:
            for labels in (messages.labels, messages.decoded()):
                _offer(instance, neighbors, messages, labels, best, deadline)
            progress(best.value, best.bound)
            if best.within(gap):
                return
        if time.monotonic() > deadline:
            return
        if sweeps >= SWEEPS_FIRST:
            way = np.where((multiplier <= 0) & (mean < 0), 0.0, mean)
            size = min(abs(best.bound), best.value) * step / max(float(np.abs(way).sum()), 1e-12)
            multiplier = np.maximum(multiplier + size / max(instance.limit, 1.0) * way, 0.0)
            messages.price = instance.memory * _of_nodes(instance, multiplier)[node]


def _of_nodes(instance: Instance, multiplier: Floats) -> Floats:
    """Seconds a byte that each node takes: the multipliers of the points that it lives at, [n]."""
    total = np.concatenate([[0.0], np.cumsum(multiplier)])
    end = np.maximum(instance.end, instance.begin)
    found: Floats = total[np.minimum(end, len(multiplier))] - total[np.minimum(instance.begin, len(multiplier))]
    return found


def _offer(
    instance: Instance, neighbors: Neighbors, messages: Messages, labels: Ints, best: Best, deadline: float
) -> None:
    """Make labels feasible and better, and keep them if they are the best."""
    found = repair(instance, messages, labels)
    if found is None:
        return
    for price in (messages.price, np.zeros_like(messages.price)):
        found = descend(instance, messages, found, price)
    forbidden = instance.forbidden_pairs(found)
    if 0 < len(forbidden) <= MOST_FORBIDDEN:
        blocks = Blocks(instance, neighbors, found)
        ends = np.unique(np.concatenate([instance.u[forbidden], instance.v[forbidden]]))
        blocks.improve(ends.tolist(), messages.price, min(deadline, time.monotonic() + BLOCKS_SECONDS))
        found = descend(instance, messages, blocks.labels, np.zeros_like(messages.price))
    best.offer(instance, found)
