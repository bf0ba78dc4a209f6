"""The closed forms against the algorithms that they describe, run step by step on sets of chunks."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.costs.cluster import Link
from autopar.costs.collectives import ALPHA, BETA, COLLECTIVES, FORMS, NODES, SIZE, N, collective_seconds, wire_bytes

LINK = Link("toy", bandwidth=100.0, latency=0.25)
SIZES = st.floats(0, 1e12)
GROUPS = st.integers(1, 4096)
KINDS = sorted(COLLECTIVES)
all_gather, all_reduce, all_to_all = (COLLECTIVES[kind] for kind in ("all_gather", "all_reduce", "all_to_all"))
broadcast, reduce_scatter = (COLLECTIVES[kind] for kind in ("broadcast", "reduce_scatter"))


def ring_all_gather(n: int) -> tuple[int, list[int]]:
    """Steps taken and chunks sent by each device until all devices hold all chunks."""
    held, newest = [{d} for d in range(n)], list(range(n))
    steps, sent = 0, [0] * n
    while any(len(chunks) < n for chunks in held):
        newest = [newest[(d - 1) % n] for d in range(n)]
        for device in range(n):
            held[device].add(newest[device])
            sent[device] += 1
        steps += 1
    return steps, sent


def ring_reduce_scatter(n: int) -> tuple[int, list[int]]:
    """Steps taken and chunks sent until device d holds chunk d with all n contributions."""
    parts = {(device, chunk): {device} for device in range(n) for chunk in range(n)}
    steps, sent = 0, [0] * n
    while any(len(parts[d, d]) < n for d in range(n)):
        before = {key: set(value) for key, value in parts.items()}
        for device in range(n):
            chunk = (device - 1 - steps) % n
            parts[(device + 1) % n, chunk] |= before[device, chunk]
            sent[device] += 1
        steps += 1
    return steps, sent


def pairwise_all_to_all(n: int) -> tuple[int, list[int]]:
    received = [{d} for d in range(n)]
    steps, sent = 0, [0] * n
    while any(len(sources) < n for sources in received):
        steps += 1
        for device in range(n):
            received[(device + steps) % n].add(device)
            sent[device] += 1
    return steps, sent


def tree_scatter_and_ring(n: int) -> tuple[int, list[int]]:
    """Broadcast: every holder of several chunks hands half of them on, then the ring gathers them."""
    held, steps, sent = {0: list(range(n))}, 0, [0] * n
    while any(len(chunks) > 1 for chunks in held.values()):
        for device, chunks in list(held.items()):
            kept = (len(chunks) + 1) // 2
            if len(chunks) > 1:
                held[chunks[kept]] = chunks[kept:]
                held[device] = chunks[:kept]
                sent[device] += len(chunks) - kept
        steps += 1
    ring_steps, ring_sent = ring_all_gather(n)
    return steps + ring_steps, [a + b for a, b in zip(sent, ring_sent, strict=True)]


def both_rings(n: int) -> tuple[int, list[int]]:
    first, second = ring_reduce_scatter(n), ring_all_gather(n)
    return first[0] + second[0], [a + b for a, b in zip(first[1], second[1], strict=True)]


def one_message(n: int) -> tuple[int, list[int]]:
    """All chunks that a device has, to one other."""
    return (1, [n] * n) if n > 1 else (0, [0])


ALGORITHMS: dict[str, Callable[[int], tuple[int, list[int]]]] = {
    "all_gather": ring_all_gather,
    "reduce_scatter": ring_reduce_scatter,
    "all_reduce": both_rings,
    "all_to_all": pairwise_all_to_all,
    "send": one_message,
    "broadcast": tree_scatter_and_ring,
}


@pytest.mark.parametrize("n", range(1, 18))
@pytest.mark.parametrize("kind", KINDS)
def test_closed_form_is_the_algorithm(kind: str, n: int) -> None:
    steps, sent = ALGORITHMS[kind](n)
    size = 840.0 * n  # chunks of 840 bytes
    assert float(wire_bytes(kind, size, n)) == pytest.approx(840 * max(sent))
    seconds = float(COLLECTIVES[kind](size, n, LINK))
    assert seconds == pytest.approx(steps * LINK.latency + 840 * max(sent) / LINK.bandwidth)


def test_figures_by_hand() -> None:
    assert float(all_gather(800, 8, LINK)) == 7 * 0.25 + 7
    assert float(reduce_scatter(800, 8, LINK)) == 7 * 0.25 + 7
    assert float(all_reduce(800, 8, LINK)) == 14 * 0.25 + 14
    assert float(all_to_all(800, 8, LINK)) == 7 * 0.25 + 7
    assert float(broadcast(800, 8, LINK)) == (3 + 7) * 0.25 + 14
    assert float(broadcast(600, 6, LINK)) == (3 + 5) * 0.25 + 10


@pytest.mark.parametrize("kind", KINDS)
@given(size=SIZES)
def test_one_device_communicates_nothing(kind: str, size: float) -> None:
    assert float(COLLECTIVES[kind](size, 1, LINK)) == 0
    assert float(wire_bytes(kind, size, 1)) == 0


@given(size=SIZES, n=GROUPS)
def test_all_reduce_is_reduce_scatter_and_all_gather(size: float, n: int) -> None:
    halves = float(reduce_scatter(size, n, LINK) + all_gather(size, n, LINK))
    assert float(all_reduce(size, n, LINK)) == pytest.approx(halves)


@pytest.mark.parametrize("kind", KINDS)
@given(size=SIZES, more=SIZES, n=GROUPS)
def test_more_bytes_or_devices_never_cost_less(kind: str, size: float, more: float, n: int) -> None:
    cost = COLLECTIVES[kind]
    assert cost(size + more, n, LINK) >= cost(size, n, LINK)
    assert cost(size, n + 1, LINK) >= cost(size, n, LINK)


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_are_priced_like_their_elements(kind: str) -> None:
    sizes, groups = np.array([0.0, 1.0, 3e9])[:, None], np.array([1, 2, 6, 256])
    table = COLLECTIVES[kind](sizes, groups, LINK)
    assert table.shape == (3, 4)
    one_by_one = [[float(COLLECTIVES[kind](float(s), int(n), LINK)) for n in groups] for s in sizes[:, 0]]
    np.testing.assert_array_equal(table, one_by_one)


def test_large_sizes_do_not_overflow_integers() -> None:
    # 2 (n - 1) size exceeds 64 bits here, and int32 arrays are what mesh sizes come in.
    seconds = all_reduce(np.array([2**60]), np.array([4096], dtype=np.int32), LINK)
    assert seconds[0] == pytest.approx(2 * 4095 * 0.25 + 2 * 4095 / 4096 * 2.0**60 / 100)
    assert math.isfinite(seconds[0])


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"'all_reduc'.*known: all_gather"):
        wire_bytes("all_reduc", 1, 2)
    with pytest.raises(ValueError, match="at least one device, got n = 0"):
        all_gather(1, 0, LINK)
    with pytest.raises(ValueError, match="negative number of bytes: -1"):
        broadcast(-1, 2, LINK)


@pytest.mark.parametrize(("n", "levels"), [(2, 1), (3, 2), (4, 2), (64, 6), (65, 7), (2**29, 29)])
def test_depths_of_trees_are_rounded_up(n: int, levels: int) -> None:
    tree = FORMS["all_reduce"]["tree"].subs({SIZE: 920, N: n, NODES: n, ALPHA: 1, BETA: 100})
    assert float(tree) == pytest.approx(2 * levels + (20 if n > 2 else 10))  # of two, each sends every half once
    large = Link("large", 1e30, 1.0, ("tree",))
    assert float(collective_seconds("all_reduce", 1.0, n, large)) == pytest.approx(2 * levels)


def test_a_tree_is_a_chain_in_each_node() -> None:
    link = Link("cards", 100.0, 1.0, ("tree",), neighbors=8)
    assert float(collective_seconds("all_reduce", 92.0, 64, link)) == pytest.approx(2 * (7 + 3) + 2)
    assert float(collective_seconds("all_reduce", 92.0, 16, link)) == pytest.approx(2 * (7 + 1) + 1)  # two nodes


def test_the_fastest_algorithm_is_taken() -> None:
    several = Link("several", 100.0, 1.0, ("ring", "tree", "pat"))
    ring = Link("ring", 100.0, 1.0)
    for kind, n, size in (("all_reduce", 1024, 1.0), ("all_gather", 1024, 1.0), ("reduce_scatter", 512, 1e3)):
        assert collective_seconds(kind, size, n, several) < collective_seconds(kind, size, n, ring)
    assert float(collective_seconds("all_reduce", 92.0, 1024, several)) == pytest.approx(20 + 2)
    assert float(collective_seconds("all_gather", 75.0, 4, several)) == pytest.approx(0.29 * 6 + 0.75)
    for kind in KINDS:  # what is large is bound by bandwidth, which rings use best
        assert collective_seconds(kind, 1e9, 8, several) == collective_seconds(kind, 1e9, 8, ring)
        sizes = np.array([1.0, 1e3, 1e9])
        both = [collective_seconds(kind, sizes, 64, link) for link in (several, ring)]
        assert np.all(both[0] <= both[1])
    only_trees = Link("trees", 100.0, 1.0, ("tree",))
    assert float(collective_seconds("all_to_all", 800, 8, only_trees)) == 14.0
