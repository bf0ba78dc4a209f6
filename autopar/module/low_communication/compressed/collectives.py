"""Exchanges as generators that ask for collectives: run on a process group, or in lock step in one process.

A method is written once, from the point of view of one worker: it yields a `Request` and is sent what comes of it.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from autopar.costs.collectives import wire_bytes

T = TypeVar("T")

REDUCE, GATHER, SCATTER, TELL = "all_reduce", "all_gather", "all_to_all", "broadcast"


@dataclass(frozen=True)
class Request:
    """A collective among the workers.

    Attributes:
        kind: ``all_reduce``: gives the mean; ``all_gather``: of n numbers gives [workers, n]; ``all_to_all``: of
            [workers, n], a row for each, gives [workers, n], a row from each; ``broadcast``: gives what the first has.
        tensor: what this worker has; contiguous, and it may be overwritten.
    """

    kind: str
    tensor: torch.Tensor

    def sent_bytes(self, workers: int) -> int:
        """That this rank sends, as a ring does."""
        size = self.tensor.numel() * self.tensor.itemsize
        return int(wire_bytes(self.kind, size * (workers if self.kind == GATHER else 1), workers))


Exchange = Generator[Request, torch.Tensor, T]


def over_group(exchange: Exchange[T], group: ProcessGroup) -> tuple[T, int]:
    """What an exchange returns on this rank, and the bytes that it has sent."""
    workers, sent = dist.get_world_size(group), 0
    try:
        request = next(exchange)
        while True:
            sent += request.sent_bytes(workers)
            request = exchange.send(_collective(request, group, workers))
    except StopIteration as end:
        return end.value, sent


def _collective(request: Request, group: ProcessGroup, workers: int) -> torch.Tensor:
    tensor = request.tensor
    if request.kind == REDUCE:
        dist.all_reduce(tensor, group=group)
        return tensor / workers
    if request.kind == TELL:
        dist.broadcast(tensor, group=group, group_src=0)
        return tensor
    if request.kind == GATHER:
        found = tensor.new_empty(workers, tensor.numel())
        dist.all_gather_into_tensor(found.view(-1), tensor, group=group)
        return found
    found = torch.empty_like(tensor)
    dist.all_to_all_single(found, tensor, group=group)
    return found


def in_lock_step(exchanges: Sequence[Exchange[T]]) -> list[T]:
    """What the exchanges of all workers of one process return."""
    ended: list[T] = []
    requests = [_next(e, None, ended) for e in exchanges]
    while not ended:
        tensors = [r.tensor for r in requests if r is not None]
        assert len({r.kind for r in requests if r is not None}) == 1
        kind = next(r.kind for r in requests if r is not None)
        if kind == SCATTER:
            found = [torch.stack([t[i] for t in tensors]) for i in range(len(tensors))]
        elif kind == TELL:
            found = [tensors[0].clone() for _ in tensors]
        else:
            found = [torch.stack(tensors)] * len(tensors)
        if kind == REDUCE:
            found = [stacked.sum(0) / len(tensors) for stacked in found]
        requests = [_next(e, f, ended) for e, f in zip(exchanges, found, strict=True)]
    assert len(ended) == len(exchanges)
    return ended


def _next(exchange: Exchange[T], found: Any, ended: list[T]) -> Request | None:
    try:
        return exchange.send(found)
    except StopIteration as end:
        ended.append(end.value)
        return None


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All numbers one after another, in a new tensor."""
    return torch.cat([t.reshape(-1) for t in tensors])


def parted(flat: torch.Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
    """Views of tensors of these shapes, one after another, by name."""
    parts = torch.split(flat, [shape.numel() for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def averaged(tensors: Mapping[str, torch.Tensor]) -> Exchange[dict[str, torch.Tensor]]:
    """The mean over workers of each, as one collective."""
    if not tensors:
        return {}
    mean = yield Request(REDUCE, joined([*tensors.values()]))
    return parted(mean, {n: t.shape for n, t in tensors.items()})
