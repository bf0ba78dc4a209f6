"""HiGHS as searches run it, and Ctrl-C during a search: the first ends it as the time limit does, the second at once.

Signals belong to the process, and so does this: one search at a time can be stopped so.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
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


def new_solver(seconds: float, **options: Any) -> highspy.Highs:
    """A solver of one thread that prints nothing, draws the same each time, and stops when that is `requested`.

    Args:
        seconds: time limit.
        options: further ones, by HiGHS's names.
    """
    _print_banner()
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    every = {"output_flag": False, "threads": 1, "random_seed": 0, "time_limit": max(seconds, 0.01), **options}
    for option, value in every.items():
        solver.setOptionValue(option, value)

    def look(event: Any) -> None:
        event.interrupt(requested())

    # Which of them HiGHS calls depends on the algorithm that it is in.
    for callback in (solver.cbMipInterrupt, solver.cbSimplexInterrupt, solver.cbIpmInterrupt):
        callback.subscribe(look)
    return solver


@cache
def _print_banner() -> None:
    """Let HiGHS print who it is where nobody sees it: from 1.16 on its first solver does, whatever its options say."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # there is no standard output
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        highspy.Highs()  # type: ignore[no-untyped-call]
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
