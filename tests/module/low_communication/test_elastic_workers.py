"""Workers that come and go, in threads of one process that meet at a store and exchange by Gloo."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

import autopar
from tests.module.low_communication.elastic_lives import (
    EVERY,
    KilledError,
    batch,
    expected,
    kill_at,
    live,
    made,
    optimized,
    wait_until,
)

OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


@pytest.fixture
def store() -> Iterator[TCPStore]:
    yield TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(scope="module")
def captured() -> Any:
    model = autopar.parallelize(made(0), None, (batch(0, 0),))
    model(batch(0, 0)).backward()  # a capture patches torch, and is not for threads beside it
    model.zero_grad()
    return model


def parallel(captured: Any, seed: int) -> Any:
    model = copy.deepcopy(captured)
    model(batch(0, 0)).backward()
    model.zero_grad()
    model.load_state_dict(made(seed).state_dict())
    return model


class Life:
    """A worker in a thread."""

    def __init__(self, store: TCPStore, model: Any, worker: int, log: list[Any], **told: Any) -> None:
        self.worker, self.log, self.error, self.joined = worker, log, None, threading.Event()
        self.kill, self.leaves = told.pop("kill", None), told.pop("leaves", None)
        self.before: Callable[[int], None] = told.pop("before", lambda _: None)
        self.total = told.pop("total")
        optimizer, self.scheduler = optimized(model)
        client = TCPStore("localhost", store.port, is_master=False)
        given = {"every": EVERY, "workers": 3, "grace": 3.0, "timeout": 20.0, "quorum_timeout": 60.0, **told}
        self.model = model
        self.local = autopar.ElasticWorkers(
            model, optimizer, worker=worker, store=client, scheduler=self.scheduler, **given
        )
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            if self.local.join():
                self.scheduler.step()
            self.joined.set()
            if self.kill:
                kill_at(self.local, *self.kill, self._die)
            total = self.leaves or self.total
            live(self.local, self.model, self.scheduler, self.worker, total, self._say, self.before)
            self.local.leave()
        except KilledError:
            self.local._links.close()
        except BaseException as e:
            self.error = e

    def _die(self) -> None:
        raise KilledError

    def _say(self, **facts: Any) -> None:
        self.log.append({"worker": self.worker, **facts})

    def end(self) -> None:
        self.thread.join(90)
        assert not self.thread.is_alive(), f"worker {self.worker} hangs"
        if self.error is not None:
            raise self.error


def check(log: list[Any], history: list[list[tuple[int, bool]]], weighted: bool = False) -> None:
    states = expected(history, weighted, OUTER)
    for said in log:
        assert said["members"] == tuple(w for w, _ in history[said["rounds"]]), said
        for name, value in states[said["rounds"]][said["worker"]].items():
            error = (said["state"][name] - value).abs().max().item()
            assert error < 1e-10, (name, said["worker"], said["rounds"], error)
    assert len({(s["worker"], s["rounds"]) for s in log}) == sum(map(len, history))


@pytest.mark.parametrize(("where", "weighted"), [("exchange", True), ("coming", False), ("voted", False)])
def test_one_is_killed_comes_back_and_another_leaves(store: Any, captured: Any, where: str, weighted: bool) -> None:
    log: list[Any] = []
    lives: list[Life] = []
    models = [parallel(captured, seed) for seed in range(4)]

    def before(round_: int) -> None:
        if round_ == 3:  # the newcomer is there before this round ends
            meetings = lives[0].local._meetings
            wait_until(lambda: len(lives) == 4 and any(s.number == 2 for s in meetings._present()), "newcomer")

    for worker in range(3):
        told = {"kill": (where, 2)} if worker == 2 else {"leaves": 4} if worker == 1 else {"before": before}
        lives.append(Life(store, models[worker], worker, log, total=5, weighted=weighted, **told))
    lives[2].thread.join(60)
    # Else it would take part in the meeting that is held anew.
    wait_until(lambda: any(s["rounds"] == 2 and s["worker"] == 0 for s in log), "second round")
    lives.append(Life(store, models[3], 2, log, total=5, weighted=weighted))
    for life in lives:
        life.end()
    # What is left of a worker that has voted is its share.
    second = [(0, False), (1, False), *([(2, False)] if where == "voted" else [])]
    all_new, all_there = [(w, True) for w in range(3)], [(w, False) for w in range(3)]
    history = [all_new, all_there, second, [(0, False), (1, False), (2, True)], all_there, [(0, False), (2, False)]]
    if where == "voted":
        log.append({"worker": 2, "rounds": 2, "members": (0, 1, 2), "state": {}})
        states = expected(history, weighted, OUTER)
        log[-1]["state"] = states[2][2]
    check(log, history, weighted)
