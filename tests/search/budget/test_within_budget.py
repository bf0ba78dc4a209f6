"""Rows that are tightened until a plan fits: on a problem of one variable, whose graph is a function."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from autopar.costs.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.ir.plan import Plan
from autopar.search.budget.budget_problem import BudgetProblem
from autopar.search.budget.within_budget import plan_within
from autopar.search.formulation.build import Formulation
from autopar.search.formulation.memory_model import MemoryModel
from autopar.search.formulation.pins import Restrictions
from autopar.search.formulation.variables.variable import Variable
from autopar.search.options import Job
from autopar.search.solver.layer_mix import LayerMix
from autopar.search.solver.minimize import Limits
from autopar.search.solver.problem import Node, Problem
from autopar.sharding.layer_classes import layer_classes
from autopar.sharding.redistribute import Tables
from autopar.sharding.redistribute.moves import Machine
from tests.explain.tables.stand_ins import hand_made_plan
from tests.plans import tiny

CLUSTER = Cluster.preset("cpu")


@dataclass(frozen=True)
class HandMade(BudgetProblem):
    """A problem of no real program: its formulation, plans and peaks are those of the test."""

    built: Formulation = field(kw_only=True)
    read: Callable[[LayerMix, float], Plan] = field(kw_only=True)
    held: Callable[[Plan], dict[str, float]] = field(kw_only=True)

    def formulation(self, restrictions: Restrictions, memory: MemoryModel) -> Formulation:
        return self.built

    def plan(self, built: Formulation, mix: LayerMix, bound: float, method: str) -> Plan:
        return self.read(mix, bound)

    def has_room(self, plan: Plan) -> bool:
        return False

    def _held(self, plan: Plan) -> dict[str, float]:
        return self.held(plan)


def hand_made(
    limits: Limits,
    budget: float,
    built: Formulation,
    read: Callable[[LayerMix, float], Plan],
    held: Callable[[Plan], dict[str, float]],
) -> HandMade:
    """Such a problem within a budget."""
    program, dims = tiny()
    tables, job = Tables(Machine((), (), (), CLUSTER.device)), Job({}, CLUSTER, budget)
    classes = layer_classes(program, dims)
    return HandMade(program, dims, classes, tables, limits, job, built=built, read=read, held=held)


def test_a_row_that_nothing_fits_is_loosened_where_its_least_plan_has_room() -> None:
    """The free plan needs much besides its row, so that the first row is too tight for any; the others need nothing."""
    cost = np.arange(11.0)
    variable = Variable("n", 1, {}, {}, None, cost, 10 - cost, np.zeros(11, dtype=np.int64), working=np.ones(11))
    built = Formulation(Problem((Node("n", cost, 10 - cost),), ()), (variable,))

    def read(mix: LayerMix, bound: float) -> Plan:
        plan = hand_made_plan()
        return replace(plan, certificate=replace(plan.certificate, objective=mix.cost, lower_bound=bound))

    def peak(plan: Plan) -> dict[str, float]:
        return {"all": 100.0 if plan.certificate.objective == 0 else 10 - plan.certificate.objective}

    limits = Limits(1e-9, time.monotonic() + 60)
    task = hand_made(limits, 6.0, built, read, peak)
    found = plan_within(task)
    assert found.certificate.objective == 4.0
    assert found.predicted.peak_bytes == {"all": 6.0}


def test_states_between_two_prices_are_found_where_nothing_repeats() -> None:
    """A knapsack: prices keep what saves most a byte, after which nothing else fits; the two others save more."""
    costs, sizes = (7.0, 5.0, 5.0), (6.0, 5.0, 5.0)
    variables, nodes = [], []
    for i, (cost, size) in enumerate(zip(costs, sizes, strict=True)):
        seconds, memory = np.array([0.0, cost]), np.array([size, 0.0])
        one_layout = np.zeros(2, dtype=np.int64)
        variables.append(Variable(f"n{i}", 1, {}, {}, None, seconds, memory, one_layout, working=np.ones(2)))
        nodes.append(Node(f"n{i}", seconds, memory))
    built = Formulation(Problem(tuple(nodes), ()), tuple(variables))
    held = {"all": 0.0}

    def read(mix: LayerMix, bound: float) -> Plan:
        plan = hand_made_plan()
        held["all"] = mix.memory
        return replace(plan, certificate=replace(plan.certificate, objective=mix.cost, lower_bound=bound))

    limits = Limits(1e-9, time.monotonic() + 60)
    task = hand_made(limits, 10.0, built, read, lambda _: dict(held))
    found = plan_within(task)
    assert found.certificate.objective == 7.0
    assert found.certificate.lower_bound <= 7.0


def test_what_no_row_has_room_for_is_measured_once() -> None:
    """The row holds for all plans, so that nothing else is tried."""
    cost, measured = np.arange(11.0), []
    variable = Variable("n", 1, {}, {}, None, cost, 20 - cost, np.zeros(11, dtype=np.int64), working=np.ones(11))
    built = Formulation(Problem((Node("n", cost, 20 - cost),), ()), (variable,))

    def read(mix: LayerMix, bound: float) -> Plan:
        plan = hand_made_plan()
        return replace(plan, certificate=replace(plan.certificate, objective=mix.cost, lower_bound=bound))

    def peak(plan: Plan) -> dict[str, float]:
        measured.append(plan)
        return {"all": 20 - plan.certificate.objective}

    limits = Limits(1e-9, time.monotonic() + 10)
    task = hand_made(limits, 6.0, built, read, peak)
    with pytest.raises(InfeasibleError, match="no plan was found that needs less than 10 B"):
        plan_within(task)
    assert [plan.certificate.objective for plan in measured] == [10.0]
