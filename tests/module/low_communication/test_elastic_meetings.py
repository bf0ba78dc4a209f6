"""Meetings of elastic workers without models: who takes part, who is named when one does not come, who is refused."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

import autopar
from autopar.costs.outer_exchange import TRIPS
from autopar.errors import AutoparError, RankError
from autopar.module.low_communication.elastic.links import Links
from autopar.module.low_communication.elastic.meetings import Meetings, Waits
from autopar.module.low_communication.elastic.register import Register, Seat

WAITS = Waits(founders=2, least=1, grace=0.3, timeout=1.0, quorum=10.0, retries=3)


@pytest.fixture
def store() -> Iterator[TCPStore]:
    yield TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


class Worker:
    """One that meets, and exchanges nothing."""

    def __init__(self, store: TCPStore, number: int, token: str = "a", waits: Waits = WAITS, **told: Any) -> None:
        client = TCPStore("localhost", store.port, is_master=False)
        register = Register(client)
        self.meetings = Meetings(
            register, Seat(number, token), told.get("place", 0), told.get("places", 1), waits, lambda: None
        )
        self.meetings.start(Meetings.first(register))
        self.exchange: Callable[[Any], Any] = lambda meeting: [s.number for s in meeting.members]
        self.links = Links(client, 0, 5.0)
        self.found: Any = None

    def begin(self) -> threading.Thread:
        def hold() -> None:
            try:
                self.found = self.meetings.hold(lambda: {"new": self.meetings.is_newcomer}, self.exchange)[1]
            except BaseException as e:
                self.found = e

        thread = threading.Thread(target=hold, daemon=True)
        thread.start()
        return thread


def meet(*workers: Worker) -> list[Any]:
    threads = [w.begin() for w in workers]
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return [w.found for w in workers]


@pytest.mark.parametrize("count", [2, 5])
def test_a_meeting_asks_the_store_as_often_as_is_predicted(store: TCPStore, count: int) -> None:
    """However many workers there are; who is early looks again, and again."""
    workers = [Worker(store, n, waits=replace(WAITS, founders=count, grace=20.0, timeout=20.0)) for n in range(count)]
    asked: Counter[int] = Counter()
    for number, worker in enumerate(workers):
        register = worker.meetings._register
        ask = register._asked
        register._asked = lambda question, n=number, ask=ask: (asked.update([n]), ask(question))[1]  # type: ignore
    meet(*workers)
    least = []
    for _ in range(4):
        asked.clear()
        meet(*workers)
        least.append(min(asked.values()))
    assert TRIPS - 4 <= min(least) < 2 * TRIPS


def test_who_comes_late_is_left_out_and_joins_again(store: TCPStore) -> None:
    first, late = Worker(store, 0), Worker(store, 1)
    assert meet(first, late) == [[0, 1], [0, 1]]
    assert meet(first) == [[0]]  # after the grace
    joins = late.begin()
    time.sleep(0.2)
    assert joins.is_alive()  # it proposes nothing
    assert meet(first) == [[0, 1]]
    joins.join(10)
    assert late.found == [0, 1]
    late.meetings.leave()
    first.meetings._waits = replace(WAITS, grace=60.0)
    assert meet(first) == [[0]]  # nobody is waited for


def test_one_that_fails_has_the_meeting_held_anew_by_all(store: TCPStore) -> None:
    workers = [Worker(store, n, waits=replace(WAITS, founders=3, grace=2.0)) for n in range(3)]
    assert meet(*workers) == [[0, 1, 2]] * 3
    tried: list[int] = []

    def fails(meeting: Any) -> Any:
        tried.append(meeting.number)
        if len(tried) == 1:
            raise RuntimeError("Connection closed by peer")
        return [s.number for s in meeting.members]

    workers[1].exchange = fails
    assert meet(*workers) == [[0, 1, 2]] * 3
    assert tried == [1, 2]
    # What is no failure of an exchange ends this worker, and the others go on without it.
    workers[1].exchange = lambda meeting: 1 / 0
    found = meet(*workers)
    assert found[0] == found[2] == [0, 2] and isinstance(found[1], ZeroDivisionError)


def test_each_wait_ends_and_names_who_is_waited_for(store: TCPStore, caplog: Any) -> None:
    short = replace(WAITS, quorum=0.5)
    (found,) = meet(Worker(store, 5, waits=short))
    assert isinstance(found, RankError)
    assert "worker 5 waited 0.5 s (quorum_timeout) for 2 workers to begin the run, and worker 5 is there" in str(found)
    # The one of before is on the list, dead: words of it are waited for, and it is named.
    both = [Worker(store, n, waits=replace(short, least=2, quorum=4.0)) for n in (0, 1)]
    assert meet(*both) == [[0, 1]] * 2
    assert "no word of worker 5 within 1 s" in caplog.text


def test_too_few(store: TCPStore) -> None:
    both = [Worker(store, n, waits=replace(WAITS, least=2, quorum=0.8)) for n in (0, 1)]
    assert meet(*both) == [[0, 1]] * 2
    (found,) = meet(both[0])
    assert isinstance(found, RankError) and "for worker 1 to come to meeting 1, and worker 0 is there" in str(found)
    assert "of at least 2 (least=)" in str(found)
    (found,) = meet(Worker(store, 2, waits=replace(WAITS, quorum=0.5)))
    assert isinstance(found, RankError) and "worker 2 waited 0.5 s (quorum_timeout) for those that train" in str(found)


@pytest.mark.slow
def test_a_rank_without_a_vote_is_named(store: TCPStore) -> None:
    """Another rank of worker 1 is gone: no meeting with it counts."""
    one, other = Worker(store, 0, places=2), Worker(store, 1, places=2)
    found = meet(one, other)
    assert all(isinstance(f, RankError) and "3 meetings in a row were discarded" in str(f) for f in found)
    assert "no vote of workers 0, 1 within 1 s" in str(found[0])


def test_a_number_that_is_taken(store: TCPStore) -> None:
    patient = replace(WAITS, grace=30.0)
    first, second = Worker(store, 0, waits=patient), Worker(store, 1, waits=patient)
    assert meet(first, second) == [[0, 1]] * 2
    twin = Worker(store, 1, "b")
    comes = second.begin()
    time.sleep(0.2)
    joins = twin.begin()
    time.sleep(0.2)
    assert meet(first) == [[0, 1]]
    comes.join(10)
    assert second.found == [0, 1] and joins.is_alive()
    comes = second.begin()
    time.sleep(0.2)
    assert meet(first) == [[0, 1]]
    joins.join(10)
    assert isinstance(twin.found, ValueError) and "another worker that trains has this number" in str(twin.found)
    comes.join(10)
    # One that is started anew after the other's end has its place at once, without a grace.
    third = Worker(store, 1, "c")
    joins = third.begin()
    time.sleep(0.2)
    assert meet(first) == [[0, 1]]
    joins.join(10)
    assert third.found == [0, 1]


def test_who_is_stuck_in_an_exchange_is_named(store: TCPStore, caplog: Any) -> None:
    workers = [Worker(store, n, waits=replace(WAITS, timeout=5.0)) for n in (0, 1)]
    tried: list[int] = []
    for worker in workers:
        worker.links._seconds = 0.7

        def exchange(meeting: Any, worker: Worker = worker) -> float:
            own = worker.meetings.seat
            worker.links.meet(meeting.number, meeting.members, own)
            if own.number == 1 and not tried:
                tried.append(meeting.number)
                time.sleep(2.5)
            return float(worker.links.mean(torch.tensor([float(own.number)]), None))

        worker.exchange = exchange
    assert meet(*workers) == [0.5, 0.5]
    assert "the mean with worker 1 failed after 0." in caplog.text
    assert "; worker 1 (its rank 0) said nothing: gone, or stuck (worker 0, rank 0 of it)" in caplog.text


def test_connections_stay_while_members_do(store: TCPStore) -> None:
    workers = [Worker(store, n) for n in (0, 1)]
    groups: list[Any] = []
    for worker in workers:

        def exchange(meeting: Any, worker: Worker = worker) -> float:
            worker.links.meet(meeting.number, meeting.members, worker.meetings.seat)
            groups.append(worker.links._group)
            own = torch.full((300,), float(worker.meetings.seat.number))
            return float(worker.links.mean(own.clone(), None)[0] + worker.links.mean(own, 8)[0])

        worker.exchange = exchange
    for _ in range(2):
        assert meet(*workers) == [1.0, 1.0]
        for worker in workers:
            worker.links.keep()
    assert len(set(map(id, groups))) == 2
    workers[1].links._stays = False
    for worker in workers:
        worker.links.close()
    assert meet(*workers) == [1.0, 1.0]


def test_wrong_arguments() -> None:
    model = autopar.parallelize(torch.nn.Linear(2, 2), None, (torch.zeros(1, 2),), loss_fn=lambda o, b: o.sum())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"every": 2, "worker": 0, "workers": 1, "store": "localhost:1"}
    for wrong, said in (
        ({"every": 0}, "every=0"), ({"worker": -1}, "worker=-1"), ({"least": 2}, "least=2, workers=1"),
        ({"store": "localhost"}, "store='localhost': expected HOST:PORT"), ({"grace": -1}, "grace=-1"),
        ({"scheduler": 1}, r"scheduler=1: expected an object with state_dict\(\)"), ({"bits": 3}, "bits=3"),
        ({"every": 4, "fragments": 2, "delay": 3}, "delay=3, every=4, fragments=2: elastic workers use what"),
        ({"fragments": "auto"}, "fragments='auto' takes every='auto'"), ({"outer_momentum": 1}, "outer_momentum=1"),
        ({"retries": 0}, "retries=0"), ({"run": 1}, "run=1"), ({"feedback": True}, "feedback=True without bits"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            autopar.ElasticWorkers(model, optimizer, **given | wrong)  # type: ignore[arg-type]
    with pytest.raises(RankError, match=r"no store at localhost:1 within 0.5 s .*autopar rendezvous localhost:1"):
        autopar.ElasticWorkers(model, optimizer, **given, timeout=0.5)
    with pytest.raises(ValueError, match="does not have"):
        autopar.ElasticWorkers(model, torch.optim.SGD([model.weight], lr=0.1), **given)


def test_a_worker_of_another_model_is_refused(store: TCPStore) -> None:
    def made(width: int, worker: int) -> Any:
        linear = torch.nn.Linear(width, 2)
        model = autopar.parallelize(linear, None, (torch.zeros(1, width),), loss_fn=lambda o, b: o.sum())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        client = TCPStore("localhost", store.port, is_master=False)
        return autopar.ElasticWorkers(
            model, optimizer, every=1, worker=worker, workers=1, store=client, quorum_timeout=20, timeout=5
        )

    first, other = made(2, 0), made(3, 1)
    first.join()
    found: list[BaseException] = []

    def join() -> None:
        try:
            other.join()
        except BaseException as e:
            found.append(e)

    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    while len(first._meetings._present()) < 1:
        time.sleep(0.01)
    first.synchronize()
    thread.join(20)
    assert isinstance(found[0], AutoparError) and "worker 1 has" in str(found[0]) and "worker 0" in str(found[0])
    assert first.members == (0,) and first.rounds == 1
