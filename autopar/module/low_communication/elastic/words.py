"""What the ranks at one place in each worker say to each other before they exchange, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import AutoparError
from autopar.module.low_communication.elastic.meetings import Discarded, Meeting
from autopar.module.low_communication.elastic.register import Seat
from autopar.module.low_communication.outer import OuterState

FRAGMENTS = "the fragments"


@dataclass(frozen=True)
class Brought:
    """What a rank brings to a meeting.

    Attributes:
        fragments: numbers of those that are exchanged.
        differences: how far the worker has gone in each since it was last exchanged; none of a newcomer.
        weights: of the worker in the mean of each.
        steps: that it has made.
        since: how many of them are of this round.
        rounds: that the run has completed.
        same: what has to be the same on all workers.
    """

    fragments: tuple[int, ...]
    differences: tuple[torch.Tensor, ...]
    weights: tuple[int, ...]
    steps: int
    since: int
    rounds: int
    same: Mapping[str, Any]

    def word(self, is_new: bool) -> dict[str, Any]:
        """For the others; a newcomer takes their fragments."""
        return {
            "new": is_new, "steps": self.steps, "since": self.since, "rounds": self.rounds,
            "fragments": self.fragments, "weights": self.weights,
            "same": {**self.same, **({} if is_new else {FRAGMENTS: self.fragments})},
        }  # fmt: skip


def giver_of(meeting: Meeting) -> Seat:
    """Whose state newcomers take: of those that train, or that begin the run, the furthest, and of these the first."""
    words = meeting.words
    train = [s for s in meeting.members if not words[s]["new"]] or meeting.members
    return max(train, key=lambda s: (words[s]["rounds"], words[s]["steps"], -s.number))


def require_same(meeting: Meeting, own: Seat, giver: Seat) -> None:
    """Refuse this worker where it is not as the others.

    Raises:
        AutoparError: it is not; names what differs.
        Discarded: another one is not.
    """
    expected = meeting.words[giver]["same"]
    for seat in meeting.members:
        for name, value in meeting.words[seat]["same"].items():
            if value == expected.get(name, value):
                continue
            said = f"worker {seat.number} has {value} for {name}, and worker {giver.number} {expected[name]}"
            if seat == own:
                how = "call synchronize() on all workers at the same step" if name == FRAGMENTS else _ALIKE
                raise AutoparError(f"{said}: {how}")
            raise Discarded(said)


_ALIKE = "make every worker with the same model, plan, optimizer and arguments"


def weighted(meeting: Meeting, own: Seat, brought: Brought, outer: OuterState) -> torch.Tensor | None:
    """What this rank gives to a mean over all members, so that this is the weighted one of those that have trained.

    Returns:
        Of all fragments, one after another; None: nobody has trained, the run begins.
    """
    trained = {s: word["weights"] for s, word in meeting.words.items() if not word["new"]}
    if not trained:
        return None
    parts = []
    for place, fragment in enumerate(meeting.words[giver_of(meeting)]["fragments"]):
        total = sum(weights[place] for weights in trained.values())
        if own not in trained:
            parts.append(outer.blank(fragment))
            continue
        share = trained[own][place] / total if total else 1 / len(trained)
        parts.append(brought.differences[place] * (len(meeting.members) * share))
    return torch.cat(parts)
