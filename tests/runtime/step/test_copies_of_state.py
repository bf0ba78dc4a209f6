"""Copies of buffers that a model makes before it writes to them: results and gradients are of the values before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar import parallelize
from autopar.search.options import Search


class Copies(nn.Module):
    """What it returns and saves are views of copies; graphs have no copies, so that they are views of the buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(4, 4)
        self.register_buffer("rate", torch.rand(4) + 1)
        self.register_buffer("table", torch.rand(4, 4))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", torch.zeros(2, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.up(x) * self.rate.clone().view(1, 4) + x @ self.table.clone().t()
        found = (self.rate.clone().view(2, 2), self.table.t().contiguous(), self.table[1:].clone(), self.count.clone())
        self.last = self.rate.detach().clone().view(2, 2)
        self.rate.mul_(2)
        self.table.add_(1)
        self.count += 1
        return (h.square().sum(), *found)


def outcome(model: Any, plain: Copies) -> list[Tensor]:
    """Of two steps: losses, other results as they are after both, gradients, and buffers."""
    found: list[Tensor] = []
    for step in range(2):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step)).double()
        loss, *others = model(x)
        loss.backward()
        found += [loss.detach(), *others]
    gradients = [p.grad for p in plain.parameters() if p.grad is not None]
    assert len(gradients) == 2
    return [getattr(t, "full_tensor", lambda t=t: t)() for t in (*found, *gradients, *plain.buffers())]


@pytest.mark.parametrize("pins", [{}, {"microbatches": 2}], ids=["whole", "microbatches"])
def test_copies_have_the_values_before(pins: dict[str, Any]) -> None:
    plain = Copies().double()
    given = copy.deepcopy(plain)
    model = parallelize(given, None, (torch.randn(4, 4).double(),), search=Search(pins=pins))
    for a, b in zip(outcome(model, given), outcome(plain, plain), strict=True):
        torch.testing.assert_close(a, b)


class Results(nn.Module):
    """Some results are in the memory of others, and others only have the same values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.up(x)
        zeros = (torch.zeros(2, dtype=x.dtype), torch.zeros(2, dtype=x.dtype))
        return (h.square().sum(), h, h.clone(), h.view(-1), h[1:].detach().clone(), *zeros)


def written(model: Any) -> list[Tensor]:
    """Results after the step, the second, third and last but one of them written by the script."""
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).double()
    loss, *others = model(x)
    loss.backward()
    with torch.no_grad():
        for number in (0, 1, 4):
            others[number].add_(number + 1)
    return [getattr(t, "full_tensor", lambda t=t: t)().detach() for t in others]


def test_results_are_apart_where_the_model_has_them_apart() -> None:
    plain = Results().double()
    model = parallelize(copy.deepcopy(plain), None, (torch.randn(4, 4).double(),))
    for a, b in zip(written(model), written(plain), strict=True):
        torch.testing.assert_close(a, b)
