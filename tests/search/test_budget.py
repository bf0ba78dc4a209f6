"""Rows that are tightened until a plan fits: on a problem of one variable, whose graph is a function."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from autopar.plan import Plan
from autopar.search.budget import Task, plan_within
from autopar.search.build import Built, Memory, Variable
from autopar.search.frontier import Mix
from autopar.search.minimise import Limits
from autopar.search.problem import Node, Problem
from autopar.search.restrict import Restrictions
from tests.report.stand_ins import hand_made_plan


def test_a_row_that_nothing_fits_is_loosened_where_its_least_plan_has_room() -> None:
    """The free plan needs much besides its row, so that the first row is too tight for any; the others need nothing."""
    cost = np.arange(11.0)
    variable = Variable("n", 1, {}, {}, None, cost, 10 - cost, np.zeros(11, dtype=np.int64), working=np.ones(11))
    built = Built(Problem((Node("n", cost, 10 - cost),), ()), (variable,))

    def make(restrictions: Restrictions, memory: Memory) -> Built:
        return built

    def read(built: Built, mix: Mix, bound: float, method: str) -> Plan:
        plan = hand_made_plan()
        return replace(plan, certificate=replace(plan.certificate, objective=mix.cost, lower_bound=bound))

    def peak(plan: Plan) -> dict[str, float]:
        return {"all": 100.0 if plan.certificate.objective == 0 else 10 - plan.certificate.objective}

    limits = Limits(1e-9, time.monotonic() + 60)
    task = Task(make, read, lambda _: {}, Restrictions(), limits, 6.0, peak, "search", lambda *_: None)
    found = plan_within(task)
    assert found.certificate.objective == 4.0
    assert found.predicted.peak_bytes == {"all": 6.0}
