"""Kernels that read raw storage, on four ranks: what collectives bring lies otherwise than what the model made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from autopar.rules.strides import order_of
from autopar.search.options import Search
from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import slow_devices
from tests.runtime.step.test_orders import RESULTS, outcome

pytestmark = pytest.mark.distributed


class Block(nn.Module):
    """A block of a UNet: pictures come channels-last, attention looks at their pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 8)
        self.g = nn.GroupNorm(4, 8)
        self.c = nn.Conv2d(8, 8, 3, padding=1)
        self.qkv = nn.Conv1d(8, 24, 1)
        self.n = nn.GroupNorm(2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.f(x).permute(0, 3, 1, 2)
        h = self.c(F.silu(self.g(h)))
        b, c, *size = h.shape
        q, k, v = self.qkv(h.flatten(2)).reshape(b, 3, 2, c // 2, -1).transpose(-1, -2).contiguous().unbind(1)
        y = F.scaled_dot_product_attention(q, k, v).transpose(2, 3).reshape(b, c, *size)
        return self.n((h + y).transpose(2, 3).contiguous()).square().mul(torch.linspace(0.5, 1.5, size[0])).mean()


def block() -> nn.Module:
    torch.manual_seed(0)
    return Block().double()


def batch_of(step: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(step)
    return torch.randn(4, 4, 4, 4, dtype=torch.float64, generator=g)


def state_after(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(batch_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()


PLANS: dict[str, Any] = {
    "groups": ((4,), {"pins": {"g.weight": "S(0)"}}),
    "random": ((2, 2), {"recipe": "random", "seed": 1}),
}


def train(rank: int, labels: tuple[str, ...]) -> dict[str, float]:
    from autopar.parallelize import parallelize

    expected = state_after(block())
    found = {}
    for label in labels:
        sizes, options = PLANS[label]
        model = parallelize(block(), mesh_of(*sizes), search=Search(**options), cluster=slow_devices(), timeout=WAIT)
        state = state_after(model)
        assert state.keys() == expected.keys()
        found[label] = max(float((state[k] - v).abs().max()) for k, v in expected.items())
    return found


def collectives(rank: int) -> list[bool]:
    """Whether what functional collectives give is row-major, whatever the strides of what they are given."""
    from torch.distributed._functional_collectives import all_reduce

    group = mesh_of(4).get_group()
    given = torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)
    return [all_reduce(given, "sum", group).is_contiguous()]


@pytest.mark.slow
@pytest.mark.parametrize("labels", [("random",), pytest.param(("groups",), marks=pytest.mark.deep)], ids=",".join)
def test_training_equals_one_device(ranks: Ranks, labels: tuple[str, ...]) -> None:
    for found in ranks.run(train, labels):
        assert max(found.values()) < 1e-10, found


def test_reductions_give_row_major_tensors(ranks: Ranks) -> None:
    for found in ranks.run(collectives):
        assert all(found)


def strides_on_ranks(rank: int, recipe: str, seed: int) -> list[str]:
    """Results whose strides, or those of this rank's part, or values are others."""
    wrong = []
    for results in RESULTS:
        search = Search(recipe=recipe, seed=seed)
        found, expected = outcome(results, mesh_of(4), cluster=slow_devices(), search=search, timeout=WAIT)
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            part, order = getattr(a, "_local_tensor", a), order_of(b)
            if a.stride() != b.stride() or (order and not part.permute(order).is_contiguous()):
                wrong.append(f"{results.__name__} {i}: {a.stride()}, {part.stride()} for {b.stride()}")
            if not torch.allclose(getattr(a, "full_tensor", lambda a=a: a)(), b, rtol=1e-10):
                wrong.append(f"{results.__name__} {i}: values")
    return wrong


DEEP = [pytest.param("ddp", 0, marks=pytest.mark.deep), pytest.param("random", 2, marks=pytest.mark.deep)]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "seed"), [("random", 1), *DEEP])
def test_strides_of_results(ranks: Ranks, recipe: str, seed: int) -> None:
    for wrong in ranks.run(strides_on_ranks, recipe, seed):
        assert not wrong
