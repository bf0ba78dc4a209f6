"""`SpecializationCache`: the specializations that were used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from autopar.capture.state.slots import Signature, Slots, differences
from autopar.specialize import Specialization

CACHED = 16
"""How many specializations of a model are cached."""


class SpecializationCache:
    """Specializations by what a call looks like, the least recently used first.

    There may be several for calls that look alike: where floats of the call, or the Python state of the model, need
    graphs of their own.
    """

    def __init__(self, limit: int = CACHED) -> None:
        self.limit = limit
        # By number, which is part of what ranks compare: they must cache the same, in the same order.
        self._entries: OrderedDict[int, tuple[Any, Specialization]] = OrderedDict()
        self._states: dict[int, Signature] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._entries)

    def copy(self) -> SpecializationCache:
        """The same specializations, for a copy of the model."""
        new = SpecializationCache(self.limit)
        new._count = self._count
        new._entries.update(self._entries)
        new._states.update(self._states)
        return new

    def find(self, key: Any, numbers: Sequence[float], slots: Slots) -> Specialization | None:
        """The specialization for a call, which then is the most recently used.

        Args:
            key: what the call looks like.
            numbers: its floats, which the guards of a graph decide on.
            slots: the Python state of the model.
        """
        for number, (own, found) in reversed(self._entries.items()):
            guards = found.program.guards
            # Guards first: a comparison of the state looks at every attribute of every module.
            same = own == key and all(g.holds(numbers) for g in guards) and not self._read_otherwise(found, slots)
            if same and not self._changes(number, slots):
                self._entries.move_to_end(number)
                return found
        return None

    @staticmethod
    def _read_otherwise(found: Specialization, slots: Slots) -> list[str]:
        """What of the graph's code that asked about values of buffers has other answers now."""
        reads = found.program.state.reads
        tensors = slots.state_tensors() if reads else {}
        return [str(r) for r in reads if not r.holds(tensors)]

    def which(self, found: Specialization | None, key: Any, slots: Slots) -> str:
        """A text that is the same on ranks that have found the same specialization just now."""
        if found is not None:
            return f"graph {next(reversed(self._entries))}"
        changed = self.changed(key, slots)
        return f"new, since {', '.join(changed[:3])} changed" if changed else "new"

    def of(self, key: Any) -> list[Specialization]:
        """All that are for calls that look alike."""
        return [found for own, found in self._entries.values() if own == key]

    def changed(self, key: Any, slots: Slots) -> list[str]:
        """What of the model's state has changed since the last call that looked alike; empty: there was none."""
        number, found = next(((n, f) for n, (own, f) in reversed(self._entries.items()) if own == key), (0, None))
        return [] if found is None else self._changes(number, slots) or self._read_otherwise(found, slots)

    def add(self, key: Any, found: Specialization, state: Signature) -> None:
        """Cache a specialization for a call and a state; the least recently used goes if there are too many."""
        self._count += 1
        self._entries[self._count], self._states[self._count] = (key, found), state
        while len(self._entries) > self.limit:
            number, _ = self._entries.popitem(last=False)
            del self._states[number]

    def _changes(self, number: int, slots: Slots) -> list[str]:
        """What of the state differs from that of an entry; counters that are only counted up may."""
        program = self._entries[number][1].program.state
        # Who looks for a graph has just taken an inventory, which the key is from.
        now = slots.signature(program.constants, compare=False)
        changed = differences(self._states[number], now, program.counted)
        if not changed:
            # Equal values in new objects: from now on the objects are the same, which is found out sooner.
            self._states[number] = now
        return changed
