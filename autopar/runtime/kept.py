"""`Kept`: the specialisations that were used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from autopar.runtime.specialise import Specialisation

CACHED = 16
"""How many are kept."""


class Kept:
    """Specialisations by what a call looks like, several where the floats of calls need graphs of their own."""

    def __init__(self, limit: int = CACHED) -> None:
        self.limit = limit
        self._found: OrderedDict[int, tuple[Any, Specialisation]] = OrderedDict()
        self._made = 0

    def __len__(self) -> int:
        return len(self._found)

    def find(self, key: Any, numbers: Sequence[float]) -> Specialisation | None:
        """That of a call, which is then the one used last."""
        for number, (known, found) in self._found.items():
            if known == key and all(guard.holds(numbers) for guard in found.program.guards):
                self._found.move_to_end(number)
                return found
        return None

    def add(self, key: Any, found: Specialisation) -> None:
        """Keep it; the one that was not used for longest goes if there are too many."""
        self._made += 1
        self._found[self._made] = key, found
        while len(self._found) > self.limit:
            self._found.popitem(last=False)
