"""A run that evaluates before its first step, or whose evaluation computes otherwise: layouts are those of training."""

from __future__ import annotations

import copy
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


class Words(nn.Module):
    """In training it computes logits of some words at a time, which cuts the words in pieces of two."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(62, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h, head = self.words(ids).tanh(), self.words.weight
        parts = [head[:20], head[20:40], head[40:]] if self.training else [head]
        logits = torch.cat([nn.functional.linear(h, part) for part in parts], -1)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def evaluates_whole(rank: int) -> tuple[list[float], list[float], str]:
    torch.manual_seed(0)
    model = Words().double()
    plain = copy.deepcopy(model)
    model = autopar.parallelize(model, mesh_of(2), search=autopar.Search(recipe="fsdp", cache=False))
    losses: list[list[float]] = []
    for m in (model, plain):
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.1)
        losses.append([])
        for step in range(3):
            ids = torch.randint(0, 62, (4, 6), generator=torch.Generator().manual_seed(step))
            m.train()
            loss = m(ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            m.eval()
            with torch.no_grad():
                losses[-1] += [loss.item(), m(ids).item()]
            m(ids).backward()  # gradients in evaluation
            optimizer.step()
            optimizer.zero_grad()
    return losses[0], losses[1], str(model.words.weight.placements)


@pytest.mark.slow
def test_evaluation_has_the_factors_of_layouts_that_training_chose(two_ranks: Ranks) -> None:
    for found, expected, placements in two_ranks.run(evaluates_whole):
        assert "31" in placements
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def evaluates_first_under_a_plan(rank: int) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    model = Words().double()
    plain = copy.deepcopy(model)
    ids = torch.randint(0, 62, (4, 6), generator=torch.Generator().manual_seed(0))
    plan = autopar.plan(model, (ids,), cluster="cpu", axes={"a": 2}, search=autopar.Search(recipe="fsdp", cache=False))
    model = autopar.parallelize(model, mesh_of(2), plan=plan)
    losses = []
    for m in (model, plain):
        m.eval()
        with torch.no_grad():
            losses.append([m(ids).item()])
        m.train()
        losses[-1].append(m(ids).item())
    return losses[0], losses[1]


@pytest.mark.slow
def test_evaluation_under_a_plan_for_training(two_ranks: Ranks) -> None:
    for found, expected in two_ranks.run(evaluates_first_under_a_plan):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.deep
def test_a_batch_that_cannot_train(two_ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "autopar")
    assert two_ranks.run(evaluates_first, False, True)[0][:2] == (False, 1)
