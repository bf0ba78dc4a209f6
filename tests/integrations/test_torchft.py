"""Replica groups that meet by torchft, of which one is killed and comes back, beside eager steps on one device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.errors import RankError

os.environ.setdefault("RUST_LOG", "error")  # read as torchft is imported
pytest.importorskip("torchft")

from torchft.coordination import LighthouseServer

from autopar.integrations.torchft import replica_groups
from tests.integrations.replica_processes import ROOT, Groups
from tests.integrations.test_replicas import parallel

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

KILLED = -signal.SIGKILL


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[Any]:
    made: list[Groups] = []

    def make(**told: Any) -> Groups:
        made.append(Groups(tmp_path, told.pop("count", 2), told.pop("size", 2), **told))
        return made[-1]

    yield make
    for each in made:
        each.close()


def back_and_equal(run: Groups, total: int, **told: Any) -> None:
    """Start group 1 anew, and compare everything when all have ended."""
    run.start(1, **told)
    run.wait(lambda: len(run.facts("ready", group=1)) >= 2 * run.size, "group 1 that is back")
    (run.folder / "back").touch()
    for group in (0, 1):
        assert run.ended(group) == [0] * run.size, run.said()
    run.require_equal(total, [0, 1])
    healed_as_its_peer(run)


def healed_as_its_peer(run: Groups) -> None:
    """The newcomer's first state is its peer's of that step to the last bit; that of random generators, too."""
    for rank in range(run.size):
        first = next(f for f in run.facts("begins", group=1, rank=rank) if f["healed"])
        (peer,) = {f["digest"] for f in run.facts("begins", group=0, rank=rank) if f["begins"] == first["begins"]}
        assert first["digest"] == peer
        assert first["begins"] > 0


@pytest.mark.parametrize(
    ("where", "search", "size"),
    [
        ("quorum", {"recipe": "fsdp"}, 2),
        pytest.param("exchange", {"recipe": "megatron"}, 2, marks=pytest.mark.deep),
        pytest.param("backward", {"recipe": "ddp"}, 2, marks=pytest.mark.deep),
        pytest.param("exchange", {}, 1, marks=pytest.mark.deep),
    ],
)
def test_a_group_is_killed_and_comes_back(groups: Any, where: str, search: dict[str, Any], size: int) -> None:
    total = 12
    run = groups(size=size, search=search, total=total, slow_from=7)
    run.start(0, pauses={6: "back"})
    run.start(1, die=[3, where])
    run.begin()
    assert run.ended(1) == [KILLED] * size
    back_and_equal(run, total)
    members = run.members()
    assert [members[s] for s in range(3)] == [[0, 1]] * 3
    # What was averaged before it was killed counts; what was not is done anew without it.
    assert members[3] == ([0, 1] if where == "exchange" else [0])
    assert members[4] == members[5] == members[6] == [0]
    assert members[total - 1] == [0, 1]
    assert bool(run.facts("discards", group=0)) == (where != "exchange")


def test_a_newcomer_is_killed_as_it_heals(groups: Any) -> None:
    """Between the meeting and the state of its peer; the others discard that step, and the next newcomer heals."""
    total = 14
    run = groups(size=1, total=total, slow_from=4)
    run.start(0, pauses={3: "back", 7: "again"})
    run.start(1, die=[1, "quorum"])
    run.begin()
    assert run.ended(1) == [KILLED]
    run.start(1, die_healing="recv_checkpoint")
    run.wait(lambda: len(run.facts("ready", group=1)) == 2, "group 1 that is back")
    (run.folder / "back").touch()
    assert run.ended(1) == [KILLED]
    run.start(1)
    run.wait(lambda: len(run.facts("ready", group=1)) == 3, "group 1 that is back again")
    (run.folder / "again").touch()
    assert run.ended(1) == [0] and run.ended(0) == [0], run.said()
    assert [f["where"] for f in run.facts("dies")] == ["quorum", "recv_checkpoint"]
    run.require_equal(total, [0, 1])
    healed_as_its_peer(run)


@pytest.mark.deep
def test_a_peer_is_killed_as_it_gives_its_state(groups: Any) -> None:
    """The newcomer keeps what it has, and takes the state of the group that is left."""
    total = 12
    run = groups(size=1, count=3, total=total, slow_from=3, timeout=20)
    for group in range(2):
        run.start(group, pauses={3: "back"}, **({} if group else {"die_healing": "send_checkpoint"}))
    run.begin()
    run.wait(lambda: run.facts("begins", begins=3, group=1), "step 3")
    run.start(2)
    run.wait(lambda: run.facts("ready", group=2), "group 2")
    (run.folder / "back").touch()
    assert run.ended(0) == [KILLED]
    assert run.ended(1) == [0] and run.ended(2) == [0], run.said()
    run.require_equal(total, [1, 2])
    first = next(f for f in run.facts("begins", group=2))
    assert first["healed"] and first["digest"] in {
        f["digest"] for f in run.facts("begins", group=1, begins=first["begins"])
    }
    assert run.members()[total - 1] == [1, 2]


def test_a_group_with_another_plan_is_refused(groups: Any) -> None:
    run = groups(size=1, total=6, slow_from=0)
    run.start(0, pauses={2: "back"})
    run.start(1, frozen=True)
    run.begin()
    assert run.ended(1) == [1]
    (run.folder / "back").touch()
    assert run.ended(0) == [0], run.said()
    said = run.said()
    assert "AutoparError: group 1 has the plan with the fingerprint" in said and "and group 0" in said
    run.require_equal(6, [0])


@pytest.mark.deep
def test_a_group_that_discards_alone_and_then_stands_still(groups: Any) -> None:
    """It is behind each time, and takes the state of the other, which has waited no longer than it was told to."""
    total = 12
    run = groups(size=2, search={"recipe": "fsdp"}, total=total, slow_from=6, timeout=10)
    run.start(0, pauses={6: "back"})
    run.start(1, errs=[2, 1], die=[4, "quorum"], signal=int(signal.SIGSTOP))
    run.begin()
    run.wait(lambda: run.facts("begins", group=0, begins=6), "step 6 of group 0")
    for process in run.running[1]:
        process.send_signal(signal.SIGCONT)
    run.wait(lambda: len(run.facts("discards", group=1)) == 4, "group 1 that goes on")
    (run.folder / "back").touch()
    assert run.ended(0) == [0, 0] == run.ended(1), run.said()
    run.require_equal(total, [0, 1])
    members = run.members()
    # Group 0 had the share of group 1 in step 2.
    assert [members[s] for s in (1, 2, 3, 4, 5, total - 1)] == [[0, 1]] * 3 + [[0]] * 2 + [[0, 1]]
    assert [f["step"] for f in run.facts("step", group=1, rank=0)][:3] == [0, 1, 3]
    assert {f["healed"] for f in run.facts("state", group=1)} == {2}
    healed_as_its_peer(run)
    assert "group 0: step 4 is discarded, after an exchange with groups 1" in run.said()


@pytest.mark.deep
def test_one_rank_of_a_group_is_killed(groups: Any) -> None:
    """The other one ends with an error that names it; the other group goes on."""
    run = groups(size=2, total=6, search={"recipe": "fsdp"})
    run.start(0)
    run.start(1, die=[2, "exchange"], dies_alone=1)
    run.begin()
    assert sorted(run.ended(1)) == [KILLED, 1]
    assert run.ended(0) == [0, 0], run.said()
    assert "RankError" in run.said() and "rank 1" in run.said()
    run.require_equal(6, [0])


def test_waits_end_and_say_for_whom() -> None:
    model = parallel()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(RankError, match=r"group 1, rank 0 of it: connecting failed after .* of waiting for the light"):
        replica_groups(model, optimizer, group=1, count=2, lighthouse="http://localhost:9", host="localhost", timeout=2)
    with pytest.raises(ValueError, match="TORCHFT_LIGHTHOUSE"):
        replica_groups(model, optimizer, group=1, count=2)
    with pytest.raises(ValueError, match="group=2"):
        replica_groups(model, optimizer, group=2, count=2, lighthouse="http://localhost:9")
    with pytest.raises(ValueError, match="layouts that are decided"):
        fresh = autopar.parallelize(torch.nn.Linear(2, 2), None)
        replica_groups(fresh, optimizer, group=0, count=2, lighthouse="http://localhost:9")
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2)
    run = replica_groups(
        model, optimizer, group=0, count=2, lighthouse=lighthouse.address(), host="localhost", quorum_timeout=2
    )
    with pytest.raises(RankError, match=r"meeting failed after .* \(of 2 s\) of waiting for the lighthouse, the other"):
        next(run.steps(3))
    run.close()
    lighthouse.shutdown()


@pytest.mark.deep
def test_the_example() -> None:
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2)
    port = lighthouse.address().rsplit(":", 1)[1]
    environment = {
        **os.environ, "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*torchrun, "examples/torchft_groups.py", "--host", "localhost", "--steps", "4", "--group"]
    both = [
        subprocess.Popen([*words, str(g)], cwd=ROOT, env=environment, stdout=-1, stderr=-2, text=True) for g in (0, 1)
    ]
    try:
        for process in both:
            said, _ = process.communicate(timeout=300)
            assert process.returncode == 0 and "step 3 of groups [0, 1]: loss" in said, said
    finally:
        for process in both:
            process.kill()
        lighthouse.shutdown()
