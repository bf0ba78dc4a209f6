"""Workers that come and go, in threads of one process that meet at a store and exchange by Gloo."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

import autopar
import autopar.checkpoint
from autopar.errors import AutoparError, RankError
from autopar.module.low_communication.emulate import EmulatedWorkers
from tests.module.low_communication.elastic_lives import (
    EVERY,
    STREAM,
    KilledError,
    batch,
    expected,
    kill_at,
    live,
    made,
    optimized,
    streamed,
    tokens,
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


def check(log: list[Any], history: list[list[tuple[int, bool]]], weighted: bool, died: set[tuple[int, int]]) -> None:
    states = expected(history, weighted, OUTER)
    for said in log:
        assert said["members"] == tuple(w for w, _ in history[said["rounds"]]), said
        for name, value in states[said["rounds"]][said["worker"]].items():
            error = (said["state"][name] - value).abs().max().item()
            assert error < 1e-10, (name, said["worker"], said["rounds"], error)
    said_all = {(s["worker"], s["rounds"]) for s in log}
    assert said_all == {(w, rounds) for rounds, members in enumerate(history) for w, _ in members} - died


@pytest.mark.some(1)
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
    check(log, history, weighted, {(2, 2)} if where == "voted" else set())


@pytest.mark.parametrize("weighted", [True, False])
def test_emulated_workers_come_and_go(weighted: bool) -> None:
    models = {worker: made(0) for worker in range(3)}
    emulated = EmulatedWorkers(list(models.values()), every=EVERY, weighted=weighted)
    optimizers = {worker: optimized(model) for worker, model in models.items()}
    all_new, all_there = [(w, True) for w in range(3)], [(w, False) for w in range(3)]
    newcomer = [(0, False), (1, False), (2, True)]
    history = [all_new, all_there, [(0, False), (1, False)], newcomer, all_there, [(0, False), (2, False)]]
    for rounds, states in enumerate(expected(history, weighted, OUTER)):
        if rounds == 2:
            emulated.leave(2)
            del models[2]
        if rounds == 5:
            emulated.leave(1)
            del models[1]
        for step in range(EVERY * (rounds - 1), EVERY * rounds) if rounds else []:
            for worker, model in models.items():
                optimizer, scheduler = optimizers[worker]
                optimizer.zero_grad()
                model(batch(step, worker)).backward()
                optimizer.step()
                scheduler.step()
            emulated.step([tokens(worker) for worker in models])
        if rounds == 3:
            models[2] = copy.deepcopy(models[0])
            emulated.join(models[2])
            optimizers[2] = optimized(models[2])
            optimizers[2][0].param_groups[0]["lr"] = optimizers[0][0].param_groups[0]["lr"]
            optimizers[2][1].load_state_dict(optimizers[0][1].state_dict())
        for worker, model in models.items():
            for name, value in model.state_dict().items():
                assert (value - states[worker][name]).abs().max() < 1e-10, (rounds, worker, name)
    with pytest.raises(ValueError, match="other trained parameters"):
        emulated.join(torch.nn.Linear(2, 2))
    emulated.leave(0)
    with pytest.raises(ValueError, match="one has to stay"):
        emulated.leave(0)


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_fragments_are_met_about_in_turn_beside_training(store: Any, captured: Any, killed: bool) -> None:
    """Worker 2 joins at the meeting of step 6; worker 1 leaves after step 11, or is killed at step 12."""
    both = {0: False, 1: False}
    meetings = [{0: True, 1: True}, both, both, {**both, 2: True}, {**both, 2: False}, {**both, 2: False}]
    meetings += [{0: False, 2: False}] * 2
    expected_states = streamed(meetings, 15, OUTER)
    errors: list[float] = []
    threads: list[str] = []

    def run(worker: int) -> None:
        local, model, scheduler = workers[worker]
        mean = local._links.mean

        def exchange(*given: Any) -> Any:
            threads.append(threading.current_thread().name)
            if killed and worker == 1 and local.steps == 12:
                local._links.close()
                raise KilledError
            return mean(*given)

        local._links.mean = exchange
        if local.join():
            scheduler.step()
            compare(worker)
        while local.steps < (11 if worker == 1 else 15):
            if local.steps == 5:
                wait_until(lambda: any(s.number == 2 for s in local._meetings._present()), "newcomer")
            local.optimizer.zero_grad()
            local.add_tokens(tokens(worker))
            model(batch(local.steps, worker)).backward()
            local.optimizer.step()
            scheduler.step()
            compare(worker)
        if killed and worker == 1:
            local.optimizer.step()
            with pytest.raises(KilledError):
                local._use(None)
            return
        assert local.members == ((0, 1, 2) if worker == 1 else (0, 2))
        local.leave()

    def compare(worker: int) -> None:
        local, model, _ = workers[worker]
        states = expected_states[local.steps][worker]
        errors.append(max(float((v - states[n]).abs().max()) for n, v in model.full_state_dict().items()))

    workers = {}
    for worker in range(3):
        model = parallel(captured, 0 if worker < 2 else 3)
        optimizer, scheduler = optimized(model)
        client = TCPStore("localhost", store.port, is_master=False)
        local = autopar.ElasticWorkers(
            model, optimizer, worker=worker, workers=2, store=client, scheduler=scheduler, weighted=True,
            grace=4.0 if killed else 20.0, timeout=20.0, quorum_timeout=60.0, **STREAM,
        )  # fmt: skip
        workers[worker] = local, model, scheduler
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(run, worker) for worker in (0, 1)]
        wait_until(lambda: all(workers[w][0].steps == 5 for w in (0, 1)), "fifth step")
        running.append(pool.submit(run, 2))
        for future in running:
            future.result(90)
    assert max(errors) < 1e-10 and len(errors) == 15 + 11 + 10, (max(errors), len(errors))
    # But for the newcomer's first, all beside training.
    assert sum(not name.startswith("meeting of worker") for name in threads) == 1 and len(threads) >= 17
    assert {local.rounds for local, *_ in (workers[0], workers[2])} == {3}


@pytest.mark.slow
def test_few_bits_with_feedback_are_as_emulated(store: Any) -> None:
    """Two workers in float32, whose meetings are beside training."""
    given = {"every": 2, "fragments": 2, "delay": 1, "mix": 0.25, "bits": 4, "feedback": True}

    def small(step: int, worker: int) -> torch.Tensor:
        return batch(step, worker).float()

    parallels = [autopar.parallelize(made(0).float(), None, (small(0, 0),)) for _ in range(2)]
    locals_ = []
    for worker, model in enumerate(parallels):
        model(small(0, 0)).backward()
        client = TCPStore("localhost", store.port, is_master=False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
        locals_.append(autopar.ElasticWorkers(model, optimizer, worker=worker, workers=2, store=client, **given))

    def train(worker: int) -> None:
        local = locals_[worker]
        local.join()
        for step in range(9):
            local.optimizer.zero_grad()
            parallels[worker](small(step, worker)).backward()
            local.optimizer.step()
        local._arrived()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, range(2)))
    plain = [made(0).float() for _ in range(2)]
    emulated = EmulatedWorkers(plain, **given)
    for step in range(9):
        for worker, model in enumerate(plain):
            model.zero_grad()
            model(small(step, worker)).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad, alpha=0.3) if p.grad is not None else None
        emulated.step()
    for own, other in zip(parallels, plain, strict=True):
        for name, p in other.named_parameters():
            assert torch.allclose(own.get_parameter(name), p, atol=1e-6), name
    left = [local._left for local in locals_]
    assert all(bool(t.any()) for own in left for t in own.values()) and [*left[0]] == [0, 1]
    for local in locals_:
        local.leave()


class Code:
    """An object whose state no newcomer could take."""

    def state_dict(self) -> dict[str, Any]:
        return {"next": lambda: 0}

    def load_state_dict(self, state: Any) -> None: ...


def test_what_newcomers_could_not_take_is_refused_before_they_come(store: Any, captured: Any) -> None:
    model = parallel(captured, 0)
    local = autopar.ElasticWorkers(
        model, optimized(model)[0], every=2, worker=0, workers=1, store=store, sampler=Code()
    )
    with pytest.raises(AutoparError, match=r"sampler=: its state_dict\(\) is not plain data and tensors"):
        local.join()


def test_a_checkpoint(store: Any, captured: Any, tmp_path: Any) -> None:
    """Goes on in another run; a worker that has left makes steps of its own."""
    given = {"every": 2, "workers": 1, "store": store}

    def made_of(seed: int, **more: Any) -> Any:
        model = parallel(captured, seed)
        optimizer, _ = optimized(model)
        return model, autopar.ElasticWorkers(model, optimizer, **given | more)

    def train(local: Any, model: Any, worker: int, steps: int) -> None:
        for _ in range(steps):
            local.optimizer.zero_grad()
            model(batch(local.steps, worker)).backward()
            local.optimizer.step()

    model, local = made_of(0, worker=0, run="first")
    with pytest.raises(AutoparError, match=r"call join\(\) before the first step"):
        train(local, model, 0, 1)
    local.join()
    train(local, model, 0, 4)
    assert (local.rounds, local.steps, local.members, local.leads) == (2, 4, (0,), True)
    autopar.checkpoint.save(tmp_path, model, local.optimizer, step=4, local=local)
    train(local, model, 0, 2)
    with pytest.raises(AutoparError, match=r"load before join\(\)"):
        local.load_state_dict(local.state_dict())
    again, other = made_of(3, worker=0, run="second")
    autopar.checkpoint.load(tmp_path, again, other.optimizer, local=other)
    with pytest.raises(AutoparError, match="and what is loaded has every=2"):
        made_of(3, worker=0, every=3, run="third")[1].load_state_dict(local.state_dict())
    other.join()
    train(other, again, 0, 2)
    assert (other.rounds, other.steps) == (3, 6)
    for name, value in model.full_state_dict().items():
        assert torch.equal(again.full_state_dict()[name], value), name
    with torch.no_grad():
        next(again.parameters()).fill_(float("nan"))
    with pytest.raises(RankError, match=r"'up\.weight' of worker 0 \(rank 0 of it\) is not finite"):
        other.synchronize()
    other.leave()
    with pytest.raises(AutoparError, match=r"call join\(\)"):
        train(other, again, 0, 1)
    other.detach()
    train(other, again, 0, 1)  # as any optimizer
