"""Errors of few bits (feedback) of elastic workers in checkpoints, beside the recurrence written down in float64."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore

import autopar
import autopar.checkpoint

GIVEN = {"every": 2, "bits": 4, "feedback": True}
RATE, LARGEST = 0.05, 7
CURVES = torch.tensor([1.0, 0.03, 0.5, 0.002, 2.0, 0.01], dtype=torch.float64)


class Bowl(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.arange(1, 7) / 3)
        self.register_buffer("curves", CURVES.float())

    def forward(self, to: torch.Tensor) -> torch.Tensor:
        return (self.curves * (self.at - to).square()).sum()


def aim(worker: int, step: int) -> torch.Tensor:
    return torch.cos(torch.arange(6) * (worker + 1.0) + step)


class Recurrence:
    """What `workers` do, of this alone: x, a, m and e, in float64."""

    def __init__(
        self, workers: Mapping[int, torch.Tensor], at: torch.Tensor, momentum: torch.Tensor, step: int
    ) -> None:
        self.left, self.at, self.momentum, self.step = dict(workers), at.double(), momentum.double(), step

    def rounds(self, count: int) -> torch.Tensor:
        for _ in range(count):
            sent = []
            for worker, left in self.left.items():
                x = self.at.clone()
                for step in range(self.step, self.step + 2):
                    x -= RATE * 2 * CURVES * (x - aim(worker, step).double())
                whole = self.at - x + left
                scale = whole.abs().max() / LARGEST
                sent.append((whole / scale).round() * scale)
                self.left[worker] = whole - sent[-1]
            mean = torch.stack(sent).mean(0)
            self.momentum = 0.9 * self.momentum + mean
            self.at = self.at - 0.7 * (mean + 0.9 * self.momentum)
            self.step += 2
        return self.at

    def of(self, workers: Mapping[int, int | None]) -> Recurrence:
        """That of other workers, with the errors of these; None: nothing left out."""
        blank = torch.zeros(6, dtype=torch.float64)
        left = {n: blank if source is None else self.left[source] for n, source in workers.items()}
        return Recurrence(left, self.at, self.momentum, self.step)


@pytest.fixture(scope="module")
def captured() -> Any:
    model = autopar.parallelize(Bowl(), None, (aim(0, 0),))
    model(aim(0, 0)).backward()
    model.zero_grad()
    return model


def run(captured: Any, store: TCPStore, name: str, workers: Mapping[int, Path | None], rounds: int, **save: Any) -> Any:
    """Parameters of each worker after some more rounds, having begun from some folders."""
    made = {}
    for worker, folder in workers.items():
        model = copy.deepcopy(captured)
        model(aim(0, 0)).backward()
        model.zero_grad()
        client = TCPStore("localhost", store.port, is_master=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        told = {"worker": worker, "workers": len(workers), "store": client, "run": name, "timeout": 20.0}
        local = autopar.ElasticWorkers(model, optimizer, **told, **GIVEN)
        if folder is not None:
            autopar.checkpoint.load(folder, model, optimizer, local=local)
        made[worker] = model, local

    def train(worker: int) -> torch.Tensor:
        model, local = made[worker]
        local.join()
        until = local.rounds + rounds
        while local.rounds < until:
            local.optimizer.zero_grad()
            model(aim(worker, local.steps)).backward()
            local.optimizer.step()
            if save and local.steps % 2 == 0:
                autopar.checkpoint.save(
                    save["folder"] / str(worker), model, local.optimizer, step=local.steps, keep=9, local=local
                )
        found: torch.Tensor = model.full_state_dict()["at"]
        return found

    with ThreadPoolExecutor(len(workers)) as pool:
        found = dict(zip(workers, pool.map(train, workers), strict=True))
    for _, local in made.values():
        local.leave()
    return found


@pytest.fixture(scope="module")
def saved(captured: Any, tmp_path_factory: Any) -> Any:
    """A store, folders of two workers after three rounds, and the recurrence there."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    folder = tmp_path_factory.mktemp("saved")
    blank = torch.zeros(6, dtype=torch.float64)
    expected = Recurrence({0: blank, 1: blank}, Bowl().at.detach(), blank, 0)
    found = run(captured, store, "first", {0: None, 1: None}, 3, folder=folder)
    at = expected.rounds(3)
    assert all((own - at).abs().max() < 1e-6 for own in found.values())
    assert min(left.abs().max() for left in expected.left.values()) > 1e-3
    return store, folder, expected


def newest(folder: Path, worker: int, back: int = 0) -> Path:
    return sorted(p for p in (folder / str(worker)).iterdir() if p.is_dir())[-1 - back]


@pytest.mark.parametrize(
    ("folders", "left"),
    [
        ({0: 0, 1: 1}, {0: 0, 1: 1}),
        ({0: 0, 1: 1, 2: 0}, {0: 0, 1: 1, 2: None}),
        ({1: 1}, {1: 1}),
        ({0: 0, 1: 0}, {0: 0, 1: None}),
    ],
)
def test_errors_go_on_from_a_checkpoint(
    captured: Any, saved: Any, caplog: Any, folders: dict[int, int], left: dict[int, int | None]
) -> None:
    store, folder, before = saved
    found = run(captured, store, f"again {folders}", {w: newest(folder, f) for w, f in folders.items()}, 4)
    expected, without = before.of(left).rounds(4), before.of(dict.fromkeys(left)).rounds(4)
    assert (expected - without).abs().max() > 1e-3
    for own in found.values():
        assert (own - expected).abs().max() < 1e-6
    said = " ".join(r.message for r in caplog.records if r.levelname == "WARNING")
    assert ("workers [0] have left out is lost" in said) == (0 not in folders)
    assert ("worker 1 has loaded a checkpoint of worker 0" in said) == (folders.get(1) == 0)


def test_errors_of_an_older_checkpoint_are_dropped(captured: Any, saved: Any, caplog: Any) -> None:
    store, folder, before = saved
    found = run(captured, store, "older", {0: newest(folder, 0, 1), 1: newest(folder, 1)}, 4)
    expected = before.of({0: None, 1: 1}).rounds(4)
    assert all((own - expected).abs().max() < 1e-6 for own in found.values())
    assert any("worker 0: what its few bits have left out" in r.message for r in caplog.records)
