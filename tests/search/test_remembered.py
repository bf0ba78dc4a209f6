"""Budgets: what is done where no row leads to a plan that fits."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from autopar.ir.plan import Plan
from autopar.search.budget.pareto import Frontier
from autopar.search.budget.within_budget import _remembered
from autopar.search.formulation.build import Formulation
from autopar.search.solver.minimize import Limits
from autopar.search.solver.problem import Node, Problem
from tests.search.by_hand import SolvedByHand

COST, ROW = (1.0, 2.0, 4.0, 8.0), (40.0, 30.0, 20.0, 10.0)
"""One node of four labels, each with less in its row than the one before."""


def remembered(peaks: Mapping[float, float], row: float) -> tuple[float, list[float]]:
    """Cost of what is chosen within 25 bytes, and costs of what was measured; ``peaks`` is by cost."""
    measured: list[float] = []

    class Graphs(SolvedByHand):
        def held(self, plan: Plan) -> dict[str, float]:
            measured.append(plan.certificate.objective)
            return {"transient": peaks[plan.certificate.objective]}

    problem = Problem((Node("n", np.array(COST), np.array(ROW)),), ())
    limits = Limits(1e-9, time.monotonic() + 60)
    frontier = Frontier(problem, limits)
    for budget in ROW:
        frontier.around(budget)
    built = Formulation(problem, ())
    found = _remembered(Graphs.of(built, 25.0), built, frontier, row, 0.0, "Lagrangian")
    return found.certificate.objective, measured


def test_the_cheapest_point_that_fits_is_remembered() -> None:
    """The point of least row needs most: recomputing everything at once."""
    assert remembered({1.0: 40.0, 2.0: 26.0, 4.0: 22.0, 8.0: 60.0}, row=31.0) == (4.0, [2.0, 4.0])


def test_where_none_fits_the_least_is_kept() -> None:
    assert remembered({1.0: 40.0, 2.0: 29.0, 4.0: 27.0, 8.0: 60.0}, row=31.0) == (4.0, [2.0, 4.0, 8.0])
    assert remembered({8.0: 60.0}, row=10.0) == (8.0, [8.0])
