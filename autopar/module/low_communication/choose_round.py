"""``every="auto"``: rounds so long that exchanges hide, from the costs of the plan's cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopar.costs.arguments import one_of, require, whole
from autopar.costs.cluster import Link
from autopar.costs.outer_exchange import RoundCost, choose_round, round_cost
from autopar.errors import AutoparError
from autopar.module.low_communication.fragments import blocks_of
from autopar.module.low_communication.settings import Settings
from autopar.module.parallel_module import ParallelModule

AUTO = "auto"


@dataclass(frozen=True)
class Wanted:
    """What the user asked for.

    Attributes:
        every: steps of a round, or ``"auto"``.
        fragments: how many, or ``"auto"``.
        delay: steps between sending and use.
        rest: the other settings.
    """

    every: int | str
    fragments: int | str
    delay: int
    rest: Mapping[str, Any]

    def __post_init__(self) -> None:
        """Refuse what is neither a number nor ``"auto"``, and the rest by itself."""
        for name, value in (("every", self.every), ("fragments", self.fragments)):
            if isinstance(value, str):
                require(**{name: (value, one_of(AUTO))})
            else:
                require(**{name: (value, whole(1))})
        if self.fragments == AUTO and self.every != AUTO:
            raise ValueError("fragments='auto' takes every='auto': both are chosen together")
        require(delay=(self.delay, whole(0)))
        if self.is_open:
            given = 1 if self.fragments == AUTO else int(self.fragments)
            self.settings(max(self.delay + 1, given), given)

    @property
    def is_open(self) -> bool:
        """Whether something is to be chosen."""
        return AUTO in (self.every, self.fragments)

    def settings(self, every: int | str, fragments: int | str) -> Settings:
        """With these numbers."""
        return Settings(int(every), fragments=int(fragments), delay=self.delay, **self.rest)


def chosen(model: ParallelModule, tensors: Mapping[str, torch.Tensor], wanted: Wanted) -> Settings:
    """The shortest round whose exchanges hide; a collective call of all workers."""
    elements, itemsize, link, seconds = _figures(model, tensors)
    sizes = {n: p.numel() for n, p in model.named_parameters() if n in tensors}
    workers = model._autopar.context.workers
    assert workers is not None
    # The device with the most to send decides; and on all, one: shares differ by rank.
    most = max(workers.everyone.gather(elements, "the largest share of the parameters"))
    fragments = None if wanted.fragments == AUTO else int(wanted.fragments)
    every, parts = choose_round(
        most, itemsize, workers.count, wanted.rest["bits"], link, seconds,
        fragments=fragments, delay=wanted.delay, blocks=len(blocks_of(sizes)),
    )  # fmt: skip
    return wanted.settings(every, parts)


def predicted(model: ParallelModule, tensors: Mapping[str, torch.Tensor], settings: Settings) -> RoundCost:
    """What a round of these settings costs this rank."""
    elements, itemsize, link, seconds = _figures(model, tensors)
    workers = model._autopar.context.workers
    assert workers is not None
    return round_cost(
        elements, itemsize, workers.count, settings.bits, link, seconds,
        every=settings.every, fragments=settings.fragments, delay=settings.delay,
    )  # fmt: skip


def _figures(model: ParallelModule, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int, Link, float]:
    """Numbers that this rank exchanges, bytes of each, the link between workers, and seconds of a step.

    Raises:
        AutoparError: the plan has no prediction.
    """
    plan = model.plan
    if not plan.predicted.step_seconds:
        raise AutoparError("the plan predicts no step seconds, which every='auto' compares exchanges with; give every=")
    link = plan.cluster.link_for(dict(plan.workers) | dict(plan.axes))[0]
    itemsize = max((8 if t.dtype == torch.float64 else 4 for t in tensors.values()), default=4)
    return sum(t.numel() for t in tensors.values()), itemsize, link, plan.predicted.step_seconds
