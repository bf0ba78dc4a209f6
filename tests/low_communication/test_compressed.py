"""Workers of one process that exchange compressed gradients, against the reference of each method, step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.low_communication.compressed.emulate import EmulatedCompression
from tests.distributed.models import mlp, mlp_batch
from tests.low_communication.compressed_cases import CASES, OPTIMIZERS
from tests.low_communication.compressed_reference import run
from tests.low_communication.reference import largest_difference

STEPS, WORKERS = 13, 3


def batches(step: int, worker: int) -> dict[str, torch.Tensor]:
    return mlp_batch(WORKERS * step + worker, rows=4)


def emulated(given: dict[str, Any], optimizer: Any = None) -> tuple[list[nn.Module], EmulatedCompression]:
    models = [mlp() for _ in range(WORKERS)]
    own = [(optimizer or OPTIMIZERS[given["method"]])(m) for m in models]
    return models, EmulatedCompression(models, own, **given)


def backward(models: list[nn.Module], step: int) -> None:
    for worker, model in enumerate(models):
        model.zero_grad()
        model(**batches(step, worker))["loss"].backward()


def trained(given: dict[str, Any], optimizer: Any = None) -> list[dict[str, torch.Tensor]]:
    """Parameters after each step, which are the same bits on all workers."""
    models, workers = emulated(given, optimizer)
    found = []
    for step in range(STEPS):
        backward(models, step)
        workers.step()
        now = [{n: p.detach().clone() for n, p in m.named_parameters()} for m in models]
        assert all(torch.equal(own[n], now[0][n]) for own in now for n in own)
        assert all(p.grad is not None for m in models for p in m.parameters())
        found.append(now[0])
    return found


@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(case: str) -> None:
    given = CASES[case]
    expected = run(mlp(), OPTIMIZERS[given["method"]], batches, WORKERS, STEPS, given)
    plain = run(mlp(), OPTIMIZERS[given["method"]], batches, WORKERS, STEPS, given | {"start": STEPS, "freeze": STEPS})
    found = trained(given)
    for step, own in enumerate(found):
        assert largest_difference(own, expected[step]) < 1e-12
        first = given.get("freeze", given.get("start", 0))
        # Until then as plain averaging, which the reference leaves to torch's own optimizers; then not.
        assert (largest_difference(own, plain[step]) < 1e-12) == (step < first)


@pytest.mark.parametrize("given", [{"method": "topk", "share": 1.0}, {"method": "powersgd", "rank": 12}])
def test_nothing_left_out_is_plain_averaging(given: dict[str, Any]) -> None:
    """All numbers, or a rank that gradients of these few samples do not exceed: 3 workers with 4 rows each."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.wide = nn.Linear(64, 64).double()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.wide(x.repeat(1, 4) * torch.arange(1, 65)) - y.sum()).square().mean()}

    expected = run(
        Wide(), lambda m: torch.optim.SGD(m.parameters(), lr=1e-5), batches, WORKERS, 4, given | {"start": 4}
    )
    models: list[nn.Module] = [Wide() for _ in range(WORKERS)]
    workers = EmulatedCompression(models, [torch.optim.SGD(m.parameters(), lr=1e-5) for m in models], **given)
    for step in range(4):
        backward(models, step)
        workers.step()
        assert largest_difference(dict(models[0].named_parameters()), expected[step]) < 1e-12
        assert workers.workers[0].error < 1e-12 and "wide.weight" in workers.workers[0].method.errors
