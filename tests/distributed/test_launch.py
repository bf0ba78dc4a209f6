"""The pool of ranks that the tests run in."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.distributed.launch import Ranks, RanksError

pytestmark = pytest.mark.distributed


def crash(rank: int, before: str) -> int:
    """A segmentation fault of one rank, unless a file is there, which is made before."""
    if rank == 1 and not Path(before).exists():
        Path(before).touch()
        os.kill(os.getpid(), signal.SIGSEGV)
    return rank


def always(rank: int) -> int:
    """A segmentation fault of one rank, each time."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    return rank


def test_a_crash_is_tried_again_once(tmp_path: Path) -> None:
    ranks = Ranks(2)
    try:
        with pytest.warns(UserWarning, match=r"crash of ranks \[1\]"):
            assert ranks.run(crash, str(tmp_path / "once")) == [0, 1]
        with pytest.warns(UserWarning), pytest.raises(RanksError, match="rank 1: the process died"):
            ranks.run(always)
    finally:
        ranks.close()
