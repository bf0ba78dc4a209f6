"""A run that evaluates before its first step: its layouts are those that training gets."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from tests.distributed.launch import Ranks, mesh_of

pytestmark = pytest.mark.distributed


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        if self.training and labels is None:
            raise ValueError("no labels")
        scores = self.down(self.drop(self.up(x)).relu())
        return scores if labels is None else nn.functional.cross_entropy(scores, labels)


def made() -> Classifier:
    torch.manual_seed(0)
    return Classifier().double()


def evaluates_first(rank: int, with_labels: bool, with_optimizer: bool) -> tuple[Any, ...]:
    x, labels = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).double(), torch.arange(8) % 4
    model = autopar.parallelize(made(), mesh_of(2), search=autopar.Search(cache=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if with_optimizer else None
    model.eval()
    model.drop.train()  # a mode of its own, which must stay
    model.drop.p = 0.0
    with torch.no_grad():
        found = model(x, labels) if with_labels else model(x).full_tensor()
    plain = made()
    plain.eval()
    with torch.no_grad():
        assert torch.allclose(found, plain(x, labels) if with_labels else plain(x), atol=1e-12)
    modes = [m.training for m in model.modules()]
    graphs = len(model._autopar.cache)
    with torch.no_grad():
        model(x, labels) if with_labels else model(x)
    assert len(model._autopar.cache) == graphs  # nothing is captured again
    trains = model._autopar.first.program.training
    model.train()
    loss = model(x, labels)
    plain.train()
    plain.drop.p = 0.0
    expected = plain(x, labels)
    loss.backward()
    expected.backward()
    gradients = model.full_gradients()
    assert torch.allclose(loss, expected, atol=1e-12)
    assert all(torch.allclose(p.grad, gradients[n], atol=1e-12) for n, p in plain.named_parameters())  # type: ignore[arg-type]
    if optimizer is not None:
        optimizer.step()
    return trains, graphs, modes[:4]


def test_layouts_are_of_the_step(two_ranks: Ranks) -> None:
    for trains, graphs, modes in two_ranks.run(evaluates_first, True, True):
        assert (trains, graphs, modes) == (True, 2, [False, False, True, False])
    # Nobody trains, as far as one can see.
    assert two_ranks.run(evaluates_first, True, False)[0][:2] == (False, 1)


@pytest.mark.deep
def test_a_batch_that_cannot_train(two_ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "autopar")
    assert two_ranks.run(evaluates_first, False, True)[0][:2] == (False, 1)
