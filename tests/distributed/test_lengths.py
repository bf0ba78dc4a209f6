"""Lengths that are planned ahead, and lengths that are not: the numbers are those of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import slow_devices
from tests.distributed.steps import TOLERANCE, adamw, largest, step_apart

pytestmark = pytest.mark.distributed


class Reader(nn.Module):
    """Attention over tokens, and a loss of the next ones, whose labels are shifted."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(32, 16), nn.Embedding(64, 16)
        self.qkv, self.out, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        b, t = ids.shape
        x = self.tokens(ids) + self.positions(torch.arange(t))
        q, k, v = (y.view(b, t, 4, 4).transpose(1, 2) for y in self.qkv(x).chunk(3, 2))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.head(x + self.out(seen.transpose(1, 2).reshape(b, t, 16)))
        return nn.functional.cross_entropy(x[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def reader() -> nn.Module:
    torch.manual_seed(0)
    return Reader().double()


def tokens(length: int, rows: int = 4) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 32, (rows, length), generator=torch.Generator().manual_seed(length))
    return {"ids": ids, "labels": ids}


PLANNED = [(8, 4), (12, 4), (8, 4)]

# Of these, 7 divides by no axis, nor do 3 rows, which a pipeline cannot cut in two; 24 does.
OTHERS = [(7, 4), (24, 4), (16, 3), (8, 4)]


def _there_and_back(
    rank: int, pins: dict[str, Any], others: list[tuple[int, int]], recipe: str | None = None
) -> tuple[float, int, int]:
    """The largest error over lengths that are planned, and over others; graphs before the steps, and after."""
    from autopar import Search
    from autopar.parallelize import parallelize

    model, plain = reader(), reader()
    parallel: Any = parallelize(
        model,
        mesh_of(2, 2),
        tokens(8),
        lengths=[12],
        cluster=slow_devices(),
        search=Search(recipe=recipe, pins=pins),
        timeout=WAIT,
    )
    optimizers = [adamw(m) for m in (parallel, plain)]
    cache = parallel._autopar.cache
    planned = len(cache)
    worst = [step_apart(parallel, plain, optimizers, tokens(n, rows)) for n, rows in PLANNED]
    assert len(cache) == planned
    worst += [step_apart(parallel, plain, optimizers, tokens(n, rows)) for n, rows in others]
    return largest(worst), planned, len(cache)


def test_lengths_there_and_back(ranks: Ranks) -> None:
    pins = {"head.weight": ("S(0)", "R"), "qkv.weight": ("R", "S(1)")}
    for error, planned, after in ranks.run(_there_and_back, pins, [(16, 4)], "ddp"):
        assert error < TOLERANCE and (planned, after) == (2, 3)


@pytest.mark.deep
@pytest.mark.parametrize(
    "pins", [{}, {"batch.*": ("R", "S(1)")}, {"microbatches": 2}, {"stages": 2, "microbatches": 2}]
)
def test_lengths_under_other_plans(ranks: Ranks, pins: dict[str, Any]) -> None:
    others = [(n, rows) for n, rows in OTHERS if rows == 4 or "stages" not in pins]
    for error, _, _ in ranks.run(_there_and_back, pins, others):
        assert error < TOLERANCE


def _own_rows(rank: int) -> tuple[float, int]:
    from autopar.parallelize import parallelize

    parallel: Any = parallelize(
        reader(), mesh_of(4), tokens(8), lengths=[12], cluster=slow_devices(), inputs="local", timeout=WAIT
    )
    plain, worst = reader(), []
    parts, own = parallel.data_world_size, parallel.data_rank
    for length in (8, 12, 8):
        rows = 4 // parts
        mine = tokens(length)["ids"][own * rows : (own + 1) * rows]
        found, expected = parallel(mine, mine), plain(**tokens(length))
        found.backward(), expected.backward()
        worst += [float((found - expected).detach().abs())]
        worst += [float((parallel.full_gradients()[n] - p.grad).abs().max()) for n, p in plain.named_parameters()]  # type: ignore[operator]
        parallel.zero_grad(), plain.zero_grad()
    return largest(worst), len(parallel._autopar.cache)


@pytest.mark.deep
def test_lengths_where_each_rank_passes_its_rows(ranks: Ranks) -> None:
    for error, count in ranks.run(_own_rows):
        assert error < TOLERANCE and count == 2
