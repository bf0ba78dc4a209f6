"""Reductions that need other code where they are split, in whole models: extrema, variances, norms, bags of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import autopar
from autopar.compiler import program_of, rewrite
from autopar.verify.verify import compare, global_values
from tests.crossed import seeds
from tests.plans import follow_plan
from tests.verify.test_verify import after_adamw

AXES = {"a": 2, "b": 2}


class Moments(nn.Module):
    """A loss of every reduction, over rows, columns and everything."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        terms = [hidden.std(), hidden.var(0).sum(), hidden.amax(1).sum(), hidden.amin((0, 1)), hidden.max()]
        terms += [hidden.logsumexp(1).mean(), hidden.norm(), hidden.norm(1, dim=1).sum(), torch.dist(hidden, x.sum())]
        scale = torch.where((hidden > 100).any(1, keepdim=True), 2.0, 1.0)
        return sum(terms) + (self.second(hidden) * scale).square().mean()


class Bags(nn.Module):
    """Means and maxima of rows of a table, of bags of unequal length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mean, self.largest = nn.EmbeddingBag(12, 8), nn.EmbeddingBag(12, 8, mode="max")
        self.weighted = nn.EmbeddingBag(12, 8, mode="sum")
        self.head = nn.Linear(8, 4)

    def forward(self, rows: Tensor, offsets: Tensor, weights: Tensor, target: Tensor) -> Tensor:
        bags = self.mean(rows, offsets) + self.largest(rows, offsets)
        return F.cross_entropy(self.head(bags + self.weighted(rows, offsets, weights)), target)


def batch_of(model: nn.Module, step: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    if isinstance(model, Moments):
        return {"x": torch.randn(8, 8, generator=g)}
    rows, target = torch.randint(12, (16,), generator=g), torch.randint(4, (4,), generator=g)
    offsets = torch.tensor([0, 3, 4, 10])
    return {"rows": rows, "offsets": offsets, "weights": torch.rand(16, generator=g), "target": target}


@pytest.mark.parametrize("make", [pytest.param(Moments, marks=pytest.mark.deep), Bags])
def test_random_plans(make: type[nn.Module]) -> None:
    model = make()
    for seed in seeds(3):
        report = autopar.verify(model, batch_of(model), AXES, plan="random", seed=seed)
        assert report.max_error <= 1e-10, f"seed {seed}, {report.worst}: {report.max_error}"
        expected = after_adamw(dict(model.named_parameters()), report.reference_gradients)
        for name, value in after_adamw(dict(model.named_parameters()), report.gradients).items():
            assert float((value - expected[name]).abs().max()) <= 1e-9, name


@pytest.mark.parametrize("layout", ["S(0) R", "S(0) S(1)", "S(1) S(1)"])
def test_what_is_looked_at_is_split(layout: str) -> None:
    """Reductions by the sums and maxima of devices, without gathering what they look at."""
    model = Moments()
    batch = batch_of(model)
    program = program_of(model, batch)
    plan = follow_plan(program, AXES, batch={"x": layout})
    local = rewrite(program, plan)
    report = compare(program, local, plan, global_values(program, model, batch), torch.float64)
    assert report.max_error <= 1e-10, f"{report.worst}: {report.max_error}"
