"""Groups of layers against every choice of labels for each, and what mixes of them cost."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.search.budget.lagrangian import fits
from autopar.search.budget.layer_groups import group_sizes, in_groups
from autopar.search.solver.layer_mix import LayerMix, mix_of, weights
from autopar.search.solver.problem import Edge, Ints, Node, Problem, locate

BLOCKS = 3
COUNTS = np.array([1, BLOCKS, BLOCKS], dtype=np.int64)
"""Members of each class: one in front of the blocks, two in each."""


def small(seed: int) -> Problem:
    """A ring of three nodes of two labels, and now and then a forbidden pair."""
    draw = np.random.default_rng(seed)
    own = np.arange(2, dtype=np.int64)
    nodes = tuple(Node(f"n{i}", draw.integers(0, 9, 2) * 3.0, draw.integers(0, 9, 2) * 3.0) for i in range(3))
    tables = [np.where(draw.random((2, 2)) < 0.1, np.inf, draw.integers(0, 5, (2, 2)) * 3.0) for _ in range(3)]
    return Problem(nodes, tuple(Edge(i, (i + 1) % 3, own, own, t) for i, t in enumerate(tables)))


def by_hand(problem: Problem, ends: tuple[float, ...]) -> list[tuple[float, float]]:
    """Seconds and bytes of all choices for groups of blocks; what is in front of them has one label in all groups."""
    share = weights(ends, COUNTS)
    found = []
    for front, *rest in itertools.product(range(2), repeat=1 + 2 * len(ends)):
        labels = np.array([[front, *rest[2 * g : 2 * g + 2]] for g in range(len(ends))])
        # The one in front is taken by all blocks, whoever's its time is: no group may have a forbidden pair.
        if any(np.isinf(e.table[own[e.u], own[e.v]]) for own in labels for e in problem.edges):
            continue
        cost = size = 0.0
        for weight, own in zip(share, labels, strict=True):
            cost += sum(w * n.cost[x] for w, n, x in zip(weight, problem.nodes, own, strict=True))
            cost += sum(weight[e.v] * e.table[own[e.u], own[e.v]] for e in problem.edges)
            size += sum(w * n.memory[x] for w, n, x in zip(weight, problem.nodes, own, strict=True))
        found.append((float(cost), float(size)))
    return found


@given(blocks=st.integers(1, 130))
def test_a_few_groups_are_all_blocks(blocks: int) -> None:
    sizes = group_sizes(blocks)
    assert sum(sizes) == blocks
    assert len(sizes) <= 4
    assert min(sizes) == sizes[-1] == 1 if blocks > 1 else sizes == [1]


@pytest.mark.parametrize("blocks", range(1, 9))
def test_of_few_blocks_any_number_is_a_sum_of_groups(blocks: int) -> None:
    sums = {0}
    for size in group_sizes(blocks):
        sums |= {n + size for n in sums}
    assert sums == set(range(blocks + 1))


@given(seed=st.integers(0, 2**32 - 1), budget=st.integers(0, 72))
def test_groups_are_as_good_as_every_choice(seed: int, budget: int) -> None:
    problem = small(seed)
    every = [np.ones(2, dtype=bool)] * 3
    points = [locate(problem, np.array(labels)) for labels in itertools.product(range(2), repeat=3)]
    known = [p for p in points if np.isfinite(p.objective) and fits(p.memory, budget)]
    if not known:
        return
    worst = LayerMix.of(max(known, key=lambda p: p.objective), price=1.5)
    found = in_groups(problem, every, COUNTS, budget, worst, 1e-9)
    # A block of the one kind and two of the other, in one order or the other.
    orders = [by_hand(problem, ends) for ends in ((2 / 3, 1.0), (1 / 3, 1.0))]
    least, other = (min((cost for cost, size in every if fits(size, budget)), default=np.inf) for every in orders)
    assert min(least, other) - 1e-4 <= found.cost <= min(least, worst.cost) + 1e-4
    assert fits(found.memory, budget)
    assert found.price == 1.5
    again = mix_of(problem, found.labelings, found.ends, COUNTS)
    assert (found.cost, found.memory) == (again.cost, again.memory)


def test_a_layer_in_a_third_way_closes_what_two_leave() -> None:
    """Of three layers that keep 6 for 6 seconds and 4 for 4, within 10 bytes: all of one, and the other of another."""
    own = np.array([0.0, 3 * 6.0]), np.array([3 * 6.0, 0.0])
    other = np.array([0.0, 3 * 4.0]), np.array([3 * 4.0, 0.0])
    problem = Problem((Node("six", *own), Node("four", *other)), ())
    counts = np.array([3, 3], dtype=np.int64)
    nothing: Ints = np.ones(2, dtype=np.int64)
    found = in_groups(problem, [np.ones(2, dtype=bool)] * 2, counts, 10.0, LayerMix.of(locate(problem, nothing)), 1e-9)
    assert (found.cost, found.memory) == pytest.approx((20.0, 10.0))


def test_what_keeps_little_comes_first() -> None:
    node = Node("n", np.array([0.0, 8.0]), np.array([8.0, 0.0]))
    problem = Problem((node,), ())
    nothing = LayerMix.of(locate(problem, np.array([1])))
    found = in_groups(problem, [np.ones(2, dtype=bool)], np.array([8]), 5.0, nothing, 1e-9)
    assert [int(labels[0]) for labels in found.labelings] == [1, 0]
    assert found.ends == (3 / 8, 1.0)
