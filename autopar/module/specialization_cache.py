"""`Kept`: the specializations that were used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.capture.state.slots import Signature, Slots, differences
from autopar.specialize import Specialization

CACHED = 16
"""How many are kept."""


@dataclass
class _Entry:
    """A specialization, and the call and the state of the model that it is for."""

    key: Any
    found: Specialization
    state: Signature

    def changes(self, slots: Slots) -> list[str]:
        """What of the state differs now; what is counted alone may."""
        program = self.found.program.state
        now = slots.signature(program.constants)
        changed = differences(self.state, now, program.counted)
        if not changed:
            self.state = now  # compared by identity the next time
        return changed


class Kept:
    """Specializations by what a call looks like.

    Several where floats of calls or the Python state of the model need graphs of their own.
    """

    def __init__(self, limit: int = CACHED) -> None:
        self.limit = limit
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._made = 0

    def __len__(self) -> int:
        return len(self._entries)

    def copy(self) -> Kept:
        """The same specializations, for a copy of the model."""
        new = Kept(self.limit)
        new._made = self._made
        new._entries.update({n: replace(entry) for n, entry in self._entries.items()})
        return new

    def find(self, key: Any, numbers: Sequence[float], slots: Slots) -> Specialization | None:
        """That of a call, which is then the one used last."""
        for number, entry in reversed(self._entries.items()):
            guards = entry.found.program.guards
            if entry.key == key and all(g.holds(numbers) for g in guards) and not entry.changes(slots):
                self._entries.move_to_end(number)
                return entry.found
        return None

    def which(self, key: Any, numbers: Sequence[float], slots: Slots) -> str:
        """A text that is the same on ranks that find the same; ranks keep the same, in the same order."""
        if self.find(key, numbers, slots) is not None:
            return f"graph {next(reversed(self._entries))}"
        changed = self.changed(key, slots)
        return f"new, since {', '.join(changed[:3])} changed" if changed else "new"

    def of(self, key: Any) -> list[Specialization]:
        """All that are for calls that look alike."""
        return [entry.found for entry in self._entries.values() if entry.key == key]

    def changed(self, key: Any, slots: Slots) -> list[str]:
        """What of the state of the model has changed since the last call that looked alike; empty: there was none."""
        return next((e.changes(slots) for e in reversed(self._entries.values()) if e.key == key), [])

    def add(self, key: Any, found: Specialization, state: Signature) -> None:
        """Keep it; the one that was not used for longest goes if there are too many."""
        self._made += 1
        self._entries[self._made] = _Entry(key, found, state)
        while len(self._entries) > self.limit:
            self._entries.popitem(last=False)
