"""What the benchmarks of memory measure, on small models: predictions hold for graphs that are run, and for steps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.compiler import peak_of, program_of, solve
from autopar.costs.cluster import Cluster
from autopar.parallelize import parallelize
from autopar.search.budget.live_ranges import minimize_peak, minimize_peak_at
from autopar.search.emitted.peak import state_bytes
from autopar.search.options import Search
from autopar.search.random_plan import random_plan
from benchmarks import ladder, least_memory, published
from benchmarks.allocated import peak_allocated
from benchmarks.turns import stepper
from tests import models
from tests.crossed import seeds

ALWAYS = ("parameters", "optimizer", "buffers", "batch")


def test_peak_of_what_is_allocated() -> None:
    def run() -> None:
        first = torch.zeros(1 << 18)
        second = first + 1
        del first
        third = second + 1
        second.untyped_storage().resize_(0)
        third.add(1)

    assert peak_allocated(run) == pytest.approx(2 << 20, rel=0.01)


class Deep(nn.Module):
    """Many linears, whose gradients take as much as what is kept for them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(x).square().mean()}


class Loss:
    """What a benchmark's step looks for, around a model that returns a dict."""

    def __init__(self, model: Any) -> None:
        self.model, self.parameters = model, model.parameters

    def __call__(self, **batch: torch.Tensor) -> Any:
        self.loss = self.model(**batch)["loss"]
        return self


def test_a_step_takes_what_its_graph_is_said_to_take() -> None:
    """What is kept for the backward pass is given back while that runs."""
    batch = {"x": torch.randn(256, 256)}
    model = parallelize(Deep(), None, batch)
    held = peak_of(program_of(Deep(), batch), model.plan)
    step = stepper(Loss(model), batch, gradients_stay=True)
    step()
    model.zero_grad()
    predicted = sum(size for name, size in held.items() if name not in ALWAYS)
    assert peak_allocated(step) == pytest.approx(predicted, rel=0.05)


def test_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ladder.MODELS, "tiny", models.mlp)
    found = ladder.ladder("tiny", "2x2", Cluster.preset("cpu"), 2, 5.0)
    first, second = found["rungs"]
    for row in (first, second):
        assert row["peak"] <= row["budget"]
        assert row["emulated"] == pytest.approx(row["peak"], rel=0.02)
    assert second["budget"] == pytest.approx(0.75 * first["budget"])
    assert found["bound"] <= second["peak"]
    assert "### tiny on 2x2" in ladder.table(found)


def test_no_plan_needs_less_than_the_bound() -> None:
    program, axes = program_of(Deep(), {"x": torch.randn(64, 256)}), {"a": 2, "b": 2}
    bound = least_memory.least(program, axes)
    for seed in range(2):
        plan = solve(program, axes, "cpu", search=Search(recipe="random", seed=seed))
        assert bound <= sum(peak_of(program, plan).values()), seed
    weights, activations = 8 * 256 * 256 * 4, 64 * 256 * 4
    # At last all gradients beside parameters and states; little more is certain.
    assert weights <= bound <= (4 * weights + 4 * activations) / 4


def test_the_bound_knows_what_an_operator_cannot_split() -> None:
    """A product can be split along each of its three dims, but takes or makes one whole matrix then."""
    program = program_of(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), Mean()), {"input": torch.randn(8, 64)})
    plain, split = least_memory.lives_of(program), least_memory.lives_of(program, (4,))
    beyond = [b - a for a, b in zip(plain.base, split.base, strict=True)]
    assert min(beyond) >= 0
    assert max(beyond) >= 8 * 64 * 4  # at least one of its tensors is on all devices


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x).square().mean()


class Gates(nn.Module):
    """Products of what is made of one value: to make one again, the others are needed sooner, and longer."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            y = part(x)
            x = x + torch.tanh(y) * torch.sin(y) * x
        return x.square().mean()


@pytest.mark.slow
def test_the_bound_is_that_of_the_best_choice() -> None:
    program = program_of(Gates(), {"x": torch.randn(64, 8)})
    found = least_memory.lives_of(program, (2,))
    free = [s for s in found.size if s not in found.fixed and found.size[s] >= 64]
    assert 10 <= len(free) <= 16
    sets = (set(c) for n in range(len(free) + 1) for c in itertools.combinations(free, n))
    best = min(float(found.held(again).max()) for again in sets)
    bound, again = minimize_peak_at(found, range(len(found.base)))
    assert bound == pytest.approx(best, rel=1e-3)
    assert found.held(again).max() == pytest.approx(best, rel=1e-3)
    assert best < min(found.held(set()).max(), found.held(set(free)).max())
    state = sum(state_bytes(program, "adamw", gradients=False).values())
    assert minimize_peak(found)[0] == pytest.approx(best, rel=1e-3)
    assert least_memory.least(program, {"a": 2}) == pytest.approx((state + best) / 2, rel=1e-3)


def test_plans_of_many_kinds_need_more_than_the_bound() -> None:
    """Random layouts and random choices of what is recomputed, each counted in the graph that it gives."""
    program, dims, _ = models.captured("mlp")
    for axes in ({}, {"a": 2}):
        bound = least_memory.least(program, axes)
        for seed in seeds(8, 3):
            plan = random_plan(program, dims, axes, Cluster.preset("h100"), seed, recompute=True)
            assert bound <= sum(peak_of(program, plan).values()) + 1e-6, (axes, seed)


@pytest.mark.parametrize("model", ["mlp", pytest.param("llama", marks=pytest.mark.deep)])
def test_plans_with_a_host_need_more_than_their_bound(model: str) -> None:
    """What is kept may lie there until it is taken, which no bound of plans without one allows."""
    program, dims, _ = models.captured(model)
    for axes in ({}, {"a": 2}):
        bound = least_memory.least(program, axes, away=True)
        assert bound <= least_memory.least(program, axes)
        for seed in seeds(6, 2):
            plan = random_plan(program, dims, axes, Cluster.preset("h100"), seed, recompute=True, offload=True)
            assert plan.offload
            assert bound <= sum(peak_of(program, plan).values()) + 1e-6, (axes, seed)


@pytest.mark.deep
def test_what_megatron_makes_again_is_one_of_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its selective choice saves memory, and for as much the search finds nothing slower."""
    monkeypatch.setitem(published.SHAPES, 22, (512, 8, 4))
    rows = list(published.selective(Cluster.preset("a100-80gb")))
    assert len(rows) == 6
    for ample, chosen, found in (rows[:3], rows[3:]):
        assert chosen["activations GB"] < 0.6 * ample["activations GB"]
        assert ample["step s"] < found["step s"] <= chosen["step s"]
        assert found["peak GB"] <= chosen["peak GB"]


def test_anomalies_are_listed() -> None:
    def rung(budget: float, step: float, peak: float, emulated: float) -> dict[str, float]:
        return {"budget": budget, "step_s": step, "peak": peak, "emulated": emulated}

    assert ladder.anomalies([rung(100, 1.0, 90, 90), rung(80, 1.1, 80, 80), {"budget": 64, "needed": None}]) == []
    found = ladder.anomalies([rung(100, 1.2, 110, 120), rung(80, 1.1, 80, 80)])
    assert [text.split(":")[1].split()[0] for text in found] == ["the", "the", "1200.0"]
