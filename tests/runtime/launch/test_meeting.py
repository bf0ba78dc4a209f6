"""Nodes meet by torch's rendezvous: who does not come, is gone, or has other numbers of processes."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistNetworkError, DistStoreError, HashStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousError, RendezvousParameters

from autopar.runtime.launch import meeting
from autopar.runtime.launch.meeting import Meeting, all_here


class Scripted:
    """A rendezvous whose meetings are what is given: errors, or how many processes the other of two nodes has."""

    def __init__(self, meetings: Sequence[Any]) -> None:
        self.meetings, self.is_ended = list(meetings), False

    def next_rendezvous(self) -> Any:
        found = self.meetings.pop(0)
        if isinstance(found, Exception):
            raise found
        store = HashStore()
        store.set("autopar/here/1", str(found))
        return type("Info", (), {"store": store, "rank": 0, "world_size": 2})

    def num_nodes_waiting(self) -> int:
        return 1

    def get_run_id(self) -> str:
        return "run"

    def shutdown(self) -> bool:
        self.is_ended = True
        return True


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a meeting says to processes is gone afterwards."""
    monkeypatch.setenv("AUTOPAR_HELD", "")
    monkeypatch.delenv("AUTOPAR_SNAPSHOTS", raising=False)


def made(*meetings: Any) -> tuple[Meeting, Scripted]:
    within = Scripted(meetings)
    return Meeting(within, None, HashStore(), 2), within  # type: ignore[arg-type]


def test_one_that_does_not_come_is_waited_for_so_long_only() -> None:
    store = HashStore()
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(all_here, store, r, 2, 4, timedelta(seconds=30)) for r in range(2)]
        assert [f.result() for f in both] == [[4, 4], [4, 4]]
    with pytest.raises(DistStoreError):
        all_here(HashStore(), 0, 2, 1, timedelta(milliseconds=50))


def test_all_meet_anew_when_one_is_lost_as_they_meet(capsys: pytest.CaptureFixture[str]) -> None:
    met, within = made(DistStoreError("wait timeout\nfor keys"), 2)
    assert met.next_rendezvous().world_size == 2 and not within.meetings
    said = "the nodes that have met do not come together, all meet again (wait timeout)\n"
    assert capsys.readouterr().err == said


def test_a_node_with_other_processes_is_refused_and_the_run_goes_on() -> None:
    new, within = made(3)
    with pytest.raises(ValueError, match=r"have \[2, 3\] processes; give all of them the same --nproc"):
        new.next_rendezvous()
    assert new.shutdown() and not within.is_ended
    known, within = made(2, 3, 2)
    known.next_rendezvous()
    assert known.next_rendezvous().world_size == 2 and not within.meetings
    assert known.shutdown() and within.is_ended


def test_a_newcomer_hears_that_there_has_been_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the store, which outlives the nodes that had it."""
    monkeypatch.setenv("AUTOPAR_SNAPSHOTS", str(tmp_path))
    store = HashStore()

    def node() -> Meeting:
        return Meeting(Scripted([2]), None, store, 2)  # type: ignore[arg-type]

    first = node()
    first.next_rendezvous()
    assert os.environ["AUTOPAR_HELD"] == "0"
    (tmp_path / "x.snapshot").touch()
    assert first.num_nodes_waiting() == 1
    (tmp_path / "x.snapshot").unlink()
    node().next_rendezvous()
    assert os.environ["AUTOPAR_HELD"] == "1"


def test_meetings_come_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "ATTEMPTS", 3)
    with pytest.raises(RendezvousError, match="nodes have met 3 times, and one of them was lost each time: timeout"):
        made(*[DistStoreError("timeout")] * 4)[0].next_rendezvous()
    with pytest.raises(RendezvousConnectionError, match="closed"):
        made(DistNetworkError("closed"))[0].next_rendezvous()


def test_a_node_that_is_gone_lets_the_others_meet_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's own rendezvous: its state says which nodes have met, and loses one that is not heard of."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kept = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    where = f"127.0.0.1:{port}"
    nodes = [meeting._made(RendezvousParameters(meeting.NAME, where, "run", 1, 2, processes=1)) for _ in range(2)]
    with ThreadPoolExecutor() as pool:
        infos = list(pool.map(lambda node: node.next_rendezvous(), nodes))
    assert sorted(info.rank for info in infos) == [0, 1]
    assert [node.num_nodes_waiting() for node in nodes] == [0, 0]
    backend = nodes[0]._backend  # type: ignore[attr-defined]
    written, token = backend.get_state()
    state = pickle.loads(written)
    lost = next(node for node, rank in state.participants.items() if rank == infos[1].rank)
    del state.participants[lost], state.last_heartbeats[lost]  # as torch's own does some seconds after the last
    backend.set_state(pickle.dumps(state), token)
    assert nodes[0].num_nodes_waiting() == 1 and kept.num_keys()
    for node in nodes:
        node.shutdown()
