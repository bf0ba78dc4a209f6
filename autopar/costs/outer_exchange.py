"""What exchanges among workers cost, and how often to exchange so that this hides: closed forms.

A round of H steps exchanges every fragment once. Of P fragments that take ``E`` seconds together, each is sent at its
turn and used ``delay`` steps later, which hide ``delay`` steps of its ``E / P`` seconds. Workers wait for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.costs.cluster import Link
from autopar.costs.collectives import COLLECTIVES, wire_bytes

SHARE = 0.05
"""The share of a run's time that may be spent waiting for exchanges where they do not hide."""

BLOCK, SCALE = 256, 4
"""Quantized numbers that share a scale, and its bytes."""

FLOAT = 4
"""Bytes of a number while it is quantized."""

INDEX = 4
"""Bytes of the index of a number that is sent by itself."""


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
    return workers * quantized_bytes(elements, bits)


def quantized_bytes(elements: int, bits: int) -> int:
    """Bytes that stand for some numbers: the codes of whole blocks, and their scales.

    >>> quantized_bytes(300, 8), quantized_bytes(256, 4)
    (520, 132)
    """
    return -(-elements // BLOCK) * (BLOCK * bits // 8 + SCALE)


def quantizing(elements: float, itemsize: int, bits: int) -> tuple[float, int]:
    """Bytes that kernels read and write to quantize some numbers, and how many kernels there are.

    Counted in `autopar.ir.quantized.blocks.quantize`: magnitudes, their largest, ratios, three steps to whole numbers,
    codes and a copy of these; and a cast of what is not in float32.
    """
    cast = 0 if itemsize == FLOAT else itemsize + FLOAT
    return elements * (51 + cast + 5 * (bits == 4)), 11 + (cast > 0) + 4 * (bits == 4)


def dequantizing(elements: float, itemsize: int, bits: int, rows: int = 0) -> tuple[float, int]:
    """The same of numbers that come from bytes; of ``rows`` each of which is added to those before it."""
    cast = 0 if itemsize == FLOAT else itemsize + FLOAT
    added = 3 * FLOAT * (rows > 0)
    moved = elements * (13 + 14 * (bits == 4) + added) + elements / max(rows, 1) * cast
    return moved, max(rows, 1) * (5 + 4 * (bits == 4) + (rows > 0)) + (cast > 0)


def is_low_rank(shape: tuple[int, ...], rank: int) -> bool:
    """Whether two factors of a rank are fewer numbers than the matrix of these sizes, dims after the first as one.

    >>> is_low_rank((16, 32), 2), is_low_rank((4, 3), 2), is_low_rank((512,), 2)
    (True, False, False)
    """
    rows, columns = matrix_of(shape)
    return len(shape) > 1 and rank * (rows + columns) < rows * columns


def matrix_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tensor whose dims after the first are one."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def largest_of(elements: int, share: float) -> int:
    """How many of some numbers are a share of them."""
    return math.ceil(share * elements)


def piece_of(elements: int, workers: int) -> int:
    """The largest of as many pieces of some numbers as there are workers."""
    return -(-elements // workers)


def compressed_collectives(
    method: str, shapes: Sequence[tuple[int, ...]], itemsize: int, workers: int, how: float
) -> list[tuple[str, int]]:
    """Kinds and sizes in bytes of the collectives of one step with compressed gradients, see `COLLECTIVES`.

    Args:
        method: ``powersgd``, ``topk`` or ``onebit``; ``""``: a plain mean.
        shapes: of a device's shards.
        itemsize: bytes of each number.
        workers: how many exchange.
        how: rank of ``powersgd``, share of ``topk``.

    >>> compressed_collectives("powersgd", [(16, 32), (16,)], 4, 2, 2)
    [('all_reduce', 192), ('broadcast', 128), ('all_reduce', 256)]
    >>> compressed_collectives("topk", [(16, 32), (16,)], 4, 2, 0.1)
    [('all_gather', 864)]
    >>> compressed_collectives("onebit", [(16, 32), (16,)], 4, 2, 0)
    [('all_to_all', 82), ('all_gather', 82)]
    """
    counts = [math.prod(shape) for shape in shapes]
    if method == "powersgd":
        low = [matrix_of(s) for s in shapes if is_low_rank(s, int(how))]
        whole = sum(n for s, n in zip(shapes, counts, strict=True) if not is_low_rank(s, int(how)))
        left, right = (int(how) * sum(sizes) for sizes in (zip(*low, strict=True) if low else ((), ())))
        sizes = ("all_reduce", left + whole), ("broadcast", left), ("all_reduce", right)
        return [(kind, size * itemsize) for kind, size in sizes if size]
    if method == "topk":
        return [("all_gather", workers * sum(largest_of(n, how) for n in counts) * (itemsize + INDEX))]
    if method == "onebit":
        row = sum(-(-piece_of(n, workers) // 8) + itemsize for n in counts)
        return [("all_to_all", workers * row), ("all_gather", workers * row)]
    return [("all_reduce", sum(counts) * itemsize)]


@dataclass(frozen=True)
class ExchangeCost:
    """What the exchange of one step costs.

    Attributes:
        sent_bytes: that a device sends.
        seconds: for which all wait.
    """

    sent_bytes: float
    seconds: float


def exchange_cost(collectives: Sequence[tuple[str, int]], workers: int, link: Link) -> ExchangeCost:
    """Bytes and seconds of collectives that come one after another.

    Args:
        collectives: kinds and sizes.
        workers: how many take part.
        link: between them, a device's own share of it.
    """
    sent = sum(float(wire_bytes(kind, size, workers)) for kind, size in collectives)
    return ExchangeCost(sent, sum(float(COLLECTIVES[kind](size, workers, link)) for kind, size in collectives))


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
    before: float = 0.0,
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
        before: seconds before each exchange in which workers agree on it, see `meeting_seconds`.
    """
    kind = exchange_kind(bits)
    size = exchange_size(elements, itemsize, workers, bits)
    one = before + float(COLLECTIVES[kind](size / fragments, workers, link))
    exposed = fragments * max(0.0, one - delay * step_seconds)
    sent = float(wire_bytes(kind, size, workers))
    return RoundCost(every, fragments, sent, fragments * one, exposed, step_seconds)


LOOKS, TRIPS = 1, 14
"""Of a meeting at a store, where all come at once: waits until the next look at it, and questions that take a while."""


def meeting_seconds(link: Link, pause: float) -> float:
    """What a meeting of elastic workers takes beside its exchange, where all come at the same time.

    A worker asks the store one thing after another, however many others there are, and looks again after a pause for
    what they have not written yet.

    Args:
        link: to the store.
        pause: seconds between two looks.

    >>> round(meeting_seconds(Link("far", bandwidth=1e9, latency=0.02), 0.02), 3)
    0.58
    """
    return TRIPS * 2 * link.latency + LOOKS * pause


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
    before: float = 0.0,
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
        before: seconds before each exchange, as of `round_cost`.
    """

    def cost(every: int, parts: int) -> RoundCost:
        return round_cost(
            elements, itemsize, workers, bits, link, step_seconds,
            every=every, fragments=parts, delay=delay, before=before,
        )  # fmt: skip

    if fragments is None:
        counts = range(1, blocks + 1 if delay else 2)
        fragments = min(counts, key=lambda p: (cost(1, p).exposed_seconds, p))
    whole = cost(1, fragments)
    # The link carries one exchange at a time, and no more than a round has time for.
    busy = math.ceil(whole.seconds / step_seconds)
    waiting = math.ceil(whole.exposed_seconds / (SHARE * step_seconds))
    every = max(busy, waiting, fragments, delay + 1)
    return -(-every // fragments) * fragments, fragments
