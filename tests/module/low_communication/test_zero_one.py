"""0/1 Adam, and numbers that have no variance, of workers in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.module.low_communication.compressed.emulate import EmulatedCompression
from tests.distributed.models import mlp
from tests.module.low_communication.compressed_reference import zero_one
from tests.module.low_communication.reference import largest_difference
from tests.module.low_communication.test_compressed import WORKERS, backward, batches, seeded

GIVEN = {"method": "zeroone", "freeze": 7, "doubling": 2, "local": 4, "longest": 4}


def rate(step: int) -> float:
    return 0.02 / (1 + step)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_equals_the_reference(kind: Any) -> None:
    models = [mlp() for _ in range(WORKERS)]
    optimizers = [kind(m.parameters(), lr=1.0, weight_decay=0.1) for m in models]
    workers = EmulatedCompression(models, optimizers, **GIVEN)
    decay = {"decay" if kind is torch.optim.Adam else "decoupled": 0.1}
    expected = zero_one(mlp(), batches, WORKERS, 20, GIVEN, rate, **decay)
    apart = []
    for step in range(20):
        backward(models, step)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate(step)
        workers.step()
        own = [{n: p.detach() for n, p in m.named_parameters()} for m in models]
        assert max(largest_difference(o, e) for o, e in zip(own, expected[step], strict=True)) < 1e-12
        apart.append(any(not torch.equal(own[0][n], o[n]) for o in own for n in o))
    # Steps 8 to 11 exchange all, 12 to 15 every second one, and then every fourth.
    assert [step + 1 for step, own in enumerate(apart) if own] == [12, 14, 16, 17, 18, 20]


def test_begins_as_adam() -> None:
    found, reference = [mlp() for _ in range(WORKERS)], [mlp() for _ in range(WORKERS)]
    for models, given in ((found, {"method": "zeroone", "freeze": 9}), (reference, {"method": "onebit", "freeze": 9})):
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in models]
        workers = EmulatedCompression(models, optimizers, **given)
        for step in range(6):
            backward(models, step)
            workers.step()
    of = [{n: p.detach() for n, p in m[0].named_parameters()} for m in (found, reference)]
    assert largest_difference(*of) < 1e-14


class Words(nn.Module):
    """An embedding of which few rows have gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(12, 4).double(), nn.Linear(4, 2).double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids)).square().mean()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("method", ["onebit", "zeroone"])
def test_numbers_without_a_variance_stay(method: str, kind: Any) -> None:
    """Rows that no batch had until variances were frozen: a sign over eps alone would throw them to 1e6."""
    models = [Words() for _ in range(2)]
    before = models[0].embed.weight.detach().clone()
    optimizers = [kind(m.parameters(), lr=0.01, weight_decay=0.0) for m in models]
    workers = EmulatedCompression(models, optimizers, method=method, freeze=3)
    for step in range(8):
        for i, model in enumerate(models):
            model.zero_grad()
            model(torch.tensor([0, 1, 2 + i, 7 if step > 4 else 0])).backward()
        workers.step()
    weight = models[1].embed.weight.detach()
    assert torch.equal(weight[4:], before[4:]) and float((weight[:4] - before[:4]).abs().min()) > 1e-4
    assert float(weight.abs().max()) < 4 and torch.equal(weight, models[0].embed.weight)
    method_ = workers.workers[0].method
    assert not method_.errors["embed.weight"][4:].any()


class Attending(nn.Module):
    """Queries, keys and values in one bias: that of the keys changes no result, and its gradients are roundings."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 8)
        nn.init.zeros_(self.qkv.bias)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return (self.head((q @ k.mT).softmax(-1) @ v) - x.flip(-1)).square().mean()


@pytest.mark.parametrize("method", ["onebit", "zeroone"])
def test_numbers_whose_variance_is_of_roundings_stay(method: str) -> None:
    """A sign over them would throw them to 1e10, and weight decay would bring that into all else."""
    models = [Attending() for _ in range(2)]
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01, weight_decay=0.01) for m in models]
    workers = EmulatedCompression(models, optimizers, method=method, freeze=4)
    for step in range(12):
        if step == 4:
            keys = models[0].qkv.bias.detach()[8:16].clone()
        for i, model in enumerate(models):
            model.zero_grad()
            model(torch.randn(2, 5, 8, generator=seeded(step, i), dtype=torch.float64)).backward()
        workers.step()
    assert torch.equal(models[1].qkv.bias.detach()[8:16], keys)
    assert max(float(p.detach().abs().max()) for p in models[0].parameters()) < 1


def test_bad_input() -> None:
    models = [mlp() for _ in range(2)]

    def made(optimizer: Any = torch.optim.Adam, **given: Any) -> EmulatedCompression:
        return EmulatedCompression(models, [optimizer(m.parameters(), lr=0.1) for m in models], **given)

    with pytest.raises(ValueError, match=r"method='zeroone' must have freeze="):
        made(method="zeroone")
    with pytest.raises(ValueError, match=r"doubling=2 is for method='zeroone'"):
        made(method="onebit", freeze=2, doubling=2)
    with pytest.raises(ValueError, match=r"longest=4 is of distances that double: give local= too"):
        made(method="zeroone", freeze=2, longest=4)
    with pytest.raises(ValueError, match=r"local=0"):
        made(method="zeroone", freeze=2, local=0)
    with pytest.raises(ValueError, match=r"method='zeroone' makes Adam's update itself: optimizer= is SGD"):
        made(torch.optim.SGD, method="zeroone", freeze=2)
    late = made(method="zeroone", freeze=2)
    with pytest.raises(AutoparError, match=r"'up\.weight' had no gradient while variances were updated"):
        for step in range(3):
            if step == 2:
                for model in models:
                    model(**batches(0, 0))["loss"].backward()
            late.step()
