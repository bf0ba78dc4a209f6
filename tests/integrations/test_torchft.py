"""Replica groups that meet by torchft, of which one is killed and comes back, beside eager steps on one device."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("RUST_LOG", "off")  # read as torchft is imported
pytest.importorskip("torchft")

from tests.integrations.replica_processes import Groups

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
    run.start(0, pause_at=6)
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
