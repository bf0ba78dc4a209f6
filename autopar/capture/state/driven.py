"""`Driven`: what stands for an iterator, or a simple queue, of the model while it is traced.

A trace calls the model more than once, and a graph serves every call: neither may take values from an iterator that the
model keeps, which nothing can wind back. Methods of `queue.SimpleQueue` cannot be replaced as those of other queues.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from queue import SimpleQueue
from threading import get_ident
from typing import Any

from autopar.errors import CaptureError


class Driven:
    """Refuses to be asked for its next value; a queue is there for other threads."""

    def __init__(self, name: str, own: Any) -> None:
        """``name``: where the model keeps the iterator ``own``."""
        self._name, self._own, self._thread = name, own, get_ident()

    def __iter__(self) -> Any:
        """Refused as the next value is."""
        return self.__next__()

    def __next__(self) -> Any:
        """A graph would repeat what it gives.

        Raises:
            CaptureError: always.
        """
        raise CaptureError(
            f"the model takes values from the iterator {self._name}: a graph would repeat the first for ever; keep a "
            "list and a counter as attributes, or take the value outside and pass it as an argument"
        )

    def __getattr__(self, name: str) -> Any:
        """Methods of generators, such as ``send``, and of queues.

        Raises:
            CaptureError: always, but in other threads, for which queues are.
        """
        # Protocols of Python ask for these (copying, pickling): a plain object has none.
        if name.startswith("_"):
            raise AttributeError(name)
        if not isinstance(self._own, SimpleQueue):
            return self.__next__()
        if get_ident() != self._thread:
            return getattr(self._own, name)
        raise CaptureError(
            f"the model deals with other threads in forward ({self._name}.{name}), which a graph would not do again; "
            "do it before or after the call, and pass what comes of it as an argument"
        )


def is_driven(value: Any) -> bool:
    """Whether a value is a generator, one of Python's own iterators, or a simple queue; files, say, are none."""
    kind = type(value)
    # Others may be wound back, or not be consumed by what reads them.
    own = kind.__module__ in ("builtins", "itertools") and isinstance(value, Iterator)
    return isinstance(value, types.GeneratorType | SimpleQueue) or own
