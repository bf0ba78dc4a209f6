"""All that a step makes is no less than the peak of its graph: a plan far within a budget need not be measured."""

from __future__ import annotations

import math

import pytest

from autopar.costs.cluster import Cluster
from autopar.search.budget.budget_problem import ROOM, BudgetProblem, peak_bytes
from autopar.search.options import Job, Search
from autopar.search.random_plan import random_plan
from autopar.sharding.layer_classes import layer_classes
from tests.models import captured

CLUSTER = Cluster.preset("cpu")


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt2", "llama"])
@pytest.mark.parametrize("axes", [{"a": 4}, {"a": 2, "b": 2}], ids=str)
def test_no_peak_is_above_all_that_is_made(name: str, axes: dict[str, int]) -> None:
    """Of random plans, whose moves are many; half of the room that is asked for is for what operators have besides."""
    program, dims, _ = captured(name)
    classes = layer_classes(program, dims)
    job = Job(axes, CLUSTER, math.inf, "adamw", Search())
    problem = BudgetProblem.of(program, dims, classes, job)
    for seed in range(3):
        plan = random_plan(program, dims, axes, CLUSTER, seed, {}, "adamw")
        peak = peak_bytes(problem.with_peak(plan))
        assert 0 < peak < (ROOM + 1) / 2 * problem.all_bytes(plan)
