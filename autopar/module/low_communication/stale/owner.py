"""An owner of a part of the parameters: it updates it with each gradient that comes, from whichever worker.

Of a gradient ``g`` that a worker computed from the values ``then``, ``now`` being those that the owner has meanwhile::

    g = g + compensation * g * g * (now - then)        delay compensation
    now = optimizer(now, g)                            the worker's own learning rate

The worker gets ``now`` back for its next step, at once unless it is more than ``staleness`` steps ahead of the slowest
worker: then when this one's gradient has come. What an owner does follows from the order of arrivals alone.

S. Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", 2017, algorithm 2; Q. Ho et
al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.module.low_communication.stale.settings import Staleness

KINDS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers that treat each number by itself, so that a part of a tensor is updated as the whole would be."""

HOW = ("foreach", "fused", "capturable", "differentiable")
"""Options that say how an update is computed, and not which."""

LR = "lr"


@dataclass(frozen=True)
class Segment:
    """A run of the numbers of one parameter.

    Attributes:
        name: of the parameter.
        start: number of its first.
        stop: number after its last.
        group: number of the optimizer's group that has the parameter.
    """

    name: str
    start: int
    stop: int
    group: int = 0

    @property
    def size(self) -> int:
        """How many numbers."""
        return self.stop - self.start


