"""What exchanges of workers that train apart cost, and how often to exchange so that this hides: closed forms.

A round of H steps exchanges every fragment once. Of P fragments that take ``E`` seconds together, each is sent at its
turn and used ``delay`` steps later, which hide ``delay`` steps of its ``E / P`` seconds. Workers wait for the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.costs.cluster import Link
from autopar.costs.collectives import COLLECTIVES, wire_bytes

SHARE = 0.05
"""The share of a run's time that may be spent waiting for exchanges where they do not hide."""

BLOCK, SCALE = 256, 4
"""Quantized numbers that share a scale, and its bytes."""


def exchange_kind(bits: int | None) -> str:
    """The collective: sums of whole numbers, or everybody's quantized ones."""
    return "all_reduce" if bits is None else "all_gather"


def exchange_size(elements: int, itemsize: int, workers: int, bits: int | None) -> int:
    """Bytes of the collective's full tensor, as `autopar.costs.collectives` counts it.

    Args:
        elements: of a device's share of the parameters.
        itemsize: bytes of each.
        workers: how many exchange.
        bits: that are sent of each; None: all.

    >>> exchange_size(512, 4, 2, None), exchange_size(512, 4, 2, 8)
    (2048, 1040)
    """
    if bits is None:
        return elements * itemsize
    return workers * -(-elements // BLOCK) * (BLOCK * bits // 8 + SCALE)


@dataclass(frozen=True)
class RoundCost:
    """What one round of exchanges costs.

    Attributes:
        steps: of the round.
        fragments: how many are exchanged in it.
        sent_bytes: that a device sends.
        seconds: of all exchanges, hidden or not.
        exposed_seconds: for which workers wait.
        step_seconds: of a step without exchanges.
    """

    steps: int
    fragments: int
    sent_bytes: float
    seconds: float
    exposed_seconds: float
    step_seconds: float

    @property
    def slowdown(self) -> float:
        """How much longer training takes than without any exchange, as a share."""
        return self.exposed_seconds / (self.steps * self.step_seconds) if self.step_seconds else 0.0


def round_cost(
    elements: int,
    itemsize: int,
    workers: int,
    bits: int | None,
    link: Link,
    step_seconds: float,
    *,
    every: int,
    fragments: int,
    delay: int,
) -> RoundCost:
    """Bytes and seconds of a round.

    Args:
        elements: of a device's share of the parameters.
        itemsize: bytes of each.
        workers: how many exchange.
        bits: that are sent of each; None: all.
        link: between workers, a device's own share of it.
        step_seconds: of a step of a worker.
        every: steps of the round.
        fragments: how many are exchanged in it.
        delay: steps between sending and use.
    """
    kind = exchange_kind(bits)
    size = exchange_size(elements, itemsize, workers, bits)
    one = float(COLLECTIVES[kind](size / fragments, workers, link))
    exposed = fragments * max(0.0, one - delay * step_seconds)
    sent = float(wire_bytes(kind, size, workers))
    return RoundCost(every, fragments, sent, fragments * one, exposed, step_seconds)


def choose_round(
    elements: int,
    itemsize: int,
    workers: int,
    bits: int | None,
    link: Link,
    step_seconds: float,
    *,
    fragments: int | None,
    delay: int,
    blocks: int,
) -> tuple[int, int]:
    """Steps of a round and fragments: the shortest round whose exchanges hide, or take at most `SHARE` of the time.

    Args:
        elements: of a device's share of the parameters.
        itemsize: bytes of each.
        workers: how many exchange.
        bits: that are sent of each; None: all.
        link: between workers.
        step_seconds: of a step of a worker.
        fragments: how many; None: as many as hide behind ``delay`` steps each, up to ``blocks``.
        delay: steps between sending and use.
        blocks: the most fragments that there can be.
    """

    def cost(every: int, parts: int) -> RoundCost:
        return round_cost(
            elements, itemsize, workers, bits, link, step_seconds, every=every, fragments=parts, delay=delay
        )

    if fragments is None:
        counts = range(1, blocks + 1 if delay else 2)
        fragments = min(counts, key=lambda p: (cost(1, p).exposed_seconds, p))
    whole = cost(1, fragments)
    # The link carries one exchange at a time, and no more than a round has time for.
    busy = math.ceil(whole.seconds / step_seconds)
    waiting = math.ceil(whole.exposed_seconds / (SHARE * step_seconds))
    every = max(busy, waiting, fragments, delay + 1)
    return -(-every // fragments) * fragments, fragments
