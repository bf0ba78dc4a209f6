"""What a budget has left is used, as far as the graph that is emitted has room."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from autopar.ir.plan import Plan
from autopar.search.budget.use_slack import use_slack
from autopar.search.formulation.build import Formulation
from autopar.search.formulation.variables.variable import Floats, Variable
from autopar.search.solver.layer_mix import LayerMix
from autopar.search.solver.minimize import Limits
from autopar.search.solver.problem import Node, Problem, locate
from tests.explain.tables.stand_ins import hand_made_plan
from tests.search.budget.test_within_budget import hand_made

COSTS, SIZES = (7.0, 5.0, 5.0), (6.0, 5.0, 5.0)
KEPT = 0


def knapsack(unseen: float = 0.0) -> Formulation:
    """Three tensors, saved or recomputed in some seconds; of the first a graph holds more than the constraint says."""
    variables, nodes = [], []
    for i, (cost, size) in enumerate(zip(COSTS, SIZES, strict=True)):
        seconds, memory = np.array([0.0, cost]), np.array([size - unseen * (i == 0), 0.0])
        more: Floats | None = np.array([unseen, 0.0]) if i == 0 and unseen else None
        variables.append(
            Variable(f"n{i}", 1, {}, {}, None, seconds, memory, np.zeros(2, dtype=np.int64), uncounted=more)
        )
        nodes.append(Node(f"n{i}", seconds, memory))
    return Formulation(Problem(tuple(nodes), ()), tuple(variables))


def fill(built: Formulation, labels: tuple[int, ...], budget: float, held: float = 0.0) -> tuple[Plan, list[float]]:
    """What becomes of a plan, and what was measured; graphs hold what ``SIZES`` say, and ``held`` besides."""
    measured: list[float] = []

    def read(mix: LayerMix, bound: float) -> Plan:
        size = held + sum(s for s, x in zip(SIZES, mix.labelings[-1], strict=True) if x == KEPT)
        measured.append(size)
        plan = hand_made_plan()
        certificate = replace(plan.certificate, objective=mix.cost)
        return replace(plan, certificate=certificate, predicted=replace(plan.predicted, peak_bytes={"all": size}))

    limits = Limits(1e-9, time.monotonic() + 60)
    searched = hand_made(limits, budget, built, read, lambda plan: dict(plan.predicted.peak_bytes))
    mix = LayerMix.of(locate(built.problem, np.array(labels)))
    plan, enough = searched.measured(searched.plan(built, mix, 0.0, ""))
    assert enough
    return use_slack(searched, built, mix, plan, 0.0, ""), measured


def test_what_saves_most_together_is_kept() -> None:
    """One of 7 s in 6 bytes is kept; two of 5 s in 5 bytes each save more, and fill the budget."""
    plan, measured = fill(knapsack(), (0, 1, 1), 10.0)
    assert plan.certificate.objective == 7.0
    assert measured == [6.0, 10.0]


def test_what_a_graph_holds_besides_its_row_has_no_room() -> None:
    plan, _ = fill(knapsack(), (0, 1, 1), 12.0, held=2.0)
    assert plan.certificate.objective == 7.0
    assert sum(plan.predicted.peak_bytes.values()) == 12.0


@pytest.mark.parametrize("unseen", [0.0, 5.0])
def test_what_rows_leave_out_is_counted(unseen: float) -> None:
    """The row says a byte of what takes six, so that it would rather keep that and one of five; this does not fit."""
    plan, measured = fill(knapsack(unseen), (1, 0, 1), 10.0)
    assert plan.certificate.objective == 7.0
    assert measured == [5.0, 10.0]


def test_a_plan_is_never_made_worse() -> None:
    plan, measured = fill(knapsack(), (1, 0, 0), 10.0)
    assert plan.certificate.objective == 7.0
    assert measured == [10.0]
