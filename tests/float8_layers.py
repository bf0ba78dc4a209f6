"""Linear layers in float8 as anyone would write them in eager mode: the reference of `autopar.Float8`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def rounded(x: torch.Tensor, dtype: torch.dtype, dim: int | None) -> torch.Tensor:
    """A matrix rounded to float8, as wide numbers: with one scale, or one for each line along ``dim``."""
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    amax = wide.abs().max() if dim is None else wide.abs().amax(dim, keepdim=True)
    scale = amax.clamp(min=1e-12) / LARGEST[dtype]
    values = (wide / scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
    return values.to(wide.dtype) * scale


def in_blocks(x: torch.Tensor, dtype: torch.dtype, dim: int) -> torch.Tensor:
    """A matrix rounded to MXFP8, as wide numbers: every 32 numbers along ``dim`` share a power of two."""
    lines = x.to(torch.float64).transpose(dim, -1)
    parts = lines.reshape(lines.shape[0], -1, 32)
    exponents = (
        parts.abs().amax(-1, keepdim=True).log2().floor() - {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}[dtype]
    )
    scale = 2.0 ** exponents.clamp(-127, 127)
    values = (parts / scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype).to(torch.float64) * scale
    return (
        values.reshape(lines.shape).transpose(dim, -1).to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    )


class _Product(torch.autograd.Function):
    """``x @ w.T`` of matrices, of which all three products take float8 operands."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, scaling: str) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.round = in_blocks if scaling == "mxfp8" else rounded
        ctx.dims = (None, None) if scaling == "tensorwise" else (0, 1)
        e4m3, (_, along) = torch.float8_e4m3fn, ctx.dims
        return (ctx.round(x, e4m3, along) @ ctx.round(w, e4m3, along).T).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (g,), (x, w), (first, last) = gradients, ctx.saved_tensors, ctx.dims
        e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
        dx = ctx.round(g, e5m2, last) @ ctx.round(w, e4m3, first)
        dw = ctx.round(g, e5m2, first).T @ ctx.round(x, e4m3, first)
        return dx.to(x.dtype), dw.to(w.dtype), None


class TensorwiseLinear(nn.Linear):
    """With one scale of each operand."""

    scaling = "tensorwise"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = _Product.apply(x.reshape(-1, x.shape[-1]), self.weight, self.scaling)
        y = y.reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


class RowwiseLinear(TensorwiseLinear):
    """With one scale of each row of what is summed over."""

    scaling = "rowwise"


class BlockLinear(TensorwiseLinear):
    """With one scale of every 32 numbers of such a row."""

    scaling = "mxfp8"


LAYERS = {layer.scaling: layer for layer in (TensorwiseLinear, RowwiseLinear, BlockLinear)}


def in_float8(model: nn.Module, scaling: str) -> nn.Module:
    """The model with each of its linear layers in float8, in place."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = LAYERS[scaling]
    return model
