"""`Arrays`: numpy arrays of a model while it is traced, whose elements no graph can write."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from autopar.errors import CaptureError

LARGEST = 2**26
"""Bytes of an array that is copied; one that is larger is data, and not looked at."""

Array: TypeAlias = "np.ndarray[Any, Any] | bytearray | memoryview | array[Any]"


@dataclass(frozen=True)
class Arrays:
    """Arrays with copies of their elements, by name."""

    found: list[tuple[str, Array, Any]] = field(default_factory=list)

    def add(self, name: str, values: Array) -> None:
        """Remember the elements of one."""
        size = values.nbytes if isinstance(values, np.ndarray) else memoryview(values).nbytes
        if size <= LARGEST:
            self.found.append((name, values, _copied(values)))

    def put_back(self) -> None:
        """Give every array the elements that it had."""
        for _, values, before in self.found:
            if not _same(values, before):
                values[:] = before

    def require_unchanged(self) -> None:
        """Refuse a call that has written to one.

        Raises:
            CaptureError: it has; names the array.
        """
        for name, values, before in self.found:
            if not _same(values, before):
                kind = "numpy array" if isinstance(values, np.ndarray) else type(values).__name__
                raise CaptureError(
                    f"a call of the model writes to the elements of the {kind} {name}, which a graph cannot do again; "
                    "keep a tensor (register_buffer), or set the attribute to a new array"
                )


def _copied(values: Array) -> Any:
    if isinstance(values, np.ndarray):
        return values.copy()
    return bytes(values) if isinstance(values, memoryview) else values[:]


def _same(a: Array, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return bool(a.shape == b.shape) and bool(a.tobytes() == b.tobytes())
    return bytes(a) == bytes(b)
