"""Steps in which the device waits for the host: predicted as simulated, and bounded by launches that no plan avoids."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from autopar.compiler import rewrite, solve
from autopar.costs.cluster import Cluster
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.search.emitted.rewritten import unverified
from autopar.search.microbatch.split import microbatch_program
from autopar.search.options import Search
from autopar.search.overlap.launches import least_launching
from autopar.search.pipeline.stage_times import plan_tasks
from autopar.search.predict import predict
from autopar.search.random_plan import random_plan
from autopar.sharding.dims import analyze
from autopar.sharding.layer_classes import layer_classes
from autopar.simulate import simulate
from autopar.simulate.graph_tasks import emitted
from tests import models
from tests.crossed import crossed

H100 = Cluster.preset("h100")
NO_HOST = replace(H100, device=replace(H100.device, host=0.0))


@cache
def program(name: str, microbatches: int) -> Program:
    return microbatch_program(models.captured(name)[0], microbatches)


def launching(part: Program, plan: Plan) -> tuple[float, float]:
    """Seconds in which the host launches what is emitted, and simulated seconds of the step."""
    tasks = emitted(unverified(part, plan), plan)
    return sum(task.host for task in tasks), simulate(tasks).step_seconds


SPLIT: list[tuple[dict[str, int], int]] = [({"a": 2, "b": 2}, 1), ({"a": 4}, 2)]
"""Two axes, and two microbatches."""


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("name", "recipe", "split"), crossed(["vit", "gpt2"], [None, "ddp", "fsdp", "megatron"], SPLIT)
)
def test_predicted_as_simulated(name: str, recipe: str | None, split: tuple[dict[str, int], int]) -> None:
    """These models' kernels take less than their launches."""
    axes, count = split
    plan = solve(models.captured(name)[0], axes, H100, search=Search(recipe=recipe, pins={"microbatches": count}))
    host, seconds = launching(program(name, count), plan)
    assert plan.predicted.waiting_seconds > 0.05 * seconds
    assert plan.predicted.step_seconds == pytest.approx(seconds, rel=0.08)
    assert plan.predicted.step_seconds == pytest.approx(host, rel=0.05)
    assert plan.certificate.objective == plan.predicted.step_seconds
    least = plan.certificate.lower_bound
    assert 0.7 * plan.predicted.step_seconds < least <= host * (1 + 1e-9)


DRAWN: list[tuple[int, dict[str, int], int]] = [
    (0, {"a": 4}, 1), (1, {"a": 2, "b": 2}, 2), (2, {"a": 2}, 1), (3, {"a": 2, "b": 4}, 1),
]  # fmt: skip
"""Seeds of plans, axes and microbatches."""


@pytest.mark.some(2)
@pytest.mark.parametrize(("name", "case"), crossed(["llama", "mlp", "encoder", "cnn"], DRAWN))
def test_random_plans(name: str, case: tuple[int, dict[str, int], int]) -> None:
    """What every plan launches is no more than what any does, and what is predicted is about what is emitted."""
    seed, axes, count = case
    part = program(name, count)
    dims = analyze(part)
    drawn = random_plan(part, dims, axes, H100, seed, recompute=seed > 1)
    plan = predict(part, dims, replace(drawn, microbatches=count, overlap=True))
    host, seconds = launching(part, plan)
    assert least_launching(part, dims, layer_classes(part, dims), H100.device) <= host * (1 + 1e-9)
    free = predict(part, dims, replace(plan, cluster=NO_HOST)).predicted
    assert free.waiting_seconds == 0 and plan.predicted.device_seconds == pytest.approx(free.step_seconds)
    assert plan.predicted.step_seconds == pytest.approx(max(host, free.step_seconds), rel=0.08)
    assert seconds >= host


@pytest.mark.slow
def test_pipelines() -> None:
    """Each graph of a stage takes at least as long as its launches; the bound of a device is its share of them."""
    whole = models.captured("gpt2")[0]
    search = Search(pins={"stages": 2, "microbatches": 2})
    plan = solve(whole, {"a": 2, "b": 2}, H100, search=search)
    assert plan.pipeline is not None
    local = rewrite(whole, plan)
    simulated = simulate(plan_tasks(local, plan)).step_seconds
    free = simulate(plan_tasks(local, replace(plan, cluster=NO_HOST))).step_seconds
    assert plan.predicted.step_seconds == pytest.approx(simulated, rel=0.05) and simulated > 1.1 * free
    assert plan.certificate.lower_bound <= plan.predicted.step_seconds


def test_large_models_wait_for_nothing() -> None:
    whole, _ = models.captured("mlp")[:2]
    slow = replace(H100, device=replace(H100.device, launch=1e-4))
    for cluster in (NO_HOST, slow, Cluster.preset("cpu")):
        assert solve(whole, {"a": 4}, cluster).predicted.waiting_seconds == 0