def cut(sizes: Mapping[str, int], groups: Mapping[str, int], owners: int) -> list[list[Segment]]:
    """The segments of each owner: neighboring numbers, as many for each but for one.

    Args:
        sizes: elements of each parameter, in the model's order.
        groups: numbers of the optimizer's groups.
        owners: how many there are.

    >>> [[(s.name, s.start, s.stop) for s in own] for own in cut({"a": 4, "b": 2}, {"a": 0, "b": 0}, 2)]
    [[('a', 0, 3)], [('a', 3, 4), ('b', 0, 2)]]
    """
    total = sum(sizes.values())
    bounds = [(i * total // owners, (i + 1) * total // owners) for i in range(owners)]
    found: list[list[Segment]] = [[] for _ in bounds]
    begin = 0
    for name, size in sizes.items():
        for (low, high), own in zip(bounds, found, strict=True):
            start, stop = max(low, begin) - begin, min(high, begin + size) - begin
            if start < stop:
                own.append(Segment(name, start, stop, groups[name]))
        begin += size
    return found


def taken(tensors: Mapping[str, torch.Tensor], segments: Sequence[Segment], dtype: torch.dtype) -> torch.Tensor:
    """A copy of the numbers of some segments, in host memory, of one dim."""
    parts = [tensors[s.name].detach().reshape(-1)[s.start : s.stop].to("cpu", dtype) for s in segments]
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype)


def put(tensors: Mapping[str, torch.Tensor], segments: Sequence[Segment], flat: torch.Tensor) -> None:
    """Write the numbers of some segments into tensors, which need not be contiguous."""
    for segment, part in zip(segments, torch.split(flat, [s.size for s in segments]), strict=True):
        tensor = tensors[segment.name]
        if tensor.is_contiguous():
            tensor.view(-1)[segment.start : segment.stop].copy_(part)
            continue
        whole = tensor.reshape(-1).clone()
        whole[segment.start : segment.stop].copy_(part)
        tensor.copy_(whole.view_as(tensor))


class Owner:
    """Of one part of the parameters.

    Attributes:
        segments: what it owns.
        values: these numbers now, a parameter of one dim for each segment.
        optimizer: of the values; None if it owns nothing.
        version: how many gradients it has taken.
        clocks: how many of them from each worker.
        read: the version from which each worker computes.
        arrivals: ``(worker, version that it had read)`` of each gradient, in order, where that is recorded.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        values: torch.Tensor,
        like: torch.optim.Optimizer,
        settings: Staleness,
        workers: int,
        *,
        record: bool = False,
    ) -> None:
        """Begin at some values, which all workers have read.

        Args:
            segments: what it owns.
            values: of one dim.
            like: an optimizer of whole parameters, of one of `KINDS`.
            settings: the same for all owners.
            workers: how many there are.
            record: keep `arrivals`.
        """
        self.segments, self.settings, self._record = list(segments), settings, record
        self.values = [torch.nn.Parameter(p.clone()) for p in torch.split(values, [s.size for s in segments])]
        self.optimizer = _alike(like, self.segments, self.values) if segments else None
        self.version, self.clocks, self.read = 0, [0] * workers, [0] * workers
        self.arrivals: list[tuple[int, int]] = []
        self._waiting: set[int] = set()
        self._then: list[torch.Tensor] = [values.clone() for _ in range(workers)] if settings.compensation else []

    @property
    def flat(self) -> torch.Tensor:
        """A copy of all values, of one dim."""
        return torch.cat([v.detach() for v in self.values]) if self.values else torch.empty(0)

    @torch.no_grad()
    def push(self, worker: int, gradient: torch.Tensor, given: Sequence[bool], lrs: Sequence[float]) -> list[int]:
        """Take a worker's gradient.

        Args:
            worker: whose it is.
            gradient: of all segments, of one dim.
            given: for each segment, whether its parameter has a gradient.
            lrs: the worker's learning rates, one for each group.

        Returns:
            The workers that go on from the values as they are now: they are counted as having read them.
        """
        if self._record:
            self.arrivals.append((worker, self.read[worker]))
        if self.optimizer is not None:
            self._update(worker, gradient, given, lrs)
        self.version += 1
        self.clocks[worker] += 1
        self._waiting.add(worker)
        released = [w for w in sorted(self._waiting) if self.clocks[w] - min(self.clocks) <= self.settings.staleness]
        for w in released:
            self._waiting.discard(w)
            self.read_by(w)
        return released

    def read_by(self, worker: int) -> None:
        """A worker computes from the values as they are now."""
        self.read[worker] = self.version
        if self._then:
            self._then[worker] = self.flat

    def had_read(self, worker: int, values: torch.Tensor) -> None:
        """A worker computes from these values, of a version that is set by hand: of a run that goes on."""
        if self._then:
            self._then[worker] = values

    def _update(self, worker: int, gradient: torch.Tensor, given: Sequence[bool], lrs: Sequence[float]) -> None:
        assert self.optimizer is not None
        sizes = [s.size for s in self.segments]
        then = torch.split(self._then[worker], sizes) if self._then else [None] * len(sizes)
        for value, own, old, has in zip(self.values, torch.split(gradient, sizes), then, given, strict=True):
            if old is not None:
                own = own + self.settings.compensation * own * own * (value - old)
            value.grad = own if has else None
        for group, lr in zip(self.optimizer.param_groups, lrs, strict=True):
            group[LR] = lr
        self.optimizer.step()


def _alike(
    like: torch.optim.Optimizer, segments: Sequence[Segment], values: Sequence[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """An optimizer of the same kind and options, of the values of some segments."""
    groups: list[dict[str, Any]] = []
    for number, group in enumerate(like.param_groups):
        own = [v for s, v in zip(segments, values, strict=True) if s.group == number]
        options = {k: v for k, v in options_of(group).items() if k not in HOW}
        groups.append(options | {"params": own, LR: float(group[LR])})
    kind: Any = type(like)
    found: torch.optim.Optimizer = kind(groups)
    return found


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group of an optimizer says of each number's update, but for learning rates, which may change."""
    return {k: v for k, v in group.items() if k not in ("params", "initial_lr", LR)}


def require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that owners cannot make the steps of.

    Raises:
        ValueError: it is of another kind.
    """
    if type(optimizer) not in KINDS:
        kinds = ", ".join(kind.__name__ for kind in KINDS)
        raise ValueError(
            f"optimizer= is {type(optimizer).__name__}: owners make the steps of a part of a parameter, which is known "
            f"to be that of the whole for {kinds} of torch.optim; use one of these"
        )
