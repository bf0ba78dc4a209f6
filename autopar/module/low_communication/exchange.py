"""The mean over workers of a fragment's difference: sent at once, taken when it is wanted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from autopar.costs.collectives import wire_bytes
from autopar.costs.outer_exchange import exchange_kind, exchange_size
from autopar.ir.quantized.blocks import dequantize, mean_of, quantize


@dataclass
class InFlight:
    """A fragment whose difference has been sent.

    Attributes:
        fragment: its number.
        wait: the mean over the workers, once it is there.
    """

    fragment: int
    wait: Callable[[], torch.Tensor]


def fed_back(
    difference: torch.Tensor, left: torch.Tensor | None, bits: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is sent in place of a difference, so that nothing is left out for good, and what this leaves for the next.

    That is ``d + e``, and ``e = d + e - Q(d + e)``, ``Q`` being what arrives: D. Basu et al., "Qsparse-local-SGD:
    Distributed SGD with Quantization, Sparsification, and Local Computations", 2019, algorithm 1.

    Args:
        difference: d, of one dim.
        left: e; None: nothing yet.
        bits: of each number that is sent.
    """
    assert bits is not None
    whole = difference if left is None else difference + left
    if not whole.numel():
        return whole, whole
    return whole, whole - dequantize(quantize(whole, bits), whole.numel(), bits)


def emulated_mean(differences: list[torch.Tensor], bits: int | None) -> torch.Tensor:
    """The mean over workers of one process."""
    if bits is not None:
        return mean_of([quantize(d, bits) for d in differences], differences[0].numel(), bits)
    return torch.stack(differences).sum(0) / len(differences)


def send(fragment: int, difference: torch.Tensor, group: ProcessGroup, bits: int | None) -> InFlight:
    """Send a fragment's difference to the other workers, and go on.

    Args:
        fragment: its number.
        difference: of one dim; it may be overwritten.
        group: the ranks that hold the same shards.
        bits: of each number that is sent; None: all.
    """
    count, workers = difference.numel(), dist.get_world_size(group)
    if not count:  # of a pipeline's stage that has nothing of this fragment
        return InFlight(fragment, lambda: difference)
    if bits is None:
        reduced: Any = dist.all_reduce(difference, group=group, async_op=True)

        def mean() -> torch.Tensor:
            reduced.wait()
            return difference / workers

        return InFlight(fragment, mean)
    payload = quantize(difference, bits)
    every = payload.new_empty(workers * payload.numel())
    gathered: Any = dist.all_gather_into_tensor(every, payload, group=group, async_op=True)

    def decoded() -> torch.Tensor:
        gathered.wait()
        return mean_of(list(every.view(workers, -1).unbind()), count, bits)

    return InFlight(fragment, decoded)


def sent_bytes(elements: int, itemsize: int, workers: int, bits: int | None) -> int:
    """Bytes that a device sends in one exchange of so many numbers."""
    size = exchange_size(elements, itemsize, workers, bits)
    return int(wire_bytes(exchange_kind(bits), size, workers))
