"""Gradients of batch tensors: what another network made, or what is itself trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Partial as TorchPartial

from autopar.ir.layout import Layout, TensorType
from autopar.runtime.dtensor import (
    Placements,
    from_local,
    full_tensor,
    redistribute,
    stored,
    to_placements,
)
from autopar.runtime.mesh import MeshContext


class Gradients(NamedTuple):
    """What a backward pass makes, on this rank.

    Attributes:
        parameters: local gradients by parameter name.
        batch: local gradients by number of batch tensor.
    """

    parameters: dict[str, torch.Tensor]
    batch: Mapping[str, torch.Tensor] = {}


@dataclass(frozen=True)
class Origin:
    """How the user passed a batch tensor that requires a gradient.

    Attributes:
        name: its number, as text.
        placements: of a DTensor; None for a plain tensor.
        whole: all of it, not this rank's part.
    """

    name: str
    placements: Placements | None
    whole: bool

    def gradient(self, local: torch.Tensor, known: tuple[TensorType, Layout], place: MeshContext) -> torch.Tensor:
        """A local gradient in the form in which the tensor was passed; a collective call where that is another."""
        type_, layout = known
        local = stored(local, type_, layout, place.coordinates)
        if place.mesh is None or not self.whole:
            return local
        found = from_local(local, place, type_.stored_shape, to_placements(type_, layout))
        if self.placements is None:
            return full_tensor(found)
        # Terms of a sum have, each, the gradient of the sum.
        return redistribute(
            found, place, tuple(Replicate() if isinstance(p, TorchPartial) else p for p in self.placements)
        )


def origins(tensors: Sequence[torch.Tensor], differentiable: frozenset[int], inputs: str) -> tuple[Origin, ...]:
    """Of the batch tensors that require a gradient, in order."""
    return tuple(
        Origin(str(i), tuple(t.placements), True)
        if isinstance(t, DTensor)
        else Origin(str(i), None, inputs == "global")
        for i, t in enumerate(tensors)
        if i in differentiable
    )


def requiring_gradients(tensors: Sequence[torch.Tensor]) -> frozenset[int]:
    """Which tensors of a batch require a gradient, where gradients are computed at all."""
    return frozenset(i for i, t in enumerate(tensors) if t.requires_grad and torch.is_grad_enabled())
