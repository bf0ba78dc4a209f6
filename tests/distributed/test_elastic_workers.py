"""Elastic workers in processes, of which one is killed in a meeting and comes back, beside plain PyTorch in float64."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from tests.distributed.launch import Ranks, mesh_of
from tests.module.low_communication.elastic_lives import batch, expected, made, optimized, wait_until

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[2]
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


class Lives:
    """Workers of some processes each."""

    def __init__(self, folder: Path, size: int, search: dict[str, Any], total: int) -> None:
        self.folder = folder
        self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.told = {
            "size": size, "search": search, "total": total, "workers": 3, "folder": str(folder), "grace": 4.0,
            "store": f"localhost:{self.store.port}", "dies": list(range(size)),
        }  # fmt: skip
        self.processes: list[list[subprocess.Popen[bytes]]] = []

    def start(self, worker: int, **told: Any) -> None:
        life = len(self.processes)
        given = self.told | {
            "worker": worker, "life": life, "seed": life, "meeting": str(self.folder / f"meeting-{life}"), **told
        }  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "tests.distributed.elastic_worker_process"]
        self.processes.append([])
        for rank in range(self.told["size"]):
            with (self.folder / f"log-{life}-{rank}").open("wb") as out:
                self.processes[-1].append(
                    subprocess.Popen(
                        [*words, json.dumps(given | {"rank": rank})], cwd=ROOT, env=environment, stdout=out, stderr=out
                    )
                )

    def ended(self, life: int, seconds: float = 200.0) -> list[int]:
        deadline = time.monotonic() + seconds
        for process in self.processes[life]:
            process.wait(max(0.1, deadline - time.monotonic()))
        return [p.returncode for p in self.processes[life]]

    def said(self, life: Any = "*", rank: Any = 0) -> list[dict[str, Any]]:
        return [torch.load(p) for p in self.folder.glob(f"said-{life}-{rank}-*.pt")]

    def logs(self) -> str:
        return "\n".join(f"{p.name}: {p.read_text()[-3000:]}" for p in sorted(self.folder.glob("log-*")))

    def close(self) -> None:
        for process in [p for processes in self.processes for p in processes]:
            process.kill()
            process.wait()


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Any]:
    made: list[Lives] = []

    def make(**told: Any) -> Lives:
        made.append(Lives(tmp_path, **told))
        return made[-1]

    yield make
    for each in made:
        each.close()


def saved_underway(rank: int, folder: str, port: int) -> tuple[float, int]:
    """A worker of two ranks, saved in shards while a meeting is under way; and one that goes on from there."""
    import autopar
    from autopar import checkpoint

    def make(run: str, every: Any = 4) -> tuple[Any, Any]:
        search = autopar.Search(recipe="fsdp")
        model = autopar.parallelize(made(0), mesh_of(2), (batch(0, 0),), search=search, timeout=60)
        client = TCPStore("localhost", port, is_master=False)
        given = {"worker": 0, "workers": 1, "store": client, "run": run, "every": every, "fragments": 2, "delay": 1}
        return model, autopar.ElasticWorkers(model, optimized(model)[0], **given)

    def step(model: Any, local: Any) -> None:
        local.optimizer.zero_grad()
        model(batch(local.steps, 0)).backward()
        local.optimizer.step()

    model, local = make("first")
    local.join()
    assert local.predicted.steps == 4 and local.predicted.sent_bytes == 0  # nobody else is there
    while local._underway is None:
        step(model, local)
    before = {n: t.clone() for n, t in local._tensors().items()}
    checkpoint.save(folder, model, local.optimizer, step=local.steps, local=local)
    assert all(torch.equal(t, before[n]) for n, t in local._tensors().items())
    step(model, local)
    again, other = make("second")
    assert checkpoint.load(folder, again, other.optimizer, local=other).step == other.steps == local.steps - 1
    assert any(
        p.is_contiguous() and hasattr(p, "placements") and p.placements[0].is_shard() for p in again.parameters()
    )
    states = zip(local._outer.anchor.values(), other._outer.anchor.values(), strict=True)
    error = max(float((a - b).abs().max()) for a, b in states)
    other.join()
    local.leave()
    step(again, other)
    other.detach()
    local.detach()
    chosen = make("third", "auto")[1]
    chosen.join()
    assert chosen.settings.every > 4 and chosen.predicted.slowdown <= 0.05
    return error, other.steps - local.steps


def test_a_checkpoint_while_a_meeting_is_under_way(two_ranks: Ranks, tmp_path: Path) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert two_ranks.run(saved_underway, str(tmp_path), store.port) == [(0.0, 0)] * 2


@pytest.mark.deep
@pytest.mark.parametrize(
    ("where", "size", "dies"),
    [
        ("exchange", 1, [0]),
        ("exchange", 2, [0, 1]),
        ("coming", 2, [1]),
        ("voted", 2, [0, 1]),
        ("voted", 2, [0]),
    ],
)
def test_a_worker_is_killed_and_comes_back(lives: Any, where: str, size: int, dies: list[int]) -> None:
    """Worker 2 in the second meeting; what comes back is in the third; worker 1 leaves after the fourth."""
    run = lives(size=size, search={"recipe": "fsdp"} if size > 1 else {}, total=5)
    run.start(0, waits={"2": 3})
    run.start(1, leaves=4, waits={"2": 3})  # else it would go on without worker 0 after the grace
    run.start(2, kill=[where, 2], dies=dies, first=1 if where == "voted" else 0)
    # Of a worker whose other rank is killed, what is left ends with an error that names it.
    assert -signal.SIGKILL in run.ended(2), run.logs()
    wait_until(lambda: any(s["rounds"] == 2 for s in run.said(0)), "second round")
    run.start(2)
    for life in (0, 1, 3):
        assert run.ended(life) == [0] * size, run.logs()
    share = [(2, False)] if where == "voted" else []
    all_new, all_there = [(w, True) for w in range(3)], [(w, False) for w in range(3)]
    second = [(0, False), (1, False), *share]
    history = [all_new, all_there, second, [(0, False), (1, False), (2, True)], all_there, [(0, False), (2, False)]]
    states = expected(history, True, OUTER)
    for rank in range(size):
        said = run.said(rank=rank)
        assert {(s["worker"], s["rounds"]) for s in said} >= {
            (w, rounds) for rounds, members in enumerate(history) for w, _ in members
        } - {(2, 2)}
        for s in said:
            assert s["members"] == tuple(w for w, _ in history[s["rounds"]])
            for name, value in states[s["rounds"]][s["worker"]].items():
                error = float((s["state"][name] - value).abs().max())
                assert error < 1e-10, (name, s["worker"], s["rounds"], error)
