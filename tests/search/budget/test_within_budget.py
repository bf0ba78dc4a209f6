"""Rows that are tightened until a plan fits: on a problem of one variable, whose graph is a function."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopar.errors import InfeasibleError
from autopar.ir.plan import Plan
from autopar.search.budget.within_budget import SMALL, plan_within
from autopar.search.formulation.build import Formulation
from autopar.search.formulation.variables.variable import Variable
from autopar.search.solver.layer_mix import LayerMix
from autopar.search.solver.problem import Node, Problem
from tests.search.by_hand import SolvedByHand


def test_a_row_that_nothing_fits_is_loosened_where_its_least_plan_has_room() -> None:
    """The free plan needs much besides its row, so that the first row is too tight for any; the others need nothing."""
    cost = np.arange(11.0)
    variable = Variable("n", 1, {}, {}, None, cost, 10 - cost, np.zeros(11, dtype=np.int64), working=np.ones(11))
    built = Formulation(Problem((Node("n", cost, 10 - cost),), ()), (variable,))

    class Graphs(SolvedByHand):
        def held(self, plan: Plan) -> dict[str, float]:
            return {"all": 100.0 if plan.certificate.objective == 0 else 10 - plan.certificate.objective}

    found = plan_within(Graphs.of(built, 6.0))
    assert found.certificate.objective == 4.0
    assert found.predicted.peak_bytes == {"all": 6.0}


def test_states_between_two_prices_are_found_where_nothing_repeats() -> None:
    """A knapsack: prices keep what saves most a byte, after which nothing else fits; the two others save more."""
    other = 600  # further layouts, so that the whole problem is too large to be closed exactly
    costs, sizes = (7.0, 5.0, 5.0), (6.0, 5.0, 5.0)
    variables, nodes = [], []
    for i, (cost, size) in enumerate(zip(costs, sizes, strict=True)):
        seconds = np.concatenate([[0.0, cost], np.full(other, 1e3)])
        memory = np.concatenate([[size, 0.0], np.full(other, size)])
        candidate = np.concatenate([[0, 0], np.arange(1, other + 1)])
        one = np.ones(other + 2)
        variables.append(Variable(f"n{i}", 1, {}, {}, None, seconds, memory, candidate, working=one))
        nodes.append(Node(f"n{i}", seconds, memory))
    built = Formulation(Problem(tuple(nodes), ()), tuple(variables))
    assert 3 * (other + 2) > SMALL

    class Graphs(SolvedByHand):
        def plan(self, built: Formulation, mix: LayerMix, bound: float, method: str) -> Plan:
            plan = super().plan(built, mix, bound, method)
            return replace(plan, predicted=replace(plan.predicted, peak_bytes={"all": mix.memory}))

        def held(self, plan: Plan) -> dict[str, float]:
            return dict(plan.predicted.peak_bytes)

    found = plan_within(Graphs.of(built, 10.0))
    assert found.certificate.objective == 7.0
    assert found.certificate.lower_bound <= 7.0


def test_what_no_row_has_room_for_is_measured_once() -> None:
    """The row holds for all plans, so that nothing else is tried."""
    cost, measured = np.arange(11.0), []
    variable = Variable("n", 1, {}, {}, None, cost, 20 - cost, np.zeros(11, dtype=np.int64), working=np.ones(11))
    built = Formulation(Problem((Node("n", cost, 20 - cost),), ()), (variable,))

    class Graphs(SolvedByHand):
        def held(self, plan: Plan) -> dict[str, float]:
            measured.append(plan)
            return {"all": 20 - plan.certificate.objective}

    with pytest.raises(InfeasibleError, match="no plan was found that needs less than 10 B"):
        plan_within(Graphs.of(built, 6.0, seconds=10.0))
    assert [plan.certificate.objective for plan in measured] == [10.0]
