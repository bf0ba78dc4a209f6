"""Dropout on four ranks: the numbers of one device, or blocks of independent ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import mlp_batch, slow_devices

pytestmark = pytest.mark.distributed


class Noisy(torch.autograd.Function):
    """Draws in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (0.5 + torch.rand_like(gradient))


class Dropping(nn.Module):
    """An MLP with dropout, which also returns what it keeps of its input, and gradients with noise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.25)
        self.double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden: torch.Tensor = Noisy.apply(self.drop(torch.relu(self.up(x))))  # type: ignore[no-untyped-call]
        out = self.down(hidden)
        return {"loss": ((out - y) ** 2).mean(), "kept": self.drop(x)}


def trained(model: nn.Module, rows: int = 8) -> list[dict[str, torch.Tensor]]:
    """Full parameters after each of three steps; gradients of two batches accumulate in each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(3):
        for part in range(2):
            model(**mlp_batch(2 * step + part, rows))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        full = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
        found.append({k: v.clone() for k, v in full.items()})
    return found


def together(rank: int, sizes: tuple[int, ...]) -> float:
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    plain = Dropping()
    torch.manual_seed(7)
    expected = trained(plain)
    after = torch.rand(1)
    search = Search(recipe="random", seed=3) if len(sizes) > 1 else Search(pins={"batch.*": "S(0)"})
    model = Dropping()
    torch.manual_seed(7)
    parallel = parallelize(
        model, mesh_of(*sizes), deterministic=True, search=search, cluster=slow_devices(), timeout=WAIT
    )
    steps = zip(trained(parallel), expected, strict=True)
    assert torch.equal(torch.rand(1), after)  # as many numbers as on one device
    return max(float((a[k] - b[k]).abs().max()) for a, b in steps for k in b)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2), pytest.param((4,), marks=pytest.mark.deep)])
def test_deterministic_draws_what_one_device_draws(ranks: Ranks, sizes: tuple[int, ...]) -> None:
    assert max(ranks.run(together, sizes)) < 1e-9


def apart(rank: int, seed: int) -> dict[str, Any]:
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    mesh = mesh_of(2, 2)
    model = Dropping()
    torch.manual_seed(seed + rank)  # what ranks other than 0 draw by themselves is of no matter
    search = Search(pins={"batch.*": ("S(0)", "R"), "*.weight": ("R", "R"), "*.bias": ("R", "R")})
    parallel = parallelize(model, mesh, search=search, cluster=slow_devices(), timeout=WAIT)
    batch = mlp_batch(0, rows=64)
    kept = [parallel(**batch)["kept"] for _ in range(2)]
    with parallel.no_sync():
        parallel(**batch)["loss"].backward()
    parameters = trained(parallel, rows=64)[-1]
    own = {n: p.to_local().detach().clone() for n, p in parallel.named_parameters()}
    return {
        "masks": [k.full_tensor() != 0 for k in kept],
        "local": kept[0].to_local() != 0,
        "placements": [str(p) for p in kept[0].placements],
        "parameters": parameters,
        "own": own,
    }


@pytest.mark.slow
def test_blocks_are_independent_and_replicas_equal(ranks: Ranks) -> None:
    results = ranks.run(apart, 1)
    again, other = ranks.run(apart, 1), ranks.run(apart, 2)
    first = results[0]
    assert first["placements"][0] == "S(0)" or "Shard(dim=0)" in first["placements"][0]
    for rank, found in enumerate(results):
        for name, value in found["own"].items():  # parameters are replicated, and stay equal
            assert torch.equal(value, first["own"][name])
        for against, expected in enumerate(results):
            same = all(
                ("R" == p[0]) or (rank >> 1 - axis) & 1 == (against >> 1 - axis) & 1
                for axis, p in enumerate(first["placements"])
            )
            assert torch.equal(found["local"], expected["local"]) == same
        for mask in found["masks"]:
            assert abs(float(mask.double().mean()) - 0.75) < 0.06  # 1024 numbers: more than four deviations
        assert not torch.equal(*found["masks"])
        assert all(torch.equal(v, again[rank]["parameters"][n]) for n, v in found["parameters"].items())
        assert not torch.equal(found["masks"][0], other[rank]["masks"][0])


def unlike(rank: int) -> str:
    from autopar.errors import RankError
    from autopar.parallelize import parallelize

    model = Dropping()
    torch.manual_seed(rank)
    with pytest.raises(RankError) as error:
        parallelize(model, mesh_of(2), mlp_batch(0), deterministic=True, timeout=WAIT)
    plain = nn.Sequential(nn.Linear(4, 4))
    nn.init.zeros_(plain[0].weight)
    nn.init.zeros_(plain[0].bias)
    parallelize(plain, mesh_of(2), (torch.zeros(4, 4),), deterministic=True, timeout=WAIT)  # draws nothing
    return str(error.value)


def test_deterministic_needs_generators_in_the_same_state(two_ranks: Ranks) -> None:
    for message in two_ranks.run(unlike):
        assert "generator's state" in message
        assert "call torch.manual_seed with the same seed on every rank" in message
