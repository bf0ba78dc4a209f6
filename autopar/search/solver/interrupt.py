"""Ctrl-C during a search: the first ends it as the time limit does, and the second at once.

Signals belong to the process, and so does this: one search at a time can be stopped so.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import highspy

_requested = threading.Event()


def requested() -> bool:
    """Whether the search that runs has been asked to stop."""
    return _requested.is_set()


@contextmanager
def stoppable(say: Callable[[], None]) -> Iterator[None]:
    """Within it the first Ctrl-C makes `requested` true, and the second raises `KeyboardInterrupt`.

    Outside of the main thread, which alone gets signals, nothing changes.

    Args:
        say: called at the first.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def first(number: int, frame: FrameType | None) -> None:
        _requested.set()
        # From now on Ctrl-C does what it always does.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        say()

    before = signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        _requested.clear()


def obey(solver: highspy.Highs) -> None:
    """Let a solver check, between its steps, whether it has been asked to stop."""

    def look(event: Any) -> None:
        event.interrupt(requested())

    # Which of them HiGHS calls depends on the algorithm that it is in.
    for callback in (solver.cbMipInterrupt, solver.cbSimplexInterrupt, solver.cbIpmInterrupt):
        callback.subscribe(look)
