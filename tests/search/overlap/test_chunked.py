"""Collectives that chunks of products hide: no plan's step is shorter than the search counts at the least."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.compiler import program_of, solve
from autopar.search.budget.budget_problem import BudgetProblem
from autopar.search.budget.within_budget import plan_within
from autopar.search.options import Job, Search
from autopar.search.overlap.regions import regions_of
from autopar.search.overlap.step_time import step_time_of
from autopar.search.overlap.weights import Weights
from autopar.search.predict import predict, step_features
from autopar.search.random_plan import random_plan
from autopar.sharding.dims import analyze
from autopar.sharding.layer_classes import layer_classes
from tests.distributed.models import residuals, slow_links
from tests.search.overlap.test_weights import AXES, drawn

RECIPES = ("megatron", "megatron-sequence")


@pytest.mark.deep
@pytest.mark.parametrize("bandwidth", [4e4, 1e5])
def test_no_plan_hides_more_than_the_bound_counts(bandwidth: float) -> None:
    program, cluster = program_of(*residuals()), slow_links(bandwidth)
    dims = analyze(program)
    classes = layer_classes(program, dims)
    plans = [random_plan(program, dims, AXES, cluster, seed) for seed in range(6)]
    plans += [solve(program, AXES, cluster, search=Search(recipe=r, cache=False)) for r in RECIPES]
    plans = [predict(program, dims, replace(plan, overlap=True), classes) for plan in plans]
    assert sum(plan.predicted.chunked_seconds > 0 for plan in plans) > 2
    step = step_time_of(program, tuple(AXES.values()), cluster.link_for(AXES))
    for plan in plans:
        least = step.seconds(step_features(program, dims, plan, classes))
        assert least <= plan.predicted.step_seconds * (1 + 1e-9)
    fastest = min(plan.predicted.step_seconds for plan in plans)
    for weights in (Weights(step), drawn(program, 0, cluster)):
        found = plan_within(BudgetProblem.of(program, dims, classes, Job(AXES, cluster), weights))
        own = predict(program, dims, found, classes).predicted.step_seconds
        assert 0 < found.certificate.lower_bound <= min(fastest, own) * (1 + 1e-9)
    best = solve(program, AXES, cluster, search=Search(cache=False))
    assert best.certificate.lower_bound <= best.certificate.objective == best.predicted.step_seconds
    # What of the plans above is known is no faster, but for what simulation decides between close ones.
    assert best.predicted.step_seconds <= 1.2 * fastest


def test_values_beside_products() -> None:
    """What a product reads may be gathered in chunks, what it makes summed; parameters and gradients are neither."""
    program = program_of(*residuals())
    regions = regions_of(program)
    products = [n for n in program.sources if n.target.name() == "aten::mm"]  # type: ignore[union-attr]
    assert products
    for node in products:
        read, made = program.sources[node][0], (node, 0)
        assert ("all_gather" in regions.chunkable.get(read, ())) == (
            read[0] not in regions.from_parameters and read not in regions.gradients
        )
        assert ("reduce_scatter" in regions.chunkable.get(made, ())) == (made not in regions.gradients)
    assert not {value[0] for value in regions.chunkable} & regions.from_parameters
    assert not regions.chunkable.keys() & regions.gradients
