"""A meeting that is held beside training: in a thread, whose result is wanted some steps later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from autopar.module.low_communication.elastic.meetings import PAUSE

T = TypeVar("T")


class Underway(Generic[T]):
    """Of one rank, which waits for it before it begins another."""

    def __init__(self, work: Callable[[], T], name: str, *, beside: bool) -> None:
        """Begin.

        Args:
            work: to be done.
            name: of it.
            beside: in a thread; else it is done when this returns, and raises what it raises.
        """
        self._work, self._error = work, None
        self._found: list[T] = []
        self._thread: threading.Thread | None = None
        if not beside:
            self._found.append(work())
            return
        # Of a process that ends without waiting, it ends with it.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    _error: BaseException | None

    def _run(self) -> None:
        try:
            self._found.append(self._work())
        except BaseException as e:  # raised where it is waited for
            self._error = e

    def wait(self, alive: Callable[[], None]) -> T:
        """What has come of it.

        Args:
            alive: raises if there is nothing to wait for.

        Raises:
            BaseException: what the work has raised.
        """
        while self._thread is not None and self._thread.is_alive():
            alive()
            self._thread.join(PAUSE)
        if self._error is not None:
            raise self._error
        return self._found[0]
