"""`PeakSnapshot`: what is live at the peak of a device, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LiveTensor:
    """Memory of an operator's results.

    Attributes:
        name: of the node; of a recomputed or re-gathered value, of the node that made it first.
        size: bytes.
        recomputed: whether the backward pass recomputes or re-gathers it.
        moved: whether it is the value in another layout than it was made in.
    """

    name: str
    size: float
    recomputed: bool = False
    moved: bool = False


@dataclass(frozen=True)
class PeakSnapshot:
    """What is live at the program point where a device holds the most.

    Attributes:
        held: bytes by category.
        tensors: what operators have made of it.
        totals: bytes of all categories at this and at the other program points, most first.
    """

    held: Mapping[str, float]
    tensors: tuple[LiveTensor, ...]
    totals: tuple[float, ...]
