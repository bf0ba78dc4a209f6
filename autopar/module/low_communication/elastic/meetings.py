"""`Meetings`: by which workers agree, at a store, on who takes part in an outer step and on whether it counts.

A meeting has a number and goes like this, every rank of a worker doing the same:

1. A worker comes: rank 0 of it adds its seat to the meeting's list.
2. Who has taken part in the last meeting proposes members when all of those have come, or when it has waited for
   ``grace`` seconds and at least ``least`` are there. The first proposal is settled. Newcomers propose nothing, but in
   the first meeting, which begins when as many are there as begin the run.
3. Each rank of a member writes a word: what it has and what it weighs. When it has the words of the ranks at its place
   in all members, they exchange.
4. Each rank that has what it needs votes. When all have, the outcome is settled: the meeting counts. A rank whose
   exchange fails, or that has waited too long for a word or a vote, settles that it is discarded, and says who is
   gone.

Since an outcome is settled once, all that are left have the same, whoever dies and when. Nothing is changed before it.
After a discarded meeting the next one is held at once, with the same differences. A worker that was not among the
members of a meeting that counts is a newcomer at the next one.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from autopar.errors import RankError
from autopar.module.low_communication.elastic.register import COUNTS, Register, Seat, named
from autopar.runtime.agreement.control import first_line, is_of_collective

logger = logging.getLogger("autopar")

T = TypeVar("T")

PAUSE = 0.02
"""Seconds between two looks at the store."""

MOMENT = 1.0
"""Seconds that who has failed waits for others to say so: connections end on all sides at about the same time."""

COMMITTED = "committed"
"""The key of the number of a meeting that counts."""


@dataclass(frozen=True)
class Waits:
    """How long who is waited for.

    Attributes:
        founders: workers with which the run begins.
        least: members of a meeting.
        grace: seconds that those who have come wait for others who took part last.
        timeout: seconds for an exchange, a word or a vote.
        quorum: seconds for the other workers to come: longer than a round.
        retries: discarded meetings in a row that are no error.
    """

    founders: int
    least: int
    grace: float
    timeout: float
    quorum: float
    retries: int


@dataclass(frozen=True)
class Meeting:
    """One that is being held.

    Attributes:
        number: it has.
        members: who takes part, by number.
        words: of the rank at this place in each member.
    """

    number: int
    members: tuple[Seat, ...]
    words: Mapping[Seat, dict[str, Any]]


class Discarded(Exception):  # noqa: N818 - ends a meeting, not the run
    """Why a meeting is."""


class Meetings:
    """Of one rank of a worker.

    Attributes:
        seat: of the worker.
        members: of the last meeting that has counted and in which it took part.
        is_newcomer: whether it has to take the state of others.
    """

    def __init__(
        self, register: Register, seat: Seat, place: int, places: int, waits: Waits, alive: Callable[[], None]
    ) -> None:
        """Begin as a newcomer; `start` says where.

        Args:
            register: of the run.
            seat: of this worker.
            place: this rank's number within it.
            places: how many ranks each worker has.
            waits: how long for whom.
            alive: raises if a rank of this worker is gone; called while this one waits.
        """
        self.seat, self.is_newcomer = seat, True
        self.members: tuple[Seat, ...] = ()
        self._register, self._place, self._places = register, place, places
        self._waits, self._alive = waits, alive
        self._next, self._begun, self._taken = 0, False, 0

    @staticmethod
    def first(register: Register) -> int:
        """The number of the next meeting that may be held, or of one before it."""
        committed = register.read(COMMITTED)
        return 0 if committed is None else int(committed) + 1

    def start(self, number: int) -> None:
        """Begin with the meeting `first` has named, the same on all ranks of the worker."""
        self._next, self._begun = number, number > 0

    def leave(self) -> None:
        """Have the others not wait for this worker."""
        self._register.write(f"left/{self.seat.to_text()}", "")

    def hold(self, word: Callable[[], dict[str, Any]], exchange: Callable[[Meeting], T]) -> tuple[Meeting, T]:
        """Meet until a meeting counts; what its exchange has given, which changes nothing before.

        Args:
            word: what this rank has to say to those at its place.
            exchange: with them.

        Raises:
            RankError: others do not come, a rank of this worker is gone, or too many meetings were discarded.
            ValueError: another worker has this one's number.
        """
        why = ""
        for _ in range(self._waits.retries):
            members = self._members()
            number, self._next = self._next, self._next + 1
            meeting, result, outcome = self._attempt(number, members, word, exchange)
            if outcome == COUNTS:
                self._register.write(COMMITTED, str(number))
                self.members, self.is_newcomer, self._begun = members, False, True
                assert meeting is not None
                return meeting, result  # type: ignore[return-value]
            why = outcome
            logger.warning("worker %s: meeting %s is discarded: %s", self.seat.number, number, outcome)
        raise RankError(
            f"worker {self.seat.number}: {self._waits.retries} meetings in a row were discarded, the last one: {why}"
        )

    def _members(self) -> tuple[Seat, ...]:
        """The members of the next meeting of which this worker is one."""
        while True:
            members = self._settled_members()
            if self.seat in members:
                return members
            # Too late for this one: it may still be discarded.
            outcome = self._until(
                lambda: self._register.read(f"outcome/{self._next}"),
                self._waits.quorum,
                lambda found=members: RankError(  # type: ignore[misc]
                    f"worker {self.seat.number} waited {self._waits.quorum:g} s for {named(found)} to end meeting "
                    f"{self._next}: start all workers anew from a checkpoint, under another run="
                ),
            )
            self._next += 1
            if outcome == COUNTS:
                self.is_newcomer, self._begun = True, True
                self._require_number(members)

    def _require_number(self, members: tuple[Seat, ...]) -> None:
        # Once: a worker that was started anew while its former life was still in the meeting.
        self._taken = self._taken + 1 if any(m.number == self.seat.number for m in members) else 0
        if self._taken > 1:
            raise ValueError(
                f"worker={self.seat.number}: another worker that trains has this number; give each its own, and start "
                "one anew when its processes have ended"
            )

    def _settled_members(self) -> tuple[Seat, ...]:
        key = f"members/{self._next}"
        if self._place == 0:
            self._register.append(f"come/{self._next}", self.seat.to_text())
        begun = time.monotonic()

        def settled() -> str | None:
            found = self._register.read(key)
            if found is None and (proposed := self._proposal(time.monotonic() - begun)):
                found = self._register.settle(key, " ".join(s.to_text() for s in proposed))
            return found

        found = self._until(settled, self._waits.quorum, self._nobody)
        return tuple(Seat.of_text(text) for text in found.split(" "))

    def _proposal(self, waited: float) -> list[Seat]:
        """Members, if this rank may propose them now."""
        if self.is_newcomer and self._begun:
            return []
        present = self._present()
        if self.seat not in present:  # rank 0 of this worker has not written it yet
            return []
        if not self._begun:
            return present if len(present) >= self._waits.founders else []
        missing = self._missing(present)
        if len(present) < self._waits.least or (missing and waited < self._waits.grace):
            return []
        return present

    def _present(self) -> list[Seat]:
        """Who has come, one for each number: the one that took part last, else the latest."""
        by_number: dict[int, Seat] = {}
        for text in self._register.entries(f"come/{self._next}"):
            seat = Seat.of_text(text)
            if by_number.get(seat.number) not in self.members or seat in self.members:
                by_number[seat.number] = seat
        return sorted(by_number.values())

    def _missing(self, present: list[Seat]) -> list[Seat]:
        numbers = {s.number for s in present}
        return [
            s
            for s in self.members
            if s.number not in numbers and not self._register.has([f"left/{s.to_text()}"])
        ]  # fmt: skip

    def _nobody(self) -> RankError:
        present = self._present()
        who = f"worker {self.seat.number} waited {self._waits.quorum:g} s (quorum_timeout)"
        there = f"{named(present)} {'is' if len(present) == 1 else 'are'} there" if present else "nobody is there"
        if not self._begun:
            return RankError(
                f"{who} for {self._waits.founders} workers to begin the run, and {there}: start the others, or say "
                "workers= of as many as begin"
            )
        if self.is_newcomer:
            return RankError(
                f"{who} for those that train to come to meeting {self._next}, and {there}: raise it above the time of "
                "a round; if they are gone, start all anew from a checkpoint, under another run="
            )
        missing = self._missing(present)
        return RankError(
            f"{who} for {named(missing)} to come to meeting {self._next}, and {there}, of at least "
            f"{self._waits.least} (least=): start them anew, or raise it above the time of a round"
        )

    def _attempt(
        self,
        number: int,
        members: tuple[Seat, ...],
        word: Callable[[], dict[str, Any]],
        exchange: Callable[[Meeting], T],
    ) -> tuple[Meeting | None, T | None, str]:
        outcome = f"outcome/{number}"
        try:
            self._register.write(self._key("word", number, self.seat, self._place), json.dumps(word()))
            meeting = Meeting(number, members, self._words(number, members))
            result = exchange(meeting)
            self._register.write(self._key("vote", number, self.seat, self._place), "")
            return meeting, result, self._votes(number, members)
        except Exception as e:
            why = str(e) if isinstance(e, Discarded) else f"{type(e).__name__}: {first_line(e)}"
            is_of_others = isinstance(e, RuntimeError) and is_of_collective(e)
            why += self._gone(number, members) if is_of_others else ""
            settled = self._register.settle(outcome, f"{why} (worker {self.seat.number}, rank {self._place} of it)")
            if not isinstance(e, Discarded) and not is_of_others:
                raise
            # A vote may have been late for this rank alone, and the meeting counts: then it has what it voted for.
            return (meeting, result, settled) if settled == COUNTS else (None, None, settled)

    def _words(self, number: int, members: tuple[Seat, ...]) -> dict[Seat, dict[str, Any]]:
        keys = {s: self._key("word", number, s, self._place) for s in members}

        def ready() -> bool | None:
            if (outcome := self._register.read(f"outcome/{number}")) is not None:
                raise Discarded(outcome)
            return True if self._register.has(list(keys.values())) else None

        self._until(ready, self._waits.timeout, lambda: self._silent(list(keys.items()), "word"))
        return {s: json.loads(word) for s, word in zip(keys, self._register.read_all([*keys.values()]), strict=True)}

    def _votes(self, number: int, members: tuple[Seat, ...]) -> str:
        outcome = f"outcome/{number}"
        keys = [(s, self._key("vote", number, s, place)) for s in members for place in range(self._places)]

        def settled() -> str | None:
            found = self._register.read(outcome)
            if found is None and self._register.has([key for _, key in keys]):
                found = self._register.settle(outcome, COUNTS)
            return found

        return self._until(settled, self._waits.timeout, lambda: self._silent(keys, "vote"))

    def _silent(self, keys: list[tuple[Seat, str]], what: str) -> Exception:
        late = [s for s, key in keys if not self._register.has([key])]
        return Discarded(f"no {what} of {named(late)} within {self._waits.timeout:g} s")

    def _gone(self, number: int, members: tuple[Seat, ...]) -> str:
        """Whom an exchange has failed for: of those at this place who says nothing of it, after a moment."""
        self._register.write(self._key("failed", number, self.seat, self._place), "")
        keys = {s: [self._key(what, number, s, self._place) for what in ("failed", "vote")] for s in members}
        deadline = time.monotonic() + min(MOMENT, self._waits.timeout)
        while silent := [s for s, said in keys.items() if not any(self._register.has([key]) for key in said)]:
            if time.monotonic() > deadline:
                its = f"its rank {self._place}" if len(silent) == 1 else f"their ranks {self._place}"
                return f"; {named(silent)} ({its}) said nothing: gone, or stuck"
            time.sleep(PAUSE)
        return ""

    @staticmethod
    def _key(what: str, number: int, seat: Seat, place: int) -> str:
        return f"{what}/{number}/{seat.to_text()}/{place}"

    def _until(self, ready: Callable[[], T | None], seconds: float, late: Callable[[], Exception]) -> T:
        deadline = time.monotonic() + seconds
        while (found := ready()) is None:
            if time.monotonic() > deadline:
                raise late()
            self._alive()
            time.sleep(PAUSE)
        return found
