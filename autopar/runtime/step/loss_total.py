"""A loss that a function makes of a model's scalars: the user computes it again outside, and calls ``backward`` there.

The graph computes the gradient of the loss. What arrives at the scalars must be a multiple of the function's own
gradient with respect to them, and that multiple is what the graph's gradients are scaled by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from autopar.errors import AutoparError
from autopar.ir.signature import pytree
from autopar.ir.signature.outputs import Total


@dataclass(frozen=True)
class Made:
    """A loss made of results.

    Attributes:
        total: what makes it.
        slopes: its derivatives with respect to ``total.parts``, when they are asked for.
    """

    total: Total
    slopes: Callable[[], list[torch.Tensor]]


def attached(loss: torch.Tensor, results: Sequence[torch.Tensor], skeleton: Any, total: Total) -> list[torch.Tensor]:
    """The scalars that a loss is made of, such that their gradients go to it.

    Args:
        loss: as the graph computes it, with gradients.
        results: of the model.
        skeleton: of its output.
        total: what makes the loss.
    """
    values = [r.detach() for r in results]

    def slopes() -> list[torch.Tensor]:
        with torch.enable_grad():
            own = list(values)
            parts = [values[i].clone().requires_grad_() for i in total.parts]
            for i, part in zip(total.parts, parts, strict=True):
                own[i] = part
            made = total.function(pytree.unflatten(skeleton, own))
            return list(torch.autograd.grad(made, parts, allow_unused=True, materialize_grads=True))

    apply: Any = _Parts.apply
    return list(apply(loss, Made(total, slopes), *(values[i] for i in total.parts)))


class _Parts(torch.autograd.Function):
    """Scalars whose gradients are one gradient of the loss."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, made: Made, *parts: torch.Tensor) -> Any:
        ctx.made, ctx.dtype = made, loss.dtype
        ctx.set_materialize_grads(False)
        return tuple(p.clone() for p in parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        slopes = torch.stack([s.double() for s in ctx.made.slopes()])
        pairs = zip(gradients, slopes, strict=True)
        given = torch.stack([s.new_zeros(()) if g is None else g.double() for g, s in pairs])
        epsilon = max(torch.finfo(g.dtype).eps for g in gradients if g is not None)
        scale = _multiple(given, slopes, 16 * epsilon)
        if scale is None:
            raise AutoparError(
                f"gradients {given.tolist()} arrive at the scalars of which the function loss= makes the loss, and its "
                f"own are {slopes.tolist()}: only a multiple of that loss has a gradient. Call backward() on what that "
                "function computes, or leave loss= out: then every scalar carries its own gradient"
            )
        return scale.to(ctx.dtype), None, *([None] * len(gradients))


def _multiple(given: torch.Tensor, slopes: torch.Tensor, tolerance: float) -> torch.Tensor | None:
    """Which multiple of the slopes is given; None: it is none. An overflow of a scaled loss is one, too."""
    if not slopes.any():
        return None if given.any() else slopes.new_ones(())
    scale = (given * slopes).sum() / slopes.square().sum()
    near = (given - scale * slopes).abs() <= tolerance * given.abs().max()
    return scale if bool(near.all()) or not bool(given.isfinite().all() and slopes.isfinite().all()) else None
