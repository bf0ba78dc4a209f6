"""What elastic workers write down at a store: who has come to a meeting, who takes part, and whether it counts.

What is settled is settled once: the first value stays (`Store.compare_set`), and all read the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from autopar.errors import RankError

T = TypeVar("T")

COUNTS = "counts"
"""The outcome of a meeting whose exchange all members have; any other says why it is discarded."""


@dataclass(frozen=True, order=True)
class Seat:
    """One life of a worker: one that is started anew has the same number, and another token.

    Attributes:
        number: of the worker.
        token: of its processes.
    """

    number: int
    token: str

    def to_text(self) -> str:
        """For a store."""
        return f"{self.number}.{self.token}"

    @staticmethod
    def of_text(text: str) -> Seat:
        """From a store."""
        number, _, token = text.partition(".")
        return Seat(int(number), token)


def named(seats: Iterable[Seat]) -> str:
    """For messages.

    >>> named([Seat(0, "a")]), named([Seat(0, "a"), Seat(2, "b")]), named([])
    ('worker 0', 'workers 0, 2', 'other workers')
    """
    numbers = sorted({s.number for s in seats})
    if not numbers:
        return "other workers"
    return f"worker{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


class Register:
    """A store, read and written in words; no call waits for another process."""

    def __init__(self, store: Any) -> None:
        """Of a store whose keys are this run's."""
        self.store = store

    def read(self, key: str) -> str | None:
        """What is written there; None: nothing yet."""
        found = self._asked(lambda: self.store.get(key).decode() if self.store.check([key]) else None)
        return None if found is None else str(found)

    def read_all(self, keys: list[str]) -> list[str]:
        """What is written at keys at all of which there is something: one question, however far the store is."""
        return [str(value.decode()) for value in self._asked(lambda: self.store.multi_get(keys))] if keys else []

    def has(self, keys: list[str]) -> bool:
        """Whether there is something at all of them."""
        return bool(self._asked(lambda: self.store.check(keys)))

    def write(self, key: str, value: str) -> None:
        """Write, over what is there."""
        self._asked(lambda: self.store.set(key, value))

    def settle(self, key: str, value: str) -> str:
        """Write unless something is there, and say what is."""
        return str(self._asked(lambda: self.store.compare_set(key, "", value)).decode())

    def append(self, key: str, value: str) -> None:
        """One more entry of a list."""
        self.write(f"{key}/{self._count(key, 1)}", value)

    def entries(self, key: str) -> list[str]:
        """Of a list, in the order in which they came."""
        keys = [f"{key}/{i + 1}" for i in range(self._count(key, 0))]
        if self.has(keys):
            return self.read_all(keys)
        found = [self.read(key) for key in keys]
        return [entry for entry in found if entry is not None]  # one may be counted, and not written yet

    def _count(self, key: str, more: int) -> int:
        return int(self._asked(lambda: self.store.add(f"{key}/count", more)))

    def _asked(self, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except RuntimeError as e:  # torch's errors of stores are some
            first = (str(e).splitlines() or [""])[0][:200]
            raise RankError(
                f"the store at which workers meet does not answer ({first}): it has to be on a machine that stays; "
                "start `autopar rendezvous HOST:PORT` there, and all workers anew from a checkpoint"
            ) from e
