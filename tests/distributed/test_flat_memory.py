"""A thousand steps leave no tensors behind: microbatches, clipping, an optimizer, and evaluation in between."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autopar import parallelize
from autopar.search.options import Search
from tests.distributed.launch import WAIT, Ranks, mesh_of

pytestmark = [pytest.mark.distributed, pytest.mark.deep]

STEPS, WARM = 1000, 200
MIB = 2**20


def resident() -> float:
    """MiB of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / MIB


def after_steps(rank: int, ranks: int) -> list[tuple[int, float]]:
    """Tensors that are alive, and resident memory, after the first steps and after the last."""
    mesh: Any = mesh_of(ranks) if ranks else None
    search = Search(recipe="fsdp" if ranks else None, pins={"microbatches": 2})
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    model: Any = parallelize(net, mesh, loss_fn=lambda o, _: o.square().mean(), search=search, timeout=WAIT)
    optimizer, found = torch.optim.AdamW(model.parameters()), []
    for step in range(STEPS + 1):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        model.train()
        model(x).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            model.eval()
            with torch.no_grad():
                model(x)
        if step in (WARM, STEPS):
            gc.collect()
            found.append((sum(isinstance(o, torch.Tensor) for o in gc.get_objects()), resident()))
    return found


def require_flat(first: tuple[int, float], last: tuple[int, float]) -> None:
    assert last[0] <= first[0]
    assert last[1] - first[1] < 8  # MiB; 1 was measured, of Gloo


def test_one_device() -> None:
    require_flat(*after_steps(0, 0))


def test_two_ranks(two_ranks: Ranks) -> None:
    for first, last in two_ranks.run(after_steps, 2):
        require_flat(first, last)
