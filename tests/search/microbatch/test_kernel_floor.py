"""Seconds of kernels that no plan falls below, whatever its layouts, padding and microbatches."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from autopar.compiler import program_of, solve
from autopar.costs.cluster import Cluster, Link
from autopar.errors import InfeasibleError
from autopar.ir.program import Program
from autopar.search.budget.budget_problem import machine_of
from autopar.search.microbatch.kernel_floor import kernel_floor
from autopar.search.options import Job, Search
from tests.crossed import seeds

DEVICE = replace(Cluster.preset("cpu").device, flops={"float32": 1e10}, launch=1e-12)
CLUSTER = Cluster("eight devices", DEVICE, (Link("fast", 1e11, 1e-12),))
"""Whose kernels and messages take as long as their operations and bytes say."""


class Attending(nn.Module):
    """Sizes that few axes divide: layers may be padded, and long sequences may be attended to in a ring."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        parts = self.into(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2)).square().mean()


@cache
def program(width: int, heads: int) -> Program:
    return program_of(Attending(width, heads), (torch.randn(4, 16, width),))


def floor_of(axes: dict[str, int], count: int, width: int = 24, heads: int = 3) -> float:
    return kernel_floor(program(width, heads), machine_of(Job(axes, CLUSTER)), count).bound


@pytest.mark.slow
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.deep), 2])
@pytest.mark.parametrize("axes", [pytest.param({"a": 4}, marks=pytest.mark.deep), {"a": 2, "b": 4}], ids=len)
def test_no_plan_is_faster(axes: dict[str, int], count: int) -> None:
    """Of the one that is found, in any memory, and of random ones; in more microbatches they are not faster either."""
    pins = {"microbatches": count}
    searches = [Search(pins=pins), Search(pins={**pins, "overlap": "none"})]
    searches += [Search(recipe="random", seed=seed, pins=pins) for seed in seeds(6, 3)]
    found = []
    for search in searches:
        try:
            plan = solve(program(24, 3), axes, CLUSTER, search=search)
        except InfeasibleError:
            continue
        found.append(plan.predicted.compute_seconds + plan.predicted.communication_seconds)
    assert len(found) > 4
    least = floor_of(axes, count)
    assert floor_of(axes, 1) <= least <= min(found) < 2 * least


def test_few_samples_are_not_split_among_many() -> None:
    """In as many microbatches as there are samples each is on one device, where nothing else has equal parts."""
    alone = program_of(nn.Sequential(nn.Linear(5, 5), Mean()), (torch.randn(4, 5),))
    least = [kernel_floor(alone, machine_of(Job({"a": 4}, CLUSTER)), count).bound for count in (1, 2, 4)]
    assert least[0] < least[1] == least[2]


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()
