"""Progress of a long search on stderr: phase, elapsed time, incumbent and gap. A short one prints nothing."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.spinner import Spinner
from rich.text import Text

from autopar.ir.plan_table import format_seconds, format_share

DELAY = 2.0
"""Seconds without output: a faster search needs no progress."""

PHASES = {"unconstrained": "fastest plan of any size", "multiplier": "fastest plan that fits"}
"""The solver's phases in words; one that is not here is printed as it is."""


class SearchProgress:
    """A context that is also the ``progress`` callback of `autopar.plan`.

    On a terminal it updates one line; elsewhere it writes a line when the phase changes.
    """

    def __init__(self, console: Console | None = None, delay: float = DELAY, prefix: str = "") -> None:
        self._console = console or Console(file=sys.stderr)
        self._start = time.monotonic()
        self._delay, self._prefix = delay, prefix
        self._state = ("capturing", math.inf, 0.0)
        self._spinner = Spinner("dots", text=self)
        self._live: Live | None = None
        self._lock = threading.Lock()
        # A thread of its own: the search calls back too rarely to show that it is alive.
        self._timer = threading.Timer(delay, self._show)
        self._timer.daemon = True

    def __call__(self, phase: str, incumbent: float = math.inf, bound: float = 0.0) -> None:
        """Note a phase, and the best objective and bound so far, in seconds of one step."""
        changed = phase != self._state[0]
        self._state = (phase, incumbent, bound)
        # In a log, a line for each phase; seconds would fill it.
        if changed and not self._console.is_terminal and time.monotonic() - self._start > self._delay:
            self._console.print(self.line())

    def line(self) -> Text:
        """The line as it is now."""
        phase, incumbent, bound = self._state
        parts = [f"{PHASES.get(phase, phase)}, {time.monotonic() - self._start:.0f} s"]
        if math.isfinite(incumbent):
            parts.append(f"best plan so far {format_seconds(incumbent)} a step")
            if bound > 0:
                parts.append(f"gap {format_share(max(0.0, incumbent - bound) / max(incumbent, 1e-300))}")
        return Text(self._prefix + "; ".join(parts))

    def __rich__(self) -> Text:
        """Elapsed time is read again at each refresh."""
        return self.line()

    def __enter__(self) -> SearchProgress:
        self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # The timer may fire at this moment: the lock decides which of the two comes first.
        self._timer.cancel()
        with self._lock:
            if self._live is not None:
                self._live.stop()

    def _show(self) -> None:
        with self._lock:
            if self._timer.finished.is_set():  # the search ended meanwhile
                return
            if self._console.is_terminal:
                self._live = Live(self._spinner, console=self._console, transient=True, refresh_per_second=4)
                self._live.start()
            else:
                self._console.print(self.line())


@contextmanager
def counted(what: str, console: Console | None = None) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr; yields ``tick(done, total, name of the last one)``. Nothing is drawn off a terminal."""
    console = console or Console(file=sys.stderr)
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def tick(done: int, total: int, last: str) -> None:
            bar.update(task, completed=done, total=total, description=last)

        yield tick
