"""The check of a certificate: never above the optimum, as good as the linear program, and refutes what is wrong."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

import autopar
from autopar import Search
from autopar.errors import CertificateError
from autopar.search.budget import within_budget as budget
from autopar.search.budget.lagrangian import solve
from autopar.search.solver import certify
from autopar.search.solver.certify import Claim, Messages, recount, verified_bound
from autopar.search.solver.duals import examine, relax, require_cost
from autopar.search.solver.layer_mix import LayerMix
from autopar.search.solver.problem import Edge, Node, Problem, evaluate
from tests import models as zoo
from tests.search.brute import brute_force, random_problem
from tests.test_structure import ROOT, parse

problems = st.builds(
    random_problem,
    seed=st.integers(0, 10**6),
    nodes=st.integers(1, 5),
    density=st.sampled_from([0.5, 1.5, 3.0]),
    scale=st.sampled_from([1e-6, 1e-3, 1.0]),
    forbid=st.sampled_from([0.0, 0.1, 0.4]),
    heavy=st.sampled_from([0.0, 1.0]),
)


def drawn(problem: Problem, seed: int, scale: float) -> Messages:
    """Messages that nobody has thought about."""
    draw = np.random.default_rng(seed)
    return [tuple(scale * draw.normal(size=n) for n in e.table.shape) for e in problem.edges]  # type: ignore[misc]


@given(problems, st.integers(0, 100))
def test_no_messages_prove_more_than_is_true(problem: Problem, seed: int) -> None:
    best, _ = brute_force(problem, None)
    for scale in (0.0, 1e-6, 1e-3, 1.0):
        assert verified_bound(problem, drawn(problem, seed, scale)) <= best


@given(problems, st.integers(0, 8), st.sampled_from([0.0, 1e-12, 1e-10, 1e-7]))
def test_nor_within_a_budget_at_any_price(problem: Problem, tens: int, price: float) -> None:
    size = tens * 1e10
    best, _ = brute_force(problem, size)
    messages, _ = relax(problem, price, 10.0)
    assert verified_bound(problem, messages, price, size) <= best


def linear_program(problem: Problem, price: float) -> float:
    """The optimum over the local polytope, by another solver from another matrix; inf if there is no point."""
    sizes = [len(n.cost) for n in problem.nodes] + [e.table.size for e in problem.edges]
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
    cost = np.concatenate(
        [*(n.cost + price * n.memory for n in problem.nodes), *(e.table.ravel() for e in problem.edges)]
    )
    rows, right = [], []
    for i in range(len(problem.nodes)):
        row = np.zeros(first[-1])
        row[first[i] : first[i + 1]] = 1.0
        rows.append(row)
        right.append(1.0)
    for k, e in enumerate(problem.edges, len(problem.nodes)):
        where = np.arange(e.table.size).reshape(e.table.shape)
        if e.u == e.v:  # the pair of a node with itself is decided by its label
            for a, b in np.ndindex(e.table.shape):
                row = np.zeros(first[-1])
                row[first[k] + where[a, b]] = 1.0
                row[first[e.u] + np.flatnonzero((e.u_group == a) & (e.v_group == b))] = -1.0
                rows.append(row)
                right.append(0.0)
            continue
        for node, group, axis in ((e.u, e.u_group, 0), (e.v, e.v_group, 1)):
            for g in range(e.table.shape[axis]):
                row = np.zeros(first[-1])
                row[first[k] + where.take(g, axis)] = 1.0
                row[first[node] + np.flatnonzero(group == g)] = -1.0
                rows.append(row)
                right.append(0.0)
    finite = np.isfinite(cost)
    bounds = [(0, None if f else 0) for f in finite]
    found = linprog(np.where(finite, cost, 0.0), A_eq=np.array(rows), b_eq=right, bounds=bounds, method="highs")
    return float(found.fun) if found.status == 0 else float("inf")


@pytest.mark.parametrize("seed", range(40))
def test_the_verified_bound_is_the_linear_program(seed: int) -> None:
    problem = random_problem(seed, 6, 2.5, 1.0, 0.05 * (seed % 4), 0.5)
    price = 1e-11 * (seed % 3)
    least = linear_program(problem, price)
    if np.isfinite(least):
        found = verified_bound(problem, relax(problem, price, 10.0)[0], price)
        assert found == pytest.approx(least, rel=1e-6, abs=1e-8)


def test_what_only_branching_proves_is_neither_verified_nor_refuted() -> None:
    """Three nodes that all want to differ, with two labels: the linear program gives each half of both."""
    node, own = Node("n", np.zeros(2), np.zeros(2)), np.arange(2)
    problem = Problem((node,) * 3, tuple(Edge(i, (i + 1) % 3, own, own, np.eye(2)) for i in range(3)))
    found = solve(problem, gap=0.0)
    assert found.lower_bound == found.objective == 1.0
    assert examine(Claim(problem, found.lower_bound), 10.0) == pytest.approx(0.0, abs=1e-9)


def test_sums_are_rounded_down_and_by_little() -> None:
    problem = random_problem(7, 6, 3.0, 1.0, 0.0, 1.0)
    messages, price, size = drawn(problem, 1, 0.1), 1e-11, 3e10
    own = [[Fraction(c) + Fraction(price) * Fraction(m) for c, m in zip(n.cost, n.memory, strict=True)]
           for n in problem.nodes]  # fmt: skip
    exact = -Fraction(price) * Fraction(size)
    for e, (at_u, at_v) in zip(problem.edges, messages, strict=True):
        table = [[Fraction(x) for x in row] for row in e.table]
        if e.u == e.v:
            own[e.u] = [c + table[a][b] for c, a, b in zip(own[e.u], e.u_group, e.v_group, strict=True)]
            continue
        own[e.u] = [c - Fraction(at_u[g]) for c, g in zip(own[e.u], e.u_group, strict=True)]
        own[e.v] = [c - Fraction(at_v[g]) for c, g in zip(own[e.v], e.v_group, strict=True)]
        pairs = np.ndindex(e.table.shape)
        exact += min(table[a][b] + Fraction(at_u[a]) + Fraction(at_v[b]) for a, b in pairs)
    exact += sum(map(min, own))
    found = verified_bound(problem, messages, price, size)
    assert Fraction(found) <= exact
    assert float(exact) - found <= 1e-13


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_messages_and_prices_that_prove_nothing_are_refused(bad: float) -> None:
    node = Node("n", np.zeros(2), np.ones(2))
    problem = Problem((node, node), (Edge(0, 1, np.arange(2), np.arange(2), np.zeros((2, 2))),))
    for message, price in ((bad, 0.0), (0.0, bad), (0.0, -1.0)):
        with pytest.raises(ValueError, match="prove nothing"):
            verified_bound(problem, [(np.full(2, message), np.zeros(2))], price)


@given(problems, st.integers(0, 10**6))
def test_recount_is_evaluate(problem: Problem, seed: int) -> None:
    draw = np.random.default_rng(seed)
    labels = np.array([draw.integers(len(n.cost)) for n in problem.nodes])
    cost, memory = evaluate(problem, labels)
    again = recount(problem, [labels], [[1.0] * len(labels)])
    assert again[0] == pytest.approx(cost, rel=1e-12)
    assert again[1] == (pytest.approx(memory) if np.isfinite(cost) else np.inf)


@pytest.mark.parametrize("seed", range(6))
def test_a_bound_too_high_by_a_hundredth_is_refuted(seed: int) -> None:
    problem = random_problem(seed, 12, 1.0, 1e-3, 0.0, 1.0)
    found = solve(problem, gap=0.0)
    assert examine(Claim(problem, found.lower_bound), 10.0) <= found.objective
    with pytest.raises(CertificateError, match=r"claims that no labeling costs less than .* please report it"):
        examine(Claim(problem, 1.01 * found.objective + 1e-9), 10.0)


def test_another_cost_than_that_of_the_choice_is_refuted() -> None:
    problem = random_problem(3, 6, 1.5, 1.0, 0.0, 1.0)
    found = solve(problem)
    mix = LayerMix((found.labels,), (1.0,), found.objective, found.memory)
    require_cost(problem, mix, [1] * 6)
    for wrong in (replace(mix, cost=0.99 * mix.cost), replace(mix, memory=0.99 * mix.memory)):
        with pytest.raises(CertificateError, match="the search counts"):
            require_cost(problem, wrong, [1] * 6)


def mlp_plan(check: bool = True, rows: int = 8, **options: Any) -> autopar.Plan:
    model, batch = zoo.mlp(hidden=64, ffn=256, batch=rows)
    options = {"axes": {"a": 2, "b": 2}, **options}
    return autopar.plan(model, batch, cluster="cpu", search=Search(check=check), **options)


def test_plans_carry_the_checked_bound() -> None:
    certificate = mlp_plan().certificate
    assert certificate.checked == pytest.approx(certificate.lower_bound, rel=1e-3)
    assert certificate.checked <= certificate.objective
    assert "verified from duals" in mlp_plan().summary()
    assert mlp_plan(check=False).certificate.checked is None


@pytest.mark.deep
def test_on_three_axes_and_with_little_memory() -> None:
    """What the layouts of one plan need at least, which the last search on three axes finds, bounds no other plan."""
    size = 0.9 * sum(mlp_plan(check=False, rows=512).predicted.peak_bytes.values())
    for axes in ({"a": 2, "b": 2}, {"a": 2, "b": 2, "c": 1}):
        found = mlp_plan(rows=512, memory=size, axes=axes).certificate
        assert found.checked is not None
        assert found.lower_bound * (1 - 1e-8) <= found.checked <= found.objective


def test_a_search_that_forgets_labels_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """It calls the best of what it has not forgotten the best of all."""

    def forgetful(problem: Problem, **options: Any) -> Any:
        best = solve(problem, **options).labels
        heavy = int(np.argmax([n.cost[x] for n, x in zip(problem.nodes, best, strict=True)]))
        node = problem.nodes[heavy]
        less = replace(node, cost=np.where(np.arange(len(node.cost)) == best[heavy], np.inf, node.cost))
        return solve(replace(problem, nodes=(*problem.nodes[:heavy], less, *problem.nodes[heavy + 1 :])), **options)

    monkeypatch.setattr(budget, "solve", forgetful)
    assert mlp_plan(check=False).certificate.gap <= 3e-3
    with pytest.raises(CertificateError):
        mlp_plan()


def test_the_check_shares_nothing_with_the_search_but_the_problem() -> None:
    _, name, imported = parse((ROOT / "autopar/search/solver/certify.py").relative_to(ROOT))
    assert name == certify.__name__
    assert {m for m in imported if m.startswith("autopar")} == {"autopar.search.solver.problem"}
