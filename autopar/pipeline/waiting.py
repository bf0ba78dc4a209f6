"""How long the devices of a pipeline wait for each other: at least, for bounds, and about, for an order to look in."""

from __future__ import annotations

from autopar.pipeline.asked import Arrangement
from autopar.pipeline.schedules import splits


def waits(a: Arrangement, count: int) -> float:
    """How much longer than its work such a pipeline takes at least."""
    split = a.virtual > 1 or any(splits(name) for name in a.schedules)
    return 1.0 if split else least_wait(a.devices, count)


def bubble(a: Arrangement, schedule: str, count: int) -> float:
    """About what waiting adds to the work, where stages are alike and a backward pass takes twice its forward.

    Two thirds of what is waited for are backward passes; where they are split, their parts for the weights, half of
    them, and those of earlier microbatches fill the time.
    """
    return (a.devices - 1) / (a.virtual * count) / (3 if splits(schedule) else 1)


def least_wait(devices: int, count: int) -> float:
    """How much longer than its work a device of a pipeline takes at least, whose devices have a stage each.

    The devices of later stages wait for those before, at both ends of a step. If stages take ``t[0], t[1], ...`` for a
    microbatch, device ``d`` is busy or waits for ``count * t[d] + sum(t[:d])``; that is least where all are the same,
    ``t[d + 1] = t[d] * (1 - 1 / count)``.

    >>> round(least_wait(4, 1), 3), round(least_wait(4, 8), 3), round(least_wait(4, 800), 3)
    (4.0, 1.208, 1.002)
    """
    return float(devices / (count * (1 - (1 - 1 / count) ** devices)))
