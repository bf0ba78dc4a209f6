"""A plan's graph as tasks: the same kernels and collectives as were planned, and the memory that liveness says."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from importlib import import_module

import pytest

import autopar
from autopar.compiler import rewrite, solve
from autopar.costs.cluster import Cluster
from autopar.errors import PlanError
from autopar.explain.tables.simulation import step_table
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.simulate import COMMUNICATION, COMPUTE, Timeline, simulate
from autopar.simulate.graph_tasks import WAIT, emitted, step_facts
from tests import models

bucket_collectives = import_module("autopar.passes.collectives.bucket_collectives")

CPU = Cluster.preset("cpu")
SLOW_LINK = replace(CPU, links=tuple(replace(link, latency=1e-12, bandwidth=1e6) for link in CPU.links))
"""On which collectives outlast kernels."""


def planned(name: str, recipe: str | None, axes: dict[str, int]) -> tuple[Program, Plan]:
    program, _, _ = models.captured(name)
    plan = solve(program, axes, SLOW_LINK, search=autopar.Search(recipe=recipe, padding=False))
    return rewrite(program, plan), plan


def ran(name: str, recipe: str | None, axes: dict[str, int]) -> tuple[Timeline, Plan]:
    local, plan = planned(name, recipe, axes)
    return simulate(emitted(local, plan)), plan


@pytest.mark.parametrize("recipe", ["ddp", "fsdp", "megatron"])
def test_kernels_and_collectives_are_those_that_were_planned(recipe: str) -> None:
    timeline, plan = ran("mlp", recipe, {"a": 4})
    facts = step_facts(timeline, plan)
    planned_traffic = plan.predicted.step_seconds - plan.predicted.compute_seconds
    # Gradients in one bucket have one latency, which is nothing here, and one launch.
    assert facts["communication_seconds"]["a"] == pytest.approx(planned_traffic, rel=0.05)
    assert facts["busy_seconds"] >= 0.999 * plan.predicted.compute_seconds  # moves have kernels of their own
    assert facts["predicted_step_seconds"] == plan.predicted.step_seconds
    inside = facts["busy_seconds"] + facts["exposed_communication_seconds"]
    assert inside == pytest.approx(timeline.step_seconds, rel=1e-9)


def test_figures_of_a_step_add_up_to_it() -> None:
    """Where the host takes longer to launch kernels than they take."""
    local, plan = planned("mlp", "ddp", {"a": 4})
    timeline = simulate([replace(task, host=1e-3) for task in emitted(local, plan)])
    facts = step_facts(timeline, plan)
    parts = ("busy_seconds", "exposed_communication_seconds", "waiting_seconds")
    assert sum(facts[part] for part in parts) == pytest.approx(facts["step_seconds"], rel=1e-9)
    assert facts["waiting_seconds"] > 0.5 * facts["step_seconds"]
    assert f"waits         {facts['waiting_seconds'] * 1e3:.3g}" in step_table(facts)


def beside(timeline: Timeline, move: int) -> bool:
    """Whether a kernel runs while a collective does."""
    return any(
        timeline.start[i] < timeline.end[move] and timeline.start[move] < timeline.end[i]
        for i, task in enumerate(timeline.tasks)
        if task.category == COMPUTE
    )


def moves_of(timeline: Timeline) -> list[int]:
    return [i for i, task in enumerate(timeline.tasks) if task.category == COMMUNICATION]


def test_gradients_are_reduced_beside_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_collectives, "SMALLEST", 1)  # a bucket for each gradient
    timeline, _ = ran("mlp", "ddp", {"a": 4})
    moves = moves_of(timeline)
    waits = [i for i, task in enumerate(timeline.tasks) if task.category == WAIT and i]
    assert len(moves) == len(waits) == 4 + 1  # two weights, two biases, the loss
    for wait in waits:
        (source,) = timeline.tasks[wait].after
        assert timeline.start[wait] >= timeline.end[source]
    assert any(beside(timeline, move) for move in moves)
    assert timeline.step_seconds < sum(task.seconds for task in timeline.tasks)


def test_activations_are_waited_for() -> None:
    timeline, _ = ran("mlp", "megatron", {"a": 4})
    moves = moves_of(timeline)
    assert moves
    assert not any(beside(timeline, move) for move in moves)


@pytest.mark.parametrize("recipe", ["ddp", "fsdp"])
def test_memory_at_the_ends_of_a_step(recipe: str) -> None:
    timeline, plan = ran("mlp", recipe, {"a": 4})
    _, held = timeline.memory(0)
    for name in ("parameters", "optimizer"):
        assert set(held[name].tolist()[-3:]) == {plan.predicted.memory_bytes[name]}
    for name in ("activations", "transient", "communication"):
        assert name not in held or held[name][-1] == 0
        assert name not in held or held[name].min() >= 0
    assert held["gradients"][-1] == plan.predicted.memory_bytes["gradients"]
    assert held["results"][-1] == 4  # the loss
    assert held["activations"].max() > 0


def test_activations_are_what_the_backward_takes() -> None:
    """An MLP keeps, for 8 rows in float32: relu's result, its mask's origin, and the difference to the target."""
    local, plan = planned("mlp", "ddp", {"a": 1})
    made: dict[str, float] = defaultdict(float)
    for task in emitted(local, plan):
        for category, size in task.at_start:
            made[category] += size
    rows, hidden, ffn = 8, 16, 32
    assert made["batch"] == 2 * rows * hidden * 4 + 4  # and the loss's gradient
    assert made["activations"] in (rows * (ffn + hidden) * 4, rows * (2 * ffn + hidden) * 4)


@pytest.mark.slow
def test_transformers_run_on_two_axes() -> None:
    timeline, plan = ran("gpt2", "hsdp", {"a": 2, "b": 2})
    assert 0 < timeline.step_seconds
    peak = timeline.peak_memory(0)
    assert sum(peak.values()) > sum(plan.predicted.memory_bytes.values()) * 0.9
    assert set(step_facts(timeline, plan)["communication_seconds"]) == {"a", "b"}


def test_only_rewritten_graphs_are_simulated() -> None:
    program, _, _ = models.captured("mlp")
    _, plan = planned("mlp", "ddp", {"a": 4})
    with pytest.raises(PlanError, match=r"give what compiler.rewrite"):
        emitted(program, plan)
