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


def product(x: torch.Tensor, w: torch.Tensor, scaling: str) -> torch.Tensor:
    """``x @ w.T`` of values of any number of dims."""
    y: torch.Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), w, scaling)
    return y.reshape(*x.shape[:-1], -1)


class TensorwiseLinear(nn.Linear):
    """With one scale of each operand."""

    scaling = "tensorwise"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = product(x, self.weight, self.scaling)
        return y if self.bias is None else y + self.bias


class RowwiseLinear(TensorwiseLinear):
    """With one scale of each row of what is summed over."""

    scaling = "rowwise"


class BlockLinear(TensorwiseLinear):
    """With one scale of every 32 numbers of such a row."""

    scaling = "mxfp8"


class _DelayedProduct(torch.autograd.Function):
    """``x @ w.T`` with the scales of a layer's history; what is largest now is noted, for later."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, layer: DelayedLinear) -> torch.Tensor:
        e4m3 = torch.float8_e4m3fn
        layer.note(0, x), layer.note(1, w)
        # As they are now: the backward pass may come when the history has moved on.
        ctx.by = layer.scales()
        ctx.layer, ctx.x, ctx.w = layer, by_scale(x, e4m3, ctx.by[0]), by_scale(w, e4m3, ctx.by[1])
        return (ctx.x @ ctx.w.T).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (g,) = gradients
        ctx.layer.note(2, g)
        rounded = by_scale(g, torch.float8_e5m2, ctx.by[2])
        return (rounded @ ctx.w).to(g.dtype), (rounded.T @ ctx.x).to(g.dtype), None


def by_scale(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor) -> torch.Tensor:
    """A matrix rounded to float8 by a scale that is given, as wide numbers; what is infinite becomes no number."""
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    values = (wide / scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype).to(wide.dtype) * scale
    return torch.where(wide.isinf(), torch.nan, values)


class DelayedLinear(nn.Linear):
    """With one scale of each operand, by what was largest in the last steps."""

    steps = 16

    def begin(self, steps: int) -> None:
        """No step yet; ``past`` has what was largest of values, weight and gradients in each step, the latest last."""
        self.steps, self.past, self.now = steps, [], [0.0, 0.0, 0.0]

    def note(self, row: int, x: torch.Tensor) -> None:
        self.now[row] = max(self.now[row], float(x.detach().abs().max()))

    def scales(self) -> list[torch.Tensor]:
        """Of values, weight and gradients."""
        largest = [max((p[row] for p in self.past[-self.steps :]), default=0.0) for row in range(3)]
        formats = (LARGEST[torch.float8_e4m3fn],) * 2 + (LARGEST[torch.float8_e5m2],)
        found = [a / f if a > 0 else 1.0 for a, f in zip(largest, formats, strict=True)]
        return [
            torch.tensor(s, dtype=torch.float64 if self.weight.dtype == torch.float64 else torch.float32) for s in found
        ]

    def end_step(self) -> None:
        self.past.append([a if a < float("inf") else 0.0 for a in self.now])
        self.now = [0.0, 0.0, 0.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = _DelayedProduct.apply(x.reshape(-1, x.shape[-1]), self.weight, self)
        y = y.reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


def delayed(model: nn.Module, steps: int = 16) -> nn.Module:
    """The model with each of its linear layers in float8 with delayed scaling, in place."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = DelayedLinear
            module.begin(steps)
    return model


def end_step(model: nn.Module) -> None:
    """What was noted since the last time becomes the latest step."""
    for module in model.modules():
        if isinstance(module, DelayedLinear):
            module.end_step()


def past(model: nn.Module) -> dict[str, torch.Tensor]:
    """Its histories as the buffers of `autopar.Float8`: the latest step first, and zero where there was none."""
    found = {}
    for layer in model.modules():
        if isinstance(layer, DelayedLinear):
            steps = [[0.0] * 3] * layer.steps + layer.past
            weight = next(n for n, p in model.named_parameters() if p is layer.weight)
            found[f"{weight}_amax_history"] = torch.tensor(steps[: -layer.steps - 1 : -1], dtype=torch.float64).T
    return found


LAYERS = {layer.scaling: layer for layer in (TensorwiseLinear, RowwiseLinear, BlockLinear)}


def in_float8(model: nn.Module, scaling: str) -> nn.Module:
    """The model with each of its linear layers in float8, in place."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = LAYERS[scaling]
    return model
