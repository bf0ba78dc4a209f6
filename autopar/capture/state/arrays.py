"""`Arrays`: numpy arrays of a model while it is traced, whose elements no graph can write."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.errors import CaptureError

LARGEST = 2**26
"""Bytes of an array that is copied; one that is larger is data, and not looked at."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Arrays:
    """Arrays with copies of their elements, by name."""

    found: list[tuple[str, Array, Array]] = field(default_factory=list)

    def add(self, name: str, array: Array) -> None:
        """Remember the elements of one."""
        if array.nbytes <= LARGEST:
            self.found.append((name, array, array.copy()))

    def put_back(self) -> None:
        """Give every array the elements that it had."""
        for _, array, before in self.found:
            if not _same(array, before):
                array[...] = before

    def require_unchanged(self) -> None:
        """Refuse a call that has written to one.

        Raises:
            CaptureError: it has; names the array.
        """
        for name, array, before in self.found:
            if not _same(array, before):
                raise CaptureError(
                    f"a call of the model writes to the elements of the numpy array {name}, which a graph cannot do "
                    "again; keep a tensor (register_buffer), or set the attribute to a new array"
                )


def _same(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()
