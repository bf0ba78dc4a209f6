"""best_chunks finds what trying every way of cutting finds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from autopar.sharding.chunks.sizes import best_chunks


def compositions(units: int) -> Iterator[tuple[int, ...]]:
    """All ways to cut so many units."""
    if units == 0:
        yield ()
    for first in range(1, units + 1):
        for rest in compositions(units - first):
            yield first, *rest


def seconds(
    chunks: Sequence[int], sent: Sequence[float], product: Sequence[float], beside: float, occupies: float
) -> float:
    """Two streams, task by task: the next chunk is gathered when this one is there and the one before multiplied."""
    link = max(sent[chunks[0] - 1] - beside, occupies * sent[chunks[0] - 1])
    kernels = link
    for now, after in itertools.pairwise(chunks):
        begun = max(link, kernels)
        kernels, link = begun + product[now - 1] + occupies * sent[after - 1], begun + sent[after - 1]
    return max(link, kernels) + product[chunks[-1] - 1]


@pytest.mark.parametrize("seed", range(20))
def test_no_way_of_cutting_is_faster(seed: int) -> None:
    draw = random.Random(seed)
    units = draw.randint(1, 7)
    latency, rate, waves = draw.random(), draw.random(), draw.randint(1, 3)
    sent = [n * (latency + rate) for n in range(1, units + 1)]
    product = [float(-(-n // waves)) for n in range(1, units + 1)]
    beside = draw.choice([0.0, draw.random() * sent[-1]])
    occupies = draw.choice([0.0, draw.random()])
    found, chunks = best_chunks(sent, product, beside, occupies)
    assert sum(chunks) == units
    assert found == pytest.approx(seconds(chunks, sent, product, beside, occupies))
    assert found == pytest.approx(min(seconds(c, sent, product, beside, occupies) for c in compositions(units)))


def test_what_is_hidden_already_stays_whole() -> None:
    assert best_chunks([1.0, 2.0], [1.0, 2.0], beside=2.0) == (2.0, (2,))
