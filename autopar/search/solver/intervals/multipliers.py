"""Large instances: multipliers of the limits by subgradients, while messages go on."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from autopar.search.solver.highs import requested
from autopar.search.solver.intervals.instance import Instance
from autopar.search.solver.intervals.messages import Messages
from autopar.search.solver.problem import Floats, Ints

SWEEPS_FIRST = 20  # before multipliers move, so that labels mean something
SWEEPS_PER_BOUND = 10
MOMENTUM = 0.9
FIRST_STEP, SMALLER, STALLED = 0.01, 0.7, 5


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


def ascend(instance: Instance, messages: Messages, best: Best, deadline: float) -> Floats:
    """Raise the bound until time is up.

    For any multipliers, in seconds a byte, the messages' bound of the priced problem less `multipliers @ limit` is a
    bound. A step goes along the mean of what the labels of recent sweeps take too much (heavy ball), and is a share of
    the objective, which shrinks when the bound stalls.

    Args:
        instance: the problem.
        messages: its; priced by the multipliers at the end.
        best: its bound is raised.
        deadline: of the monotonic clock; the first bound is taken even so.

    Returns:
        The multipliers of the best bound, [points].
    """
    at = np.zeros(instance.points, dtype=bool)
    at[instance.largest_live_sets()] = True
    scale = max(float(np.abs(instance.limit).max()), 1.0)
    multiplier, mean, kept = np.zeros(instance.points), np.zeros(instance.points), np.zeros(instance.points)
    step, since, sweeps, highest = FIRST_STEP, 0, 0, -np.inf
    while not requested():
        messages.sweep(sweeps % 2 == 0)
        excess = np.where(at, (instance.usage(messages.labels) - instance.limit) / scale, 0.0)
        mean = MOMENTUM * mean + (1 - MOMENTUM) * excess if sweeps else excess
        sweeps += 1
        if sweeps % SWEEPS_PER_BOUND == 0:
            bound = messages.bound() - float(multiplier @ instance.limit)
            since = 0 if bound > highest + 5e-4 * abs(bound) else since + 1
            if bound > highest:
                highest, kept = bound, multiplier.copy()
            best.bound = max(best.bound, bound)
            if since >= STALLED:
                step, since = step * SMALLER, 0
            if time.monotonic() > deadline:
                break
        if sweeps >= SWEEPS_FIRST:
            way = np.where((multiplier <= 0) & (mean < 0), 0.0, mean)
            size = abs(highest) * step / max(float(np.abs(way).sum()), 1e-12)
            multiplier = np.maximum(multiplier + size / scale * way, 0.0)
            messages.price = instance.memory * seconds_a_byte(instance, multiplier)[messages.tables.owner]
    messages.price = instance.memory * seconds_a_byte(instance, kept)[messages.tables.owner]
    return kept


def seconds_a_byte(instance: Instance, multiplier: Floats) -> Floats:
    """Of each node: the multipliers of the points that it lives at, [n]."""
    total = np.concatenate([[0.0], np.cumsum(multiplier)])
    last, first = np.maximum(instance.end, instance.begin).clip(max=len(multiplier)), instance.begin
    found: Floats = total[last] - total[first.clip(max=len(multiplier))]
    return found
