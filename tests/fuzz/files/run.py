"""Files of each kind, changed by their seeds, and judged in this process."""

from __future__ import annotations

import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

from tests.fuzz.files.kinds import KINDS
from tests.fuzz.judge import Outcome, category

LIMIT = 60.0
"""Seconds that a file may take."""


class TooLong(BaseException):
    """A file took longer: no ``except Exception`` keeps it."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `TooLong` where the block takes longer."""

    def end(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def files(kind: str, seeds: range, folder: Path) -> Iterator[tuple[int, Outcome]]:
    """Outcomes of changed files, each by its seed."""
    where = folder / kind
    where.mkdir(parents=True, exist_ok=True)
    judge = KINDS[kind](where)
    for seed in seeds:
        changed, started = judge.changed(Random(f"{kind} {seed}")), time.perf_counter()
        try:
            with limited(LIMIT), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outcome = judge.judge(changed)
        except TooLong:
            outcome = Outcome("crash", "no answer in time", f"more than {LIMIT} s")
        except Exception as e:  # of what reads it, outside of what may refuse it
            outcome = Outcome("crash", category(e), repr(e))
        yield seed, replace(outcome, seconds=time.perf_counter() - started)
