"""`Links`: connections among the ranks at one place in each member of a meeting, and what is sent by them.

Gloo, from host memory: what is exchanged is there. A rank whose exchange fails closes its connections, by which those
that wait for it see that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

from autopar.ir.quantized.blocks import mean_of, quantize
from autopar.module.low_communication.elastic.register import Seat, named
from autopar.runtime.agreement.control import first_line


class Links:
    """Of one rank."""

    def __init__(self, store: Any, place: int, seconds: float) -> None:
        """Without a connection yet.

        Args:
            store: of the run.
            place: this rank's number within its worker.
            seconds: for each exchange.
        """
        self._store, self._place, self._seconds = store, place, seconds
        self._group: Any = None
        self._known: tuple[int, tuple[Seat, ...]] = (-1, ())
        self._rank, self._stays = 0, False

    def meet(self, number: int, members: tuple[Seat, ...], own: Seat) -> None:
        """Be connected to the members of a meeting: anew, unless the last one had the same and has counted."""
        # By all of them or by none: all have been in the meeting before, and have the same outcome of it.
        stays = self._stays and self._known == (number - 1, members)
        self._known, self._stays = (number, members), False
        if stays:
            return
        self.close()
        self._rank = members.index(own)
        if len(members) > 1:
            store = PrefixStore(f"links/{number}/{self._place}", self._store)
            with self._waiting("connecting to", members):
                self._group = ProcessGroupGloo(store, self._rank, len(members), timedelta(seconds=self._seconds))

    def keep(self) -> None:
        """The meeting has counted: the next one may go on with its connections."""
        self._stays = True

    def close(self) -> None:
        """End the connections."""
        self._group, self._stays = None, False

    def mean(self, numbers: torch.Tensor, bits: int | None) -> torch.Tensor:
        """Over members, the same on all of them to the last bit; ``numbers`` may be overwritten."""
        size = len(self._known[1])
        if not numbers.numel() or (size == 1 and bits is None):
            return numbers
        if bits is None:
            with self._waiting("the mean with", self._known[1]):
                self._group.allreduce([numbers]).wait()
            return numbers / size
        payload = quantize(numbers, bits)
        if size == 1:  # rounded, too: what this leaves out is added to the next
            return mean_of([payload], numbers.numel(), bits)
        every = [torch.empty_like(payload) for _ in range(size)]
        with self._waiting("the mean with", self._known[1]):
            self._group.allgather([every], [payload]).wait()
        return mean_of(every, numbers.numel(), bits)

    def give(self, payload: torch.Tensor, to: Sequence[Seat]) -> None:
        """Send bytes to some members, which `take` them; their number first."""
        for seat in to:
            rank = self._known[1].index(seat)
            with self._waiting("sending state to", [seat]):
                self._group.send([torch.tensor([payload.numel()], device="cpu")], rank, 0).wait()
                self._group.send([payload], rank, 1).wait()

    def take(self, giver: Seat) -> torch.Tensor:
        """What `give` sends."""
        rank, count = self._known[1].index(giver), torch.zeros(1, dtype=torch.int64, device="cpu")
        with self._waiting("receiving the state of", [giver]):
            self._group.recv([count], rank, 0).wait()
            payload = torch.empty(int(count), dtype=torch.uint8, device="cpu")
            self._group.recv([payload], rank, 1).wait()
        return payload

    @contextmanager
    def _waiting(self, what: str, others: Sequence[Seat]) -> Iterator[None]:
        """Within, this rank waits for others, who are named where that fails: Gloo names addresses, or nobody.

        Raises:
            DistError: it does.
        """
        begun, own = time.monotonic(), self._known[1][self._rank]
        try:
            yield
        except RuntimeError as e:
            took = f"after {time.monotonic() - begun:.1f} s of {self._seconds:g}"
            raise dist.DistError(f"{what} {named(s for s in others if s != own)} failed {took}: {first_line(e)}") from e
