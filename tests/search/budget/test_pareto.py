"""Prices, and mixes between two of them, against every labeling of small problems."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.search.budget.cutoff import WORTH, Cutoff, PrunedError
from autopar.search.budget.pareto import Frontier, restricted, split_over_layers, within
from autopar.search.solver.minimize import Limits
from autopar.search.solver.problem import Edge, Node, Problem, evaluate


def small(seed: int) -> Problem:
    """Four nodes in a ring, of three labels each, some pairs of which are forbidden."""
    draw = np.random.default_rng(seed)
    nodes = tuple(Node(f"n{i}", draw.integers(0, 9, 3) * 1.0, draw.integers(0, 9, 3) * 1.0) for i in range(4))
    own = np.arange(3, dtype=np.int64)
    tables = [np.where(draw.random((3, 3)) < 0.15, np.inf, draw.integers(0, 5, (3, 3)) * 1.0) for _ in range(4)]
    return Problem(nodes, tuple(Edge(i, (i + 1) % 4, own, own, t) for i, t in enumerate(tables)))


def points(problem: Problem) -> list[tuple[float, float]]:
    every = itertools.product(*(range(len(n.cost)) for n in problem.nodes))
    found = [evaluate(problem, np.array(labels)) for labels in every]
    return [p for p in found if np.isfinite(p[0])]


def frontier(problem: Problem) -> Frontier:
    return Frontier(problem, Limits(1e-9, time.monotonic() + 60))


@given(seed=st.integers(0, 2**32 - 1), budget=st.integers(0, 36))
def test_points_around_a_budget(seed: int, budget: int) -> None:
    problem = small(seed)
    every = points(problem)
    if not every:
        with pytest.raises(InfeasibleError):
            frontier(problem).free()
        return
    fitting = [cost for cost, memory in every if memory <= budget]
    found = frontier(problem)
    if not fitting:
        with pytest.raises(InfeasibleError) as caught:
            found.around(budget)
        assert caught.value.needed == min(memory for _, memory in every)
        return
    over, under = found.around(budget)
    assert evaluate(problem, under.labels) == (under.objective, under.memory)
    assert under.memory <= budget
    assert over is under or over.memory > budget
    # The bound holds for every labeling that fits, and is Lagrange's: on the line between the two points.
    assert found.bound(budget) <= min(fitting) + 1e-6
    if over is not under:
        slope = (under.objective - over.objective) / (over.memory - under.memory)
        line = over.objective + slope * (over.memory - budget)
        assert found.bound(budget) >= line - 1e-3 * abs(line) - 1e-6
    assert min(fitting) <= under.objective + 1e-9


def test_members_are_mixed_as_far_as_they_have_to_be() -> None:
    """Ten alike members that cost a second more and need a byte less each: as many as the budget lacks bytes."""
    node = Node("n", np.array([0.0, 10.0]), np.array([10.0, 0.0]))
    problem = Problem((node, Node("one", np.array([1.0]), np.array([3.0]))), ())
    over, under = frontier(problem).around(9.0)
    found = split_over_layers(over, under, np.array([10, 1]), problem, 9.0)
    assert (found.ends, found.cost, found.memory, found.price) == ((0.4, 1.0), 5.0, 9.0, 1.0)


@given(seed=st.integers(0, 2**32 - 1), budget=st.integers(0, 36), more=st.integers(0, 36))
def test_more_memory_saves_no_more_than_its_price(seed: int, budget: int, more: int) -> None:
    """From the bound at a budget, which the price is a slope of, no labeling of a larger one falls faster."""
    problem = small(seed)
    found = frontier(problem)
    every = points(problem)
    if not any(memory <= budget for _, memory in every):
        return
    counts = np.ones(4, dtype=np.int64)
    mix = within(found, budget, counts, lambda _: [np.ones(3, dtype=bool)] * 4, lambda *_: None)
    best = min(cost for cost, memory in every if memory <= budget + more)
    bound = found.bound(budget)
    assert best >= bound - mix.price * more - 1e-3 * abs(bound) - 1e-6
    cheapest = min(cost for cost, _ in every)
    assert (mix.price == 0.0) == (mix.cost <= cheapest + 1e-6)


def test_restricted_keeps_what_is_chosen() -> None:
    problem = small(3)
    chosen = [np.array([True, False, True])] * 4
    less = restricted(problem, chosen)
    numbers = np.flatnonzero(chosen[0])
    for labels in itertools.product(range(2), repeat=4):
        assert evaluate(less, np.array(labels)) == evaluate(problem, numbers[list(labels)])


def test_a_passed_deadline_still_gives_a_labelling() -> None:
    late = frontier(small(1))
    late.limits = replace(late.limits, deadline=time.monotonic() - 1)
    least = min(memory for _, memory in points(small(1)))
    assert late.around(least + 1)[1].memory <= least + 1


@given(seed=st.integers(0, 2**32 - 1), budget=st.integers(4, 36), seconds=st.integers(1, 30), price=st.floats(0.0, 4.0))
def test_a_rival_ends_the_search_only_where_a_bound_says_so(seed: int, budget: int, seconds: int, price: float) -> None:
    """And its price, tried first, changes no answer that is proved."""
    problem = small(seed)
    fitting = [cost for cost, memory in points(problem) if memory <= budget]
    if not fitting:
        return
    found = Frontier(problem, Limits(1e-9, time.monotonic() + 60), useless=(budget, Cutoff(seconds, price)))
    try:
        _, under = found.around(budget)
    except PrunedError as e:
        assert seconds * (1 - WORTH) <= e.bound <= min(fitting) + 1e-6
        return
    assert under.memory <= budget
    assert found.bound(budget) <= min(fitting) + 1e-6


@given(seed=st.integers(0, 2**32 - 1), budget=st.integers(4, 36))
def test_what_is_taken_over_from_other_memory_bounds_this_one(seed: int, budget: int) -> None:
    first, draw = small(seed), np.random.default_rng(seed + 1)
    if not points(first):
        return
    nodes = tuple(replace(n, memory=draw.integers(0, 9, 3) * 1.0) for n in first.nodes)
    second = frontier(Problem(nodes, first.edges))
    other = frontier(first)
    other.free()
    second.take_over(other)
    fitting = [cost for cost, memory in points(second.problem) if memory <= budget]
    try:
        _, under = second.around(budget)
    except InfeasibleError:
        assert not fitting
        return
    assert under.memory <= budget
    assert second.bound(budget) <= min(fitting) + 1e-6
    assert second.reaches(budget)
