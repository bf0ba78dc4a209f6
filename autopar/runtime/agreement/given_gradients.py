"""`GivenGradients`: the gradients of outputs that ranks are given, compared in the first backward pass of a step.

The loss is one of the whole batch. Where a rank goes on from it in its own way (another scale, labels of its own), its
shards get gradients of another loss than those of other ranks, and the parameters those of none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import RankError
from autopar.runtime.mesh import MeshContext

TOLERANCE = 1e-3
"""By how much of a gradient's norm ranks may differ: kernels of other devices round otherwise."""

PART = 2**20
"""Numbers that are looked at together."""

Figures = tuple[float, float]
"""A gradient's norm, and a sum that tells apart where in the tensor it lies."""


@dataclass
class GivenGradients:
    """Of one step.

    Attributes:
        seen: by output.
        compared: whether ranks have compared them.
    """

    seen: dict[str, Figures] = field(default_factory=dict)
    compared: bool = False

    def note(self, output: str, gradient: torch.Tensor) -> None:
        """Remember a gradient that is the same on every rank; of one in shards nothing can be said."""
        if isinstance(gradient, DTensor):
            if not all(p.is_replicate() for p in gradient.placements):
                return
            gradient = gradient.to_local()
        if not self.compared:
            self.seen[output] = _figures(gradient.detach())

    def compare(self, what: str, context: MeshContext) -> None:
        """Compare them, once; every rank does.

        Raises:
            RankError: they differ.
        """
        if self.compared:
            return
        self.compared = True
        every = context.gather(self.seen, "the gradients of outputs")
        self.seen = {}
        for rank, given in enumerate(every):
            for output in every[0] | given:
                own, first = given.get(output), every[0].get(output)
                if not _alike(own, first):
                    raise RankError(
                        f"{what}: the gradient of {output} differs: rank {rank} has {_said(own)}, rank 0 has "
                        f"{_said(first)}. The loss is one of the whole batch: compute the same from it on every rank, "
                        "with the same scale and with labels and weights of the whole batch"
                    )


def _figures(gradient: torch.Tensor) -> Figures:
    flat = (torch.view_as_real(gradient) if gradient.is_complex() else gradient).reshape(-1)
    total = torch.zeros(2, dtype=torch.float64, device=flat.device)
    # Logits may be as large as the model: not all of them in float64 at a time.
    for i, part in enumerate(torch.split(flat, PART)):
        places = torch.arange(i * PART, i * PART + len(part), dtype=torch.float64, device=flat.device)
        part = part.double()
        total += torch.stack([part.square().sum(), (part * (0.5 + places / flat.numel())).sum()])
    squares, weighted = total.tolist()
    return squares**0.5, weighted / max(1, flat.numel()) ** 0.5


def _alike(a: Figures | None, b: Figures | None) -> bool:
    if a is None or b is None:
        return a is b
    # Where a step has overflowed, it is left out on every rank.
    if not all(map(math.isfinite, (*a, *b))):
        return math.isfinite(a[0]) == math.isfinite(b[0])
    return max(abs(x - y) for x, y in zip(a, b, strict=True)) <= TOLERANCE * max(a[0], b[0])


def _said(figures: Figures | None) -> str:
    return "none" if figures is None else f"one of norm {figures[0]:.6g} ({figures[1]:.6g} weighted by place)"
