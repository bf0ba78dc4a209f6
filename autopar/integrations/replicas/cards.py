"""What a group says of itself when groups meet, and who does not belong to the others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import RankError
from autopar.module.parallel_module import ParallelModule
from autopar.runtime.dtensor import to_local
from autopar.runtime.state.parameters import contents


@dataclass(frozen=True)
class Card:
    """Of one group; the same on all of its ranks.

    Attributes:
        group: its number.
        axes: of its mesh.
        graph: fingerprint of the plan: of the captured graph, which has the shapes of the group's batch.
        layouts: a hash of the names, types and layouts of parameters and buffers on all of its ranks.
        optimizer: its class.
        weights: a hash of all parameters and buffers that it began with.
        step: how many steps it has done.
    """

    group: int
    axes: str
    graph: str
    layouts: str
    optimizer: str
    weights: str
    step: int = 0

    def at(self, step: int) -> Card:
        """The same after so many steps."""
        return replace(self, step=step)

    @property
    def fingerprint(self) -> str:
        """Of the plan, for messages."""
        return f"{self.graph}/{self.layouts}"

    def to_text(self) -> str:
        """For a store."""
        return json.dumps(asdict(self))

    @staticmethod
    def of_text(text: str | bytes) -> Card:
        """From a store."""
        return Card(**json.loads(text))


def card_of(model: ParallelModule, optimizer: torch.optim.Optimizer, group: int) -> Card:
    """The card of this rank's group; every rank of it calls it."""
    session = model._autopar
    tensors: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    own = hashlib.sha256(repr([(n, *_layout(t)) for n, t in tensors.items()]).encode()).hexdigest()
    weights = contents([to_local(t) for t in tensors.values()])
    ranks = session.context.gather((own, weights), "the card of a replica group")
    layouts, values = (hashlib.sha256(repr(each).encode()).hexdigest()[:12] for each in zip(*ranks, strict=True))
    axes = ", ".join(f"{name}={size}" for name, size in session.context.axes)
    kind = f"{type(optimizer).__name__} with {len(optimizer.param_groups)} parameter groups"
    return Card(group, axes, model.plan.fingerprint, layouts, kind, values)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    placements = str(tensor.placements) if isinstance(tensor, DTensor) else ""
    return tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad, placements, tuple(to_local(tensor).shape)


_COMPARED = (
    ("axes", "axes of its mesh", "start every group on a mesh of the same axes"),
    ("fingerprint", "plan with the fingerprint", "give every group the same model, batch size and plan="),
    ("optimizer", "optimizer", "make the same optimizer in every group"),
)  # fmt: skip


def difference(cards: Sequence[Card], at: int) -> str:
    """Why the group of one card cannot be one of those that have met, with the remedy; empty: it can.

    Those that have done the most steps are right, and of these the first.
    """
    own, right = cards[at], max(cards, key=lambda c: c.step)
    twins = [i for i, c in enumerate(cards) if c.group == own.group]
    if at != max(twins, key=lambda i: cards[i].step):
        return (
            f"two groups have the number {own.group}: give each its own group=, and start a group anew when its "
            "processes have ended"
        )
    for attribute, words, remedy in _COMPARED:
        mine, theirs = getattr(own, attribute), getattr(right, attribute)
        if mine != theirs:
            return f"group {own.group} has the {words} {mine}, and group {right.group} {theirs}: {remedy}"
    if right.step == 0 and own.weights != right.weights:
        return (
            f"group {own.group} begins with other weights than group {right.group} ({own.weights}, {right.weights}): "
            "seed them alike before the model is built, or load the same checkpoint"
        )
    return ""


def swap_cards(
    store: Any, own: Card, rank: int, groups: Sequence[int], seconds: float, of: Callable[[int], str] = str
) -> list[Card]:
    """The cards of all groups that meet, in the order of their ranks.

    Args:
        store: that all of them reach, with keys of this meeting alone.
        own: of this group.
        rank: of this group among them.
        groups: their numbers, by rank.
        seconds: to wait for each.
        of: says who has a number.

    Raises:
        RankError: one does not come; names it.
    """
    store.set(f"card/{rank}", own.to_text())
    found = []
    for other, number in enumerate(groups):
        try:
            store.wait([f"card/{other}"], timedelta(seconds=seconds))
            found.append(Card.of_text(store.get(f"card/{other}")))
        except Exception as e:
            raise RankError(
                f"group {own.group} waited {seconds:g} s for {of(number)} to meet: {type(e).__name__}: {e}"
            ) from e
    return found
