"""``every="auto"``: rounds so long that exchanges hide, from the costs of the plan's cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopar.costs.arguments import one_of, require, whole
from autopar.costs.cluster import Link
from autopar.costs.outer_exchange import RoundCost, choose_round, meeting_seconds, round_cost
from autopar.errors import AutoparError
from autopar.module.low_communication.fragments import blocks_of
from autopar.module.low_communication.settings import Settings
from autopar.module.parallel_module import ParallelModule

AUTO = "auto"

WORKER = "worker"
"""The axis of elastic workers in `Cluster.axis_links`: no mesh has it."""


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


@dataclass(frozen=True)
class Between:
    """Workers, and what is between them.

    Attributes:
        count: how many there are.
        link: between them.
        before: seconds before each exchange in which they agree on it.
    """

    count: int
    link: Link
    before: float = 0.0


def of_an_axis(model: ParallelModule) -> Between:
    """The workers of a mesh's axis; their agreement before an exchange is not counted."""
    plan, workers = model.plan, model._autopar.context.workers
    assert workers is not None
    return Between(workers.count, plan.cluster.link_for(dict(plan.workers) | dict(plan.axes))[0])


def at_a_store(model: ParallelModule, workers: int, pause: float) -> Between:
    """Workers that are worlds of their own, and meet at a store."""
    link = model.plan.cluster.link_for({WORKER: workers} | dict(model.plan.axes))[0]
    return Between(workers, link, meeting_seconds(link, pause))


def chosen(
    model: ParallelModule,
    tensors: Mapping[str, torch.Tensor],
    wanted: Wanted,
    between: Between,
    gather: Callable[[int, str], list[int]],
) -> Settings:
    """The shortest round whose exchanges hide; a collective call of all who gather."""
    elements, itemsize, seconds = _figures(model, tensors)
    sizes = {n: p.numel() for n, p in model.named_parameters() if n in tensors}
    # The device with the most to send decides; and on all, one: shares differ by rank.
    most = max(gather(elements, "the largest share of the parameters"))
    fragments = None if wanted.fragments == AUTO else int(wanted.fragments)
    every, parts = choose_round(
        most, itemsize, between.count, wanted.rest["bits"], between.link, seconds,
        fragments=fragments, delay=wanted.delay, blocks=len(blocks_of(sizes)), before=between.before,
    )  # fmt: skip
    return wanted.settings(every, parts)


def predicted(
    model: ParallelModule, tensors: Mapping[str, torch.Tensor], settings: Settings, between: Between
) -> RoundCost:
    """What a round of these settings costs this rank."""
    elements, itemsize, seconds = _figures(model, tensors)
    return round_cost(
        elements, itemsize, between.count, settings.bits, between.link, seconds,
        every=settings.every, fragments=settings.fragments, delay=settings.delay, before=between.before,
    )  # fmt: skip


def _figures(model: ParallelModule, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int, float]:
    """Numbers that this rank exchanges, bytes of each, and seconds of a step.

    Raises:
        AutoparError: the plan has no prediction.
    """
    plan = model.plan
    if not plan.predicted.step_seconds:
        raise AutoparError("the plan predicts no step seconds, which every='auto' compares exchanges with; give every=")
    itemsize = max((8 if t.dtype == torch.float64 else 4 for t in tensors.values()), default=4)
    return sum(t.numel() for t in tensors.values()), itemsize, plan.predicted.step_seconds
