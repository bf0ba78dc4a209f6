"""Figures of the steps, for a callback, and as the lines that rank 0 prints."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Cluster
from autopar.integrations.metrics import to_tensorboard, watch
from autopar.module.metrics import Metrics, ideal_seconds, tokens_of
from autopar.module.progress import Spoken


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids)).square().mean()


IDS = torch.zeros(4, 8, dtype=torch.long)


def trained(model: Any, optimizers: list[torch.optim.Optimizer], steps: int, calls: int = 1) -> None:
    for _ in range(steps):
        for _ in range(calls):
            model(IDS).backward()
        with torch.no_grad():
            model(IDS)  # an evaluation is no part of it
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_steps_rows_and_operations() -> None:
    # A known peak, so low that the model computes at a share of it that can be read.
    device = Cluster.preset("cpu").device
    slow = autopar.Cluster(
        "slow", type(device)("slow", {"float32": 1e6}, 1e9, 1e9, 1e-6), Cluster.preset("cpu").links, ()
    )
    model: Any = autopar.parallelize(Reader(), None, (IDS,), cluster=slow)
    seen: list[Metrics] = []
    stop = watch(model, seen.append, every=2)
    optimizers = [torch.optim.SGD(model.head.parameters()), torch.optim.SGD(model.table.parameters())]
    other = nn.Linear(2, 2)
    elsewhere = torch.optim.SGD(other.parameters())
    other(torch.ones(1, 2)).sum().backward()
    trained(model, [elsewhere, *optimizers], 5, calls=3)
    assert [m.step for m in seen] == [1, 3, 5]
    for found in seen:
        assert found.tokens_per_second == pytest.approx(8 * found.rows_per_second)
        assert found.rows_per_second == pytest.approx(3 * 4 / found.seconds)
        # Three products of 32 x 16 x 32 a call: of the forward pass, and for the gradients of both arguments.
        operations = 3 * 3 * 2 * 32 * 16 * 32
        assert found.mfu == pytest.approx(operations / 1e6 / found.seconds)
        assert found.peak_memory_bytes and found.predicted_memory_bytes
    stop()
    trained(model, optimizers, 3)
    assert len(seen) == 3


def test_what_is_not_known_is_none() -> None:
    model: Any = autopar.parallelize(nn.Linear(8, 4), None, cluster="cpu", loss_fn=lambda output, _: output.sum())
    seen: list[Metrics] = []
    watch(model, seen.append)
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(2, 8)).backward()
    optimizer.step()
    assert (seen[0].tokens_per_second, seen[0].mfu) == (None, None)
    program = model._autopar.first.program
    assert tokens_of(program) is None and ideal_seconds(program, Cluster.preset("cpu").device) > 0
    # Hooks of optimizers are torch's, for all of them: a model does not live for its own.
    gone = weakref.ref(model._autopar)
    del model, optimizer, program
    gc.collect()
    assert gone() is None


def test_tensorboard() -> None:
    class Writer:
        def __init__(self) -> None:
            self.scalars: list[tuple[str, float, int]] = []

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.scalars.append((name, value, step))

    writer = Writer()
    to_tensorboard(writer)(Metrics(7, 0.5, 8.0, None, None, 1e9, 2e9))
    assert writer.scalars[:2] == [("autopar/seconds", 0.5, 7), ("autopar/rows_per_second", 8.0, 7)]
    assert len(writer.scalars) == 4


def test_phases_are_lines_where_they_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for lines in (False, True):
        spoken = Spoken(lines)
        with spoken.specializing():
            for name in ("capture", "search"):
                with spoken.phase(name):
                    spoken.searching("a bound", 1.0, 0.5)
    assert [line.split(" 0.")[0] for line in capsys.readouterr().err.splitlines()] == [
        "autopar: capture", "autopar: search",
    ]  # fmt: skip
