"""Budgets: what is done where no row leads to a plan that fits."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from autopar.ir.plan import Certificate, Plan
from autopar.search.budget.pareto import Frontier
from autopar.search.budget.tighten import remembered_plan
from autopar.search.formulation.build import Formulation
from autopar.search.solver.layer_mix import LayerMix
from autopar.search.solver.minimize import Limits
from autopar.search.solver.problem import Node, Problem
from tests.plans import hand_plan, tiny
from tests.search.budget.test_within_budget import hand_made

COST, ROW = (1.0, 2.0, 4.0, 8.0), (40.0, 30.0, 20.0, 10.0)
"""One node of four labels, each with less in its row than the one before."""


def remembered(peaks: Mapping[float, float], row: float) -> tuple[float, list[float]]:
    """Cost of what is chosen within 25 bytes, and costs of what was measured; ``peaks`` is by cost."""
    program, _ = tiny()
    plan = hand_plan(program, {"a": 2})
    measured: list[float] = []

    def read(mix: LayerMix, bound: float) -> Plan:
        return replace(plan, certificate=Certificate(mix.cost, bound, "", "prices"))

    def peak(plan: Plan) -> dict[str, float]:
        measured.append(plan.certificate.objective)
        return {"transient": peaks[plan.certificate.objective]}

    problem = Problem((Node("n", np.array(COST), np.array(ROW)),), ())
    limits = Limits(1e-9, time.monotonic() + 60)
    frontier = Frontier(problem, limits)
    for budget in ROW:
        frontier.around(budget)
    task = hand_made(limits, 25.0, Formulation(problem, ()), read, peak)
    found = remembered_plan(task, Formulation(problem, ()), frontier, row, 0.0, "prices")
    return found.certificate.objective, measured


def test_the_cheapest_point_that_fits_is_remembered() -> None:
    """The point of least row needs most: recomputing everything at once."""
    assert remembered({1.0: 40.0, 2.0: 26.0, 4.0: 22.0, 8.0: 60.0}, row=31.0) == (4.0, [2.0, 4.0])


def test_where_none_fits_the_least_is_kept() -> None:
    assert remembered({1.0: 40.0, 2.0: 29.0, 4.0: 27.0, 8.0: 60.0}, row=31.0) == (4.0, [2.0, 4.0, 8.0])
    assert remembered({8.0: 60.0}, row=10.0) == (8.0, [8.0])
