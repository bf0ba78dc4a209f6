"""Weights of kernels and links: the cost that is minimized is what the plan's own regions say, and bounds its time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from torch import fx

from autopar.compiler import solve
from autopar.costs.cluster import Cluster
from autopar.ir.graph import Value, is_backward
from autopar.ir.program import Program
from autopar.search.axis_by_axis import bound_by_axes
from autopar.search.budget.budget_problem import BudgetProblem
from autopar.search.budget.lagrangian import solve as solve_labels
from autopar.search.budget.within_budget import plan_within
from autopar.search.formulation.pins import Restrictions
from autopar.search.microbatch.split import microbatch_program
from autopar.search.options import Job, Search
from autopar.search.overlap.combine import step_seconds
from autopar.search.overlap.regions import BEFORE, BLOCKING, WAITED, regions_of
from autopar.search.overlap.step_time import step_time_of
from autopar.search.overlap.weights import Weights
from autopar.search.predict import _account, predict, step_features
from autopar.search.random_plan import random_plan
from autopar.search.solver.problem import Ints, evaluate
from autopar.sharding.dims import Dims, analyze
from autopar.sharding.layer_classes import LayerClasses, layer_classes
from autopar.sharding.redistribute.moves import Machine
from tests import models
from tests.crossed import seeds

AXES = {"node": 2, "gpu": 2}
H100 = Cluster.preset("h100")
# Collectives slow kernels, and kernels wait for the last device, as on machines whose processes share cores.
SHARED = replace(
    H100, links=tuple(replace(k, wait=1e-5, occupies=s) for k, s in zip(H100.links, (0.3, 0.1), strict=True))
)


def drawn(program: Program, seed: int, cluster: Cluster = SHARED) -> Weights:
    """Weights of all regions at random."""
    regions, random = regions_of(program), np.random.default_rng(seed)
    step = step_time_of(program, tuple(AXES.values()), cluster.link_for(AXES))
    rows = {region: random.dirichlet(np.ones(len(step.rows(region)[region]))) for region in {*regions.names.values()}}
    return Weights(step, {**rows, BEFORE: np.eye(len(step.rows(BEFORE)[BEFORE]))[0]})


def parts(name: str, microbatches: int) -> tuple[Program, Dims, LayerClasses]:
    whole, _, _ = models.captured(name)
    program = microbatch_program(whole, microbatches)
    dims = analyze(program)
    return program, dims, layer_classes(program, dims)


@pytest.mark.parametrize(("name", "microbatches", "memory"), [
    ("gpt2", 1, None),
    *(pytest.param("llama", count, memory, marks=pytest.mark.deep) for count in (1, 2) for memory in (None, 0.9)),
])  # fmt: skip
def test_what_is_minimized_is_what_the_plan_costs_under_these_weights(
    name: str, microbatches: int, memory: float | None
) -> None:
    program, dims, classes = parts(name, microbatches)
    job = Job(AXES, SHARED, search=Search(pins={"recompute": "search"}, time_limit=600))
    if memory is not None:
        ample = plan_within(BudgetProblem.of(program, dims, classes, replace(job, memory=1e12)))
        job = replace(job, memory=memory * sum(ample.predicted.peak_bytes.values()))
    for seed in seeds(3):
        weights = drawn(program, seed)
        plan = plan_within(BudgetProblem.of(program, dims, classes, job, weights))
        features = step_features(program, dims, plan, classes)
        cost = sum(float(weights.prices(region) @ own) for region, own in features.items())
        # Within a budget layers may be treated in two ways, of which a plan has whole layers only.
        assert cost == pytest.approx(plan.certificate.objective, rel=1e-9 if memory is None else 1e-2)
        # A weighted mean of rows is at most their maximum.
        assert cost <= predict(program, dims, plan, classes).predicted.step_seconds * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "microbatches"),
    [("gpt2", 1), *(pytest.param(*c, marks=pytest.mark.deep) for c in (("llama", 1), ("gpt2", 2)))],
)
def test_features_of_a_labeling_are_what_it_costs_under_any_weights(name: str, microbatches: int) -> None:
    program, dims, classes = parts(name, microbatches)
    job = Job(AXES, Cluster.preset("h100"))
    problems = [BudgetProblem.of(program, dims, classes, job, drawn(program, seed)) for seed in range(3)]
    built = [p.formulation(p.job.restrictions, p.states_alone) for p in problems]
    cuts, bounds = [], []
    for formulation in built:
        met: list[Ints] = []
        solved = solve_labels(formulation.problem, met=met.append)
        bounds.append(solved.lower_bound)
        assert formulation.features is not None
        best = solved.labels
        cuts += [(labels, formulation.features(labels), None) for labels in met]
        cuts.append((best, formulation.features(best), formulation))
    assert len(cuts) >= 6
    same: list[bool] = []
    for problem, formulation, bound in zip(problems, built, bounds, strict=True):
        weights = problem.weights
        assert weights is not None
        for labels, features, best_of in cuts:
            cost = sum(float(weights.prices(region) @ own) for region, own in features.items())
            # Labels may charge a reader for a slice of a value that it takes as made; the best do not.
            charged = evaluate(formulation.problem, labels)[0]
            assert cost == pytest.approx(charged, rel=1e-9) if best_of is formulation else cost <= charged * (1 + 1e-9)
            # Label by label, and pair by pair, it is the same, but for what is charged so.
            assert formulation.spent is not None
            least, seconds = weights.step.seconds(features), step_seconds(formulation.spent, weights.step, labels)
            assert least <= seconds * (1 + 1e-9)
            same.append(seconds == pytest.approx(least, rel=1e-9))
            # A plan is a cut: its longest rows bound its time, and no bound is above the cost of any plan.
            assert bound <= cost * (1 + 1e-9) <= weights.step.seconds(features) * (1 + 2e-9)
    assert sum(same) >= len(same) / 2


@pytest.mark.slow
def test_the_level_method_reaches_the_best_weights_of_known_plans() -> None:
    """On the cuts alone, as if these plans were all there are: the maximum is known from the linear program."""
    program, dims, classes = parts("llama", 1)
    cluster = Cluster.preset("h100")
    plans = [replace(random_plan(program, dims, AXES, cluster, seed), overlap=True) for seed in range(6)]
    features = [step_features(program, dims, plan, classes) for plan in plans]
    best = Weights(step_time_of(program, tuple(AXES.values()), cluster.link_for(AXES)))

    def least(weights: Weights) -> float:
        return min(sum(float(weights.prices(r) @ own) for r, own in known.items()) for known in features)

    known, bound = [features[0]], least(best)
    for _ in range(40):
        weights, most = best.at_level(known, bound)
        assert all(abs(rows.sum() - 1) < 1e-9 and (rows >= 0).all() for rows in weights.rows.values())
        assert bound <= most * (1 + 1e-6)
        if most - bound < 1e-3 * most:
            break
        known.append(min(features, key=lambda f: sum(float(weights.prices(r) @ own) for r, own in f.items())))
        best, bound = (weights, least(weights)) if least(weights) > bound else (best, bound)
    assert most - bound < 1e-3 * most
    assert bound <= min(best.step.seconds(known) for known in features) * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn", *(pytest.param(n, marks=pytest.mark.deep) for n in ("gpt2", "llama"))])
def test_no_plan_is_faster_than_the_bound_of_any_weights(name: str) -> None:
    program, dims, classes = parts(name, 1)
    job = Job(AXES, SHARED)
    plans = [replace(random_plan(program, dims, AXES, SHARED, seed), overlap=True) for seed in range(8)]
    plans += [replace(plan_within(BudgetProblem.of(program, dims, classes, job)), overlap=True)]
    seconds = [predict(program, dims, plan, classes).predicted.step_seconds for plan in plans]
    for seed in seeds(3):
        found = plan_within(BudgetProblem.of(program, dims, classes, job, drawn(program, seed)))
        assert found.certificate.lower_bound <= min(seconds) * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count", "recipes"), [
    ("mlp", 4, []), pytest.param("llama", 3, ["ddp", "fsdp"], marks=pytest.mark.deep),
])  # fmt: skip
def test_no_plan_is_faster_than_the_bound_of_blocks_of_axes(name: str, count: int, recipes: list[str]) -> None:
    """Each block has a problem of its own there, with the prices of its axes."""
    axes, cluster = dict.fromkeys("abcd"[:count], 2), Cluster.preset("h100")
    program, dims, classes = parts(name, 1)
    regions = regions_of(program)
    machine = Machine(tuple(axes), tuple(axes.values()), cluster.link_for(axes), cluster.device)
    plans = [replace(random_plan(program, dims, axes, cluster, seed), overlap=True) for seed in range(4)]
    plans += [solve(program, axes, cluster, search=Search(recipe=r, cache=False)) for r in recipes]
    assert all(plan.overlap for plan in plans)
    least = min(predict(program, dims, plan, classes).predicted.step_seconds for plan in plans)
    step, random = step_time_of(program, machine.sizes, machine.links), np.random.default_rng(0)
    rows = {region: random.dirichlet(np.ones(len(step.rows(region)[region]))) for region in {*regions.names.values()}}
    for weights in (Weights(step), Weights(step, {**rows, BEFORE: np.eye(len(step.rows(BEFORE)[BEFORE]))[0]})):
        bounds = []
        for together in range(1, count):
            fixed, claims = bound_by_axes(program, dims, classes, machine, Restrictions(), weights, together=together)
            assert len(claims) == count - together + 1
            bounds.append(fixed + sum(claim.bound for claim in claims))
        assert 0 < min(bounds) <= max(bounds) <= least * (1 + 1e-9)


@pytest.mark.slow
def test_a_move_is_counted_where_its_reader_waits_for_it() -> None:
    """Whoever reads the value first: a gradient of a weight that takes it as it was made waits for nothing."""
    program, dims, classes = parts("llama", 1)
    regions, found = regions_of(program), 0
    for seed in range(4):
        account = _account(
            program, dims, random_plan(program, dims, AXES, SHARED, seed), classes, drawn(program, 0).step
        )
        assignment = account.assignment
        wanted: dict[Value, list[fx.Node]] = defaultdict(list)
        for node, sources in program.sources.items():
            for value, layout in zip(sources, assignment.inputs[node], strict=True):
                if is_backward(value[0]) and layout != assignment.outputs[value]:
                    wanted[value].append(node)
        for value, readers in wanted.items():
            directly = assignment.consumer_layouts.get(value) in (None, assignment.outputs[value])
            if len(readers) == 1 and directly and value not in regions.gradients:
                kind = BLOCKING if readers[0] in regions.filling else WAITED
                assert set(account.places[value, True]) == {(regions.names[readers[0]], kind)}
                found += kind == WAITED and regions.readers[value, True] in regions.filling
    assert found  # of such values
