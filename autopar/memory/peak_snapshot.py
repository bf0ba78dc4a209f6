"""`PeakSnapshot`: the moment when a device holds the most, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LiveTensor:
    """Memory that an operator's results take.

    Attributes:
        name: of the node; of a recomputed or re-gathered value, of the node that made it first.
        size: bytes.
        again: whether the backward pass recomputes or re-gathers it.
        moved: whether it is the value in another layout than it was made in.
    """

    name: str
    size: float
    again: bool = False
    moved: bool = False


@dataclass(frozen=True)
class PeakSnapshot:
    """The moment when most is held.

    Attributes:
        held: bytes by category.
        tensors: what operators made of it.
        totals: bytes of all categories, then and at the other moments, most first.
    """

    held: Mapping[str, float]
    tensors: tuple[LiveTensor, ...]
    totals: tuple[float, ...]
