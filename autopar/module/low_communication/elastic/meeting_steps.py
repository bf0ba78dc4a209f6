"""What elastic workers do at a meeting: what each brings to it, and what it does with what comes of it."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from autopar.errors import AutoparError, RankError
from autopar.module.low_communication.choose_round import Wanted, at_a_store, chosen
from autopar.module.low_communication.compressed.step import first_infinite
from autopar.module.low_communication.elastic.given_state import Given, offer, others_of, received, take
from autopar.module.low_communication.elastic.links import Links
from autopar.module.low_communication.elastic.meetings import PAUSE, Meeting, Meetings, Waits
from autopar.module.low_communication.elastic.register import Seat
from autopar.module.low_communication.elastic.underway import Underway
from autopar.module.low_communication.elastic.words import Brought, giver_of, require_same, weighted
from autopar.module.low_communication.exchange import fed_back, sent_bytes
from autopar.module.low_communication.fragments import require_blocks, split_in_fragments
from autopar.module.low_communication.optimizer_steps import OptimizerSteps
from autopar.module.low_communication.outer import OuterState, cuts_of, require_exchangeable
from autopar.module.low_communication.settings import Settings
from autopar.module.low_communication.tokens import Tokens
from autopar.module.parallel_module import ParallelModule
from autopar.runtime.mesh import MeshContext

logger = logging.getLogger("autopar")


@dataclass(frozen=True)
class Held:
    """A meeting that has counted.

    Attributes:
        meeting: it.
        mean: of the fragments that it was about; None: the run begins.
        given: what a newcomer has received.
        left: what this rank has left out of it, for the next; None: nothing is fed back.
    """

    meeting: Meeting
    mean: torch.Tensor | None
    given: Given | None
    left: torch.Tensor | None


class MeetingSteps(OptimizerSteps):
    """What `autopar.ElasticWorkers` do around an optimizer's steps.

    Attributes:
        worker: the number of this one.
        settings: what is exchanged, and when; None until ``"auto"`` is decided.
        steps: how many the run has made.
        rounds: how many the run has completed.
    """

    def __init__(
        self,
        model: ParallelModule,
        optimizer: torch.optim.Optimizer,
        wanted: Wanted,
        worker: int,
        waits: Waits,
        stateful: Mapping[str, Any],
    ) -> None:
        """Without a store; `_connect` follows, when the caller has looked at its arguments.

        Args:
            model: of this worker.
            optimizer: of it.
            wanted: what is exchanged, and when.
            worker: the number of this one.
            waits: how long for whom.
            stateful: objects of which newcomers take the state, by name.

        Raises:
            ValueError: the optimizer lacks a trained parameter or is taken, or settings do not go together.
        """
        super().__init__(model, optimizer)
        self._require_free()
        self._wanted, self._waits, self._stateful = wanted, waits, stateful
        self.settings: Settings | None = None
        if not wanted.is_open:
            self.settings = _one_at_a_time(wanted.settings(wanted.every, wanted.fragments))
        self.worker, self.steps, self.rounds = worker, 0, 0
        self._since, self._tokens = 0, Tokens()
        self._outer: OuterState | None = None
        self._meetings: Meetings | None = None
        self._members: tuple[Seat, ...] = ()
        self._underway: Underway[Held] | None = None
        self._to_pull: tuple[int, ...] = ()
        self._left: dict[int, torch.Tensor] = {}
        self._former: tuple[int, ...] = ()
        self._thread = threading.get_ident()
        require_exchangeable(self._tensors(), wanted.rest["bits"])
        require_blocks(self._parameters(), wanted.fragments)

    def _connect(self, store: Store, run: str) -> None:
        """Have steps followed by meetings at a store, once this worker has joined."""
        self._store = PrefixStore(f"autopar/{run}", store)
        self._links = Links(self._store, self._context.rank, self._waits.timeout)
        self._attach(self._before, self._after)

    @property
    def _context(self) -> MeshContext:
        context: MeshContext = self.model._autopar.context
        return context

    def _settings(self) -> Settings | None:
        return self.settings

    @property
    def _all_fragments(self) -> range:
        assert self.settings is not None
        return range(self.settings.fragments)

    def _joined(self) -> Meetings:
        if self._meetings is None:
            raise AutoparError("this worker has not joined the others: call join() before the first step")
        return self._meetings

    def _made(self) -> OuterState:
        """The outer state; it begins at the parameters that there are."""
        if self._outer is None:
            self._require_layouts()
            tensors = self._tensors()
            if self.settings is None:
                between = at_a_store(self.model, self._waits.founders, PAUSE)
                found = chosen(self.model, tensors, self._wanted, between, self._context.gather)
                self.settings = _one_at_a_time(self._wanted.settings(_long_enough(found), found.fragments))
                logger.info("elastic workers: %s", self.settings)
            sizes = {n: p.numel() for n, p in self.model.named_parameters() if n in tensors}
            fragments = split_in_fragments(sizes, self.settings.fragments)
            cuts = cuts_of(self._parameters()) if self.settings.bits is not None else None
            self._outer = OuterState(tensors, fragments, torch.device("cpu"), cuts)
        return self._outer

    def _alive(self) -> None:
        # Not in a meeting beside training, whose own collectives find a rank that is gone.
        if threading.get_ident() == self._thread:
            with self._context.during("waiting for other workers"):
                pass

    def _before(self, has_closure: bool) -> None:
        self._joined()

    def _after(self) -> None:
        assert self.settings is not None
        self.steps += 1
        self._since += 1
        used, sent = self.settings.turns(self._since)
        if self.settings.delay and used is not None:
            self._use(None)
        if sent is not None:
            self._meet((sent,))
            if not self.settings.delay:
                self._use(None)

    def _meet(self, fragments: Sequence[int], *, idle: bool = False) -> None:
        """Hold a meeting about some fragments; with a delay, and unless workers wait for it, beside training."""
        outer, meetings, tensors = self._made(), self._joined(), self._tensors()
        assert self.settings is not None
        self._require_known(outer.anchor, tensors)
        weights = [self._tokens.since(f) if self.settings.weighted else 1 for f in fragments]
        if not idle and not all(weights):
            raise ValueError("weighted=True and no tokens since the last meeting: call add_tokens() in each step")
        self._require_finite({} if meetings.is_newcomer else tensors)
        self._tokens.sent |= dict.fromkeys(fragments, self._tokens.total)
        differences = () if meetings.is_newcomer else tuple(outer.difference(f, tensors) for f in fragments)
        brought = Brought(
            tuple(fragments), differences, tuple(weights), self.steps, self._since, self.rounds, self._same()
        )
        beside = self.settings.delay > 0 and not idle
        give = offer(self.model, self.optimizer, self._stateful, outer, beside=beside)
        self._thread = threading.get_ident()

        def hold() -> Held:
            meeting, exchanged = meetings.hold(
                lambda: brought.word(meetings.is_newcomer), lambda meeting: self._exchange(meeting, brought, give)
            )
            self._links.keep()
            logger.info("worker %s: meeting %s of %s", self.worker, meeting.number, [s.number for s in meeting.members])
            return Held(meeting, *exchanged)

        self._underway = Underway(hold, f"meeting of worker {self.worker}", beside=beside)

    def _arrived(self) -> bool:
        """Wait for the meeting that is under way, and move the outer parameters; whether that is an outer step.

        This worker's own parameters stay, unless it has taken the state of another.
        """
        if self._underway is None:
            return False
        self._require_known(self._made().anchor, self._tensors())
        underway, self._underway = self._underway, None
        held, outer, settings = underway.wait(self._alive), self._made(), self.settings
        assert settings is not None
        word = held.meeting.words[giver_of(held.meeting)]
        self._members, self.rounds = held.meeting.members, word["rounds"]
        if held.mean is None:
            self._left = self._left if self._goes_on(held) else {}
        elif held.given is not None:
            self._left = {}
        if held.given is not None:
            take(self.model, self.optimizer, self._stateful, outer, held.given)
            self.steps, self._since = word["steps"], word["since"]
        if held.mean is not None:
            sizes = [outer.blank(f).numel() for f in word["fragments"]]
            for fragment, mean in zip(word["fragments"], torch.split(held.mean, sizes), strict=True):
                outer.advance(fragment, mean, settings)
            if held.left is not None:
                self._left |= dict(zip(word["fragments"], torch.split(held.left, sizes), strict=True))
            self.rounds += settings.fragments - 1 in word["fragments"]
        self._to_pull = tuple(word["fragments"])
        if held.given is not None or held.mean is None:  # it begins from there
            self._tokens, self._to_pull = Tokens(), ()
            for fragment in self._all_fragments:
                outer.pull(fragment, self._tensors(), 0.0)
        return held.mean is not None

    def _goes_on(self, held: Held) -> bool:
        """Where a run begins: whether it does so from what this worker has loaded, so that its errors are of that."""
        if not self._wanted.rest["feedback"]:
            return False
        anchor = self._made().anchor.values()
        alike = held.given is None or all(map(torch.equal, anchor, held.given[1]))
        goes_on = all(self._context.gather(alike, "what the few bits of the run before have left out"))
        if self._left and not goes_on:
            logger.warning(
                "worker %s: what its few bits have left out (feedback=True) is of another checkpoint than the one "
                "that worker %s has, from which all begin, and is dropped", self.worker, giver_of(held.meeting).number,
            )  # fmt: skip
        gone = set(self._former) - {s.number for s in held.meeting.members}
        if gone and held.given is None:
            logger.warning("what the few bits of workers %s have left out is lost: they have not come", sorted(gone))
        self._former = ()
        return goes_on

    def _use(self, mix: float | None) -> bool:
        """Use what has come of the meeting that is under way, if there is one; whether that is an outer step.

        Args:
            mix: share of this worker's own parameters that stays; None: as the settings say.
        """
        made = self._arrived()
        outer, tensors = self._made(), self._tensors()
        assert self.settings is not None
        for fragment in self._to_pull:
            outer.pull(fragment, tensors, self.settings.mix if mix is None else mix)
        self._to_pull = ()
        return made

    def _require_finite(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Have all ranks of this worker come, and refuse a meeting to which it brings what is not finite.

        Raises:
            RankError: it does; the others go on without it.
        """
        what = f"meeting other workers after round {self.rounds}"
        for rank, name in enumerate(self._context.gather(first_infinite(tensors), what)):
            if name:
                raise RankError(
                    f"parameter {name!r} of worker {self.worker} (rank {rank} of it) is not finite: all workers would "
                    "have it; the others go on without this one; find what made it so, and join() anew"
                )

    def _same(self) -> dict[str, Any]:
        """What has to be the same on the ranks at this place in all workers."""
        own = self._tensors()
        layouts = [(name, tuple(t.shape), str(t.dtype)) for name, t in (own | others_of(self.model, own)).items()]
        return {
            "settings": str(self.settings),
            "the names, shapes and layouts of parameters and buffers": hashlib.sha256(
                repr((self._context.axes, layouts)).encode()
            ).hexdigest()[:12],
            "objects by name": sorted(self._stateful),
            "the optimizer's groups": len(self.optimizer.param_groups),
        }

    def _exchange(
        self, meeting: Meeting, brought: Brought, give: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor | None, Given | None, torch.Tensor | None]:
        """The mean difference of those that have trained, what this rank receives, and what it leaves out.

        Nothing is changed by it.
        """
        own, giver, outer = self._joined().seat, giver_of(meeting), self._made()
        require_same(meeting, own, giver)
        newcomers = [s for s in meeting.members if meeting.words[s]["new"] and s != giver]
        given = None
        try:
            self._links.meet(meeting.number, meeting.members, own)
            if newcomers and own == giver:
                payload = give()
                self._links.give(payload, newcomers)
                self.bytes_sent += payload.numel() * len(newcomers)
            elif own in newcomers:
                given = received(self.model, outer, self._links.take(giver))
            difference = weighted(meeting, own, brought, outer)
            if difference is None:
                return None, given, None
            count, itemsize, bits = difference.numel(), difference.itemsize, self._wanted.rest["bits"]
            left = None
            if self._wanted.rest["feedback"] and own not in newcomers:
                before = [self._left.get(f, outer.blank(f)) for f in brought.fragments]
                difference, left = fed_back(difference, torch.cat(before), bits)
            members = len(meeting.members)
            self.bytes_sent += sent_bytes(count, itemsize, members, bits) if count and members > 1 else 0
            return self._links.mean(difference, bits), given, left
        except BaseException:
            self._links.close()  # who waits for this rank sees it
            raise


def _long_enough(settings: Settings) -> int:
    """Steps of a round in which a meeting has been used before the next one begins."""
    return max(settings.every, settings.fragments * settings.delay)


def _one_at_a_time(settings: Settings) -> Settings:
    """Settings with which one meeting at a time is under way.

    Raises:
        ValueError: another would begin before.
    """
    if settings.delay > settings.every // settings.fragments:
        raise ValueError(
            f"delay={settings.delay}, every={settings.every}, fragments={settings.fragments}: elastic workers use what "
            "came of a meeting before they begin the next; take a delay of at most every // fragments steps"
        )
    return settings
