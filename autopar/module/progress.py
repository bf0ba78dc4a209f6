"""What rank 0 says: before the first step, if that takes long; under ``autopar run`` a line for each phase and more."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from autopar.costs.memory import format_bytes
from autopar.ir.plan import Plan
from autopar.module.metrics import Metrics
from autopar.runtime.observer import Observer

if TYPE_CHECKING:
    from autopar.explain.tables.progress import SearchProgress

PREFIX = "autopar: "

INTERVAL = 5.0
"""Seconds from one line about the steps to the next."""


class Spoken(Observer):
    """Prints on stderr what takes more than two seconds.

    Attributes:
        lines: whether each phase gets a line when it has ended, and the plan is printed.
    """

    def __init__(self, lines: bool) -> None:
        self.lines = lines
        self._progress: SearchProgress | None = None

    @contextmanager
    def specializing(self) -> Iterator[None]:
        """The phases within take one line that is updated; off a terminal, a line for each."""
        # Off a terminal its lines would say the same as those of the phases.
        if self._progress is not None or (self.lines and not sys.stderr.isatty()):
            yield
            return
        from autopar.explain.tables.progress import SearchProgress  # rich, which only this needs

        with SearchProgress(prefix=PREFIX) as self._progress:
            try:
                yield
            finally:
                self._progress = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Its line says how long it took."""
        self._show(name)
        begun = time.monotonic()
        yield
        if self.lines:
            _say(f"{name} {time.monotonic() - begun:.1f} s")

    def searching(self, what: str, incumbent: float = math.inf, bound: float = 0.0) -> None:
        """For the line that is updated; in a log, a line for each step of the search would be too many."""
        if sys.stderr.isatty():
            self._show(what, incumbent, bound)

    def _show(self, what: str, incumbent: float = math.inf, bound: float = 0.0) -> None:
        if self._progress is not None:
            self._progress(what, incumbent, bound)

    def planned(self, plan: Plan) -> None:
        """Printed once."""
        if self.lines:
            sys.stderr.write(f"{plan.summary()}\n")


def print_metrics(found: Metrics) -> None:
    """A line about the steps since the last one."""
    if found.step == 1:
        _say(f"first step {found.seconds:.1f} s")
    else:
        _say(metrics_line(found))


def metrics_line(found: Metrics) -> str:
    """Speed and memory in one line.

    >>> metrics_line(Metrics(20, 0.25, 8.0, 4096.0, 0.412, 3e9, 2.5e9))
    'step 20, 4.00 steps/s, 4.1k tokens/s, MFU 41.2%, memory 2.8 GiB (predicted 2.3 GiB)'
    >>> metrics_line(Metrics(3, 2.0, 32.0, None, None, None, None))
    'step 3, 0.500 steps/s, 32.0 rows/s, MFU -, memory - (predicted -)'
    """
    amount, unit = (
        (found.rows_per_second, "rows") if found.tokens_per_second is None else (found.tokens_per_second, "tokens")
    )
    held, predicted = (
        "-" if v is None else format_bytes(v) for v in (found.peak_memory_bytes, found.predicted_memory_bytes)
    )
    mfu = "-" if found.mfu is None else f"{found.mfu:.1%}"
    rate = f"{_figures(1 / found.seconds)} steps/s, {_figures(amount)} {unit}/s"
    return f"step {found.step}, {rate}, MFU {mfu}, memory {held} (predicted {predicted})"


def _figures(value: float) -> str:
    """Three significant figures.

    >>> _figures(0.01234), _figures(14.2), _figures(58123.0), _figures(3.2e6)
    ('0.0123', '14.2', '58.1k', '3.2M')
    """
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:#.3g}".rstrip(".")


def _say(text: str) -> None:
    sys.stderr.write(f"{PREFIX}{text}\n")
    sys.stderr.flush()
