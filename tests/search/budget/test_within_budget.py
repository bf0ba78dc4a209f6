"""Rows that are tightened until a plan fits: on a problem of one variable, whose graph is a function."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from autopar.costs.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.ir.plan import Plan
from autopar.search.budget.within_budget import SMALL, Task, plan_within
from autopar.search.formulation.build import Formulation
from autopar.search.formulation.memory_model import MemoryModel
from autopar.search.formulation.pins import Restrictions
from autopar.search.formulation.variables.variable import Variable
from autopar.search.options import Job
from autopar.search.solver.layer_mix import LayerMix
from autopar.search.solver.minimize import Limits
from autopar.search.solver.problem import Node, Problem
from tests.explain.tables.stand_ins import hand_made_plan

CLUSTER = Cluster.preset("cpu")


def test_a_row_that_nothing_fits_is_loosened_where_its_least_plan_has_room() -> None:
    """The free plan needs much besides its row, so that the first row is too tight for any; the others need nothing."""
    cost = np.arange(11.0)
    variable = Variable("n", 1, {}, {}, None, cost, 10 - cost, np.zeros(11, dtype=np.int64), working=np.ones(11))
    built = Formulation(Problem((Node("n", cost, 10 - cost),), ()), (variable,))

    def make(restrictions: Restrictions, memory: MemoryModel) -> Formulation:
        return built

    def read(built: Formulation, mix: LayerMix, bound: float, method: str) -> Plan:
        plan = hand_made_plan()
        return replace(plan, certificate=replace(plan.certificate, objective=mix.cost, lower_bound=bound))

    def peak(plan: Plan) -> dict[str, float]:
        return {"all": 100.0 if plan.certificate.objective == 0 else 10 - plan.certificate.objective}

    limits = Limits(1e-9, time.monotonic() + 60)
    task = Task(make, read, lambda _: {}, limits, Job({}, CLUSTER, 6.0), peak)
    found = plan_within(task)
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
    held = {"all": 0.0}

    def read(built: Formulation, mix: LayerMix, bound: float, method: str) -> Plan:
        plan = hand_made_plan()
        held["all"] = mix.memory
        return replace(plan, certificate=replace(plan.certificate, objective=mix.cost, lower_bound=bound))

    limits = Limits(1e-9, time.monotonic() + 60)
    task = Task(lambda *_: built, read, lambda _: {}, limits, Job({}, CLUSTER, 10.0), lambda _: dict(held))
    found = plan_within(task)
    assert found.certificate.objective == 7.0
    assert found.certificate.lower_bound <= 7.0


def test_what_no_row_has_room_for_is_measured_once() -> None:
    """The row holds for all plans, so that nothing else is tried."""
    cost, measured = np.arange(11.0), []
    variable = Variable("n", 1, {}, {}, None, cost, 20 - cost, np.zeros(11, dtype=np.int64), working=np.ones(11))
    built = Formulation(Problem((Node("n", cost, 20 - cost),), ()), (variable,))

    def read(built: Formulation, mix: LayerMix, bound: float, method: str) -> Plan:
        plan = hand_made_plan()
        return replace(plan, certificate=replace(plan.certificate, objective=mix.cost, lower_bound=bound))

    def peak(plan: Plan) -> dict[str, float]:
        measured.append(plan)
        return {"all": 20 - plan.certificate.objective}

    limits = Limits(1e-9, time.monotonic() + 10)
    task = Task(lambda *_: built, read, lambda _: {}, limits, Job({}, CLUSTER, 6.0), peak)
    with pytest.raises(InfeasibleError, match="no plan was found that needs less than 10 B"):
        plan_within(task)
    assert [plan.certificate.objective for plan in measured] == [10.0]
