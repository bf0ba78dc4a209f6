"""A loss that a function computes from a model's scalars: the user computes it, too, and calls ``backward`` on that.

The graph computes the gradient of the loss. The gradients that arrive at the scalars must be a multiple of the
function's own gradient with respect to them: the multiple that the graph's gradients are scaled by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from autopar.errors import AutoparError
from autopar.ir.signature import pytree
from autopar.ir.signature.outputs import Total


def attached(loss: torch.Tensor, results: Sequence[torch.Tensor], skeleton: Any, total: Total) -> list[torch.Tensor]:
    """The scalars that a loss is computed from, connected so that their gradients become one gradient of the loss.

    Args:
        loss: as the graph computes it, with gradients.
        results: of the model.
        skeleton: of its output.
        total: the function that computes the loss, and the numbers of the scalars that it takes.
    """
    values = [r.detach() for r in results]

    def derivatives() -> list[torch.Tensor]:
        """Of the loss with respect to each of the scalars."""
        # Only in the backward pass, which most evaluations never reach.
        with torch.enable_grad():
            own = list(values)
            parts = [values[i].clone().requires_grad_() for i in total.parts]
            for i, part in zip(total.parts, parts, strict=True):
                own[i] = part
            value = total.function(pytree.unflatten(skeleton, own))
            return list(torch.autograd.grad(value, parts, allow_unused=True, materialize_grads=True))

    apply: Any = _Parts.apply
    return list(apply(loss, derivatives, *(values[i] for i in total.parts)))


class _Parts(torch.autograd.Function):
    """Scalars whose gradients become one gradient of the loss."""

    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, derivatives: Callable[[], list[torch.Tensor]], *parts: torch.Tensor
    ) -> Any:
        ctx.derivatives, ctx.dtype = derivatives, loss.dtype
        ctx.set_materialize_grads(False)
        return tuple(p.clone() for p in parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        own = torch.stack([d.double() for d in ctx.derivatives()])
        pairs = zip(gradients, own, strict=True)
        incoming = torch.stack([d.new_zeros(()) if g is None else g.double() for g, d in pairs])
        # Both are computed by the user's function, in the precision of the scalars: equal up to a few roundings.
        epsilon = max(torch.finfo(g.dtype).eps for g in gradients if g is not None)
        scale = _multiple(incoming, own, 16 * epsilon)
        if scale is None:
            raise AutoparError(
                f"gradients {incoming.tolist()} arrive at the scalars of which the function loss= makes the loss, and "
                f"its own are {own.tolist()}: only a multiple of that loss has a gradient. Call backward() on what "
                "that function computes, or leave loss= out: then every scalar carries its own gradient"
            )
        return scale.to(ctx.dtype), None, *([None] * len(gradients))


def _multiple(incoming: torch.Tensor, own: torch.Tensor, tolerance: float) -> torch.Tensor | None:
    """The factor by which ``own`` is scaled in ``incoming``; None: it is no multiple.

    Infinite or undefined values pass: a loss scaled by a GradScaler may overflow, which the scaler then handles.
    """
    if not own.any():
        return None if incoming.any() else own.new_ones(())
    # Least squares: the factor of the closest multiple.
    scale = (incoming * own).sum() / own.square().sum()
    near = (incoming - scale * own).abs() <= tolerance * incoming.abs().max()
    return scale if bool(near.all()) or not bool(incoming.isfinite().all() and own.isfinite().all()) else None
