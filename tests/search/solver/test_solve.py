"""The solver against brute force, and its certificate on a problem of real size."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.search.budget.lagrangian import solve
from autopar.search.budget.pareto import Frontier
from autopar.search.solver import minimize as minimize
from autopar.search.solver.problem import Edge, Node, Problem, Solution, evaluate
from tests.search.brute import brute_force, random_problem
from tests.search.synthetic import synthetic_problem

HERE = Path(__file__).parent
problems = st.builds(
    random_problem,
    seed=st.integers(0, 10**6),
    nodes=st.integers(1, 6),
    density=st.sampled_from([0.5, 1.5, 2.5, 4.0]),
    scale=st.sampled_from([1e-6, 1e-3, 1.0]),
    forbid=st.sampled_from([0.0, 0.1, 0.4]),
    heavy=st.sampled_from([0.0, 0.5, 1.0]),
)


def check(problem: Problem) -> None:
    """Objective equal to brute force, honest bound."""
    best, _ = brute_force(problem, None)
    if not np.isfinite(best):
        with pytest.raises(InfeasibleError):
            solve(problem, gap=0.0)
        return
    found = solve(problem, gap=0.0)
    assert found.objective == pytest.approx(best, rel=1e-9, abs=1e-300)
    check_certificate(problem, found)
    assert found.lower_bound <= best * (1 + 1e-9)
    assert found.gap <= 1e-8


def check_certificate(problem: Problem, found: Solution) -> None:
    """What the solution says of itself is true."""
    assert (found.objective, found.memory) == evaluate(problem, found.labels)
    assert found.lower_bound <= found.objective


@settings(max_examples=120, deadline=None, derandomize=True)
@given(problems)
def test_minimum_equals_brute_force(problem: Problem) -> None:
    """Of problems of all kinds."""
    check(problem)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(problems, st.integers(0, 20))
def test_the_frontier_is_true_of_every_budget(problem: Problem, tens: int) -> None:
    """From none at all to ample: what fits is found where brute force finds any, and no bound is above its best."""
    budget, frontier = tens * 1e10, Frontier(problem, minimize.Limits(0.0, math.inf))
    best, least = brute_force(problem, budget)
    if not np.isfinite(best):
        with pytest.raises(InfeasibleError) as caught:
            frontier.around(budget)
        assert caught.value.needed == (pytest.approx(least) if np.isfinite(least) else None)
        return
    _, under = frontier.around(budget)
    assert (under.objective, under.memory) == evaluate(problem, under.labels)
    assert under.memory <= budget * (1 + 1e-12)
    assert frontier.bound(budget) <= best * (1 + 1e-9) <= under.objective * (1 + 2e-9)


@pytest.mark.parametrize("seed", range(40))
def test_messages_and_ilp_without_folding(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small problems fold away; with folding off they take the paths of large ones."""
    monkeypatch.setattr(minimize, "LEVELS", ((0, 1), (0, 1), (0, 1)))
    problem = random_problem(seed, 6, 3.0, 1e-3, 0.05 * (seed % 3), 0.7)
    check(problem)


@pytest.mark.parametrize("seed", range(10))
def test_factors_of_three_nodes_reach_the_ilp(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folding stopped half way leaves tables over three nodes."""
    monkeypatch.setattr(minimize, "LEVELS", ((2, 10), (3, 20), (3, 30)))
    problem = random_problem(seed, 7, 3.0, 1e-3, 0.02, 0.4)
    check(problem)


@pytest.mark.parametrize("seed", range(20))
def test_windows_above_the_bound_hold_the_minimum(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Narrow ones are empty, wide ones hold several labelings; of those that are too large the bound holds still."""
    monkeypatch.setattr(minimize, "LEVELS", ((0, 1), (0, 1), (0, 1)))
    monkeypatch.setattr(minimize, "FIRST_WINDOW", 1e-4)
    monkeypatch.setattr(minimize, "MAX_SWEEPS", 4)
    problem = random_problem(seed, 7, 3.0, 1e-3, 0.05 * (seed % 3), 0.7)
    best, _ = brute_force(problem, None)
    if not np.isfinite(best):
        with pytest.raises(InfeasibleError):
            solve(problem, gap=0.0)
        return
    found = solve(problem, gap=0.0)
    assert found.objective == pytest.approx(best, rel=1e-8)
    assert found.lower_bound == pytest.approx(best, rel=1e-8)
    monkeypatch.setattr(minimize, "MOST_COLUMNS", 0)
    check_certificate(problem, large := solve(problem, gap=0.0))
    assert large.lower_bound <= best * (1 + 1e-9) <= large.objective * (1 + 2e-9)


def test_a_time_limit_of_zero_gives_an_incumbent_or_says_it_is_infeasible() -> None:
    """The bound stays valid."""
    problem = random_problem(3, 6, 3.0, 1.0, 0.0, 1.0)
    best, _ = brute_force(problem, None)
    found = solve(problem, time_limit=0.0)
    check_certificate(problem, found)
    assert found.lower_bound <= best * (1 + 1e-9)


def test_empty_problem() -> None:
    """Nothing to choose costs nothing."""
    found = solve(Problem((), ()))
    assert (found.objective, found.memory, len(found.labels)) == (0.0, 0.0, 0)


def test_ties_take_the_lowest_label() -> None:
    """Equal labels, alone and on an edge."""
    node = Node("a", np.zeros(3), np.zeros(3))
    edge = Edge(0, 1, np.arange(3), np.arange(3), np.zeros((3, 3)))
    assert solve(Problem((node, node), (edge,))).labels.tolist() == [0, 0]


@pytest.mark.deep
def test_real_size_reaches_the_gap() -> None:
    """About 350 nodes of up to 64 labels."""
    problem = synthetic_problem()
    assert 330 <= len(problem.nodes) <= 380
    free = solve(problem, time_limit=600)
    check_certificate(problem, free)
    assert free.gap <= 1e-3


@pytest.mark.deep
def test_same_labels_under_any_hash_seed() -> None:
    """In fresh processes."""
    script = (
        "from tests.search.brute import random_problem\nfrom autopar.search.budget.lagrangian import solve\n"
        "p = random_problem(0, 40, 1.6, 1e-3, 0.0, 0.5)\nfree = solve(p)\n"
        "print(free)"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(HERE.parents[2]), "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("0", "1", "12345")
    }  # fmt: skip
    assert len(outputs) == 1
    assert "labels" in outputs.pop()
