"""`Driven`: what stands for an iterator of the model while it is traced.

A trace calls the model more than once, and a graph serves every call: neither may take values from an iterator that the
model keeps, which nothing can wind back.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from autopar.errors import CaptureError


class Driven:
    """Refuses to be asked for its next value."""

    def __init__(self, name: str) -> None:
        """``name``: where the model keeps the iterator."""
        self._name = name

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
        """Methods of generators, such as ``send``."""
        # Protocols of Python ask for these (copying, pickling): a plain object has none.
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__next__()


def is_driven(value: Any) -> bool:
    """Whether a value is a generator or one of Python's own iterators; files, say, are none."""
    kind = type(value)
    # Others may be wound back, or not be consumed by what reads them.
    own = kind.__module__ in ("builtins", "itertools") and isinstance(value, Iterator)
    return isinstance(value, types.GeneratorType) or own
