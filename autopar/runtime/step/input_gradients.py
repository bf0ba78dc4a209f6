"""Gradients of batch tensors: the output of another network, or what is itself trained."""

from __future__ import annotations

from collections.abc import Sequence

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

InputForm = Placements | str
"""How the user passed a batch tensor: a DTensor's placements, or of a plain tensor ``global`` (whole) or ``local``."""


def as_passed(
    local: torch.Tensor, form: InputForm, known: tuple[TensorType, Layout], context: MeshContext
) -> torch.Tensor:
    """A local gradient in the form of its tensor; a collective call unless the step computes on that form.

    Args:
        local: this rank's block.
        form: how the tensor was passed.
        known: type and layout of the block.
        context: this rank's mesh context.
    """
    type_, layout = known
    local = stored(local, type_, layout, context.coordinates)
    if context.mesh is None or form == "local":
        return local
    gradient = from_local(local, context, type_.stored_shape, to_placements(type_, layout))
    if isinstance(form, str):
        return full_tensor(gradient)
    # Each term of a sum has the gradient of the sum: of a partial tensor it is replicated.
    return redistribute(gradient, context, tuple(Replicate() if isinstance(p, TorchPartial) else p for p in form))


def input_forms(tensors: Sequence[torch.Tensor], differentiable: frozenset[int], inputs: str) -> dict[str, InputForm]:
    """The form of each batch tensor that requires a gradient, by its number, in order; ``inputs``: of plain ones."""
    return {
        str(i): tuple(t.placements) if isinstance(t, DTensor) else inputs
        for i, t in enumerate(tensors)
        if i in differentiable
    }


def requiring_gradients(tensors: Sequence[torch.Tensor]) -> frozenset[int]:
    """Which tensors of a batch require a gradient, where gradients are computed at all."""
    # Under no_grad the flag stays set on the tensors, but no graph with these gradients must be captured.
    return frozenset(i for i, t in enumerate(tensors) if t.requires_grad and torch.is_grad_enabled())
