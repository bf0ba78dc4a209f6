"""Batch norm over selected rows, by its formula: statistics are of these alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.capture.selected.by_rule import by_rule
from autopar.capture.selected.dims import Dims
from autopar.capture.selected.graph import AllRows, arguments

aten = torch.ops.aten

_CHANNELS = 1


def forward(rows: AllRows, node: fx.Node) -> None:
    """In training: ``(x - mean) * invstd * weight + bias``, the statistics, and running ones."""
    x, weight, bias, means, variances, training, momentum, eps = arguments(node)
    along = _along(rows, x)
    if not training or not along:
        by_rule(rows, node)
        return
    emit, dims = rows.emit, rows.dims_of(x)
    count = rows.count_of(x, along, x.meta["val"].dtype)
    mean = emit(aten.div.Tensor, _sum(rows, x, dims, along), count)
    centred = emit(aten.sub.Tensor, x, _shown(rows, mean, x))
    variance = emit(aten.div.Tensor, _sum(rows, emit(aten.mul.Tensor, centred, centred), dims, along), count)
    deviation = emit(aten.rsqrt.default, emit(aten.add.Scalar, variance, eps))
    output = emit(aten.mul.Tensor, centred, _shown(rows, deviation, x))
    if isinstance(weight, fx.Node):
        output = emit(aten.mul.Tensor, output, _shown(rows, weight, x))
    if isinstance(bias, fx.Node):
        output = emit(aten.add.Tensor, output, _shown(rows, bias, x))
    # The running variance is that of a sample.
    unbiased = emit(aten.div.Tensor, count, emit(aten.sub.Scalar, count, 1))
    spread = emit(aten.mul.Tensor, variance, unbiased)
    running = [_averaged(rows, old, new, momentum) for old, new in ((means, mean), (variances, spread))]
    whole = ((None,),) * 4
    rows.replace(node, [output, mean, deviation, *running], [dims, *whole])


def backward(rows: AllRows, node: fx.Node) -> None:
    """``weight * invstd * (g - mean(g) - y * mean(g * y))``, where ``y`` is without weight and bias."""
    grad, x, weight, means, variances, saved_mean, saved_deviation, training, eps, _ = arguments(node)
    along = _along(rows, x)
    if not along:
        by_rule(rows, node)
        return
    emit, dims = rows.emit, rows.dims_of(x)
    mean, deviation = saved_mean, saved_deviation
    if not training:
        mean = means
        deviation = emit(aten.rsqrt.default, emit(aten.add.Scalar, variances, eps))
    plain = emit(aten.sub.Tensor, x, _shown(rows, mean, x))
    plain = emit(aten.mul.Tensor, plain, _shown(rows, deviation, x))
    of_bias = _sum(rows, grad, dims, along)
    of_weight = _sum(rows, emit(aten.mul.Tensor, grad, plain), dims, along)
    found = grad
    if training:
        count = rows.count_of(x, along, x.meta["val"].dtype)
        found = emit(aten.sub.Tensor, found, _shown(rows, emit(aten.div.Tensor, of_bias, count), x))
        share = _shown(rows, emit(aten.div.Tensor, of_weight, count), x)
        found = emit(aten.sub.Tensor, found, emit(aten.mul.Tensor, plain, share))
    found = emit(aten.mul.Tensor, found, _shown(rows, deviation, x))
    if isinstance(weight, fx.Node):
        found = emit(aten.mul.Tensor, found, _shown(rows, weight, x))
    rows.replace(node, [found, of_weight, of_bias], [dims, (None,), (None,)])


def _along(rows: AllRows, x: fx.Node) -> list[int]:
    """The dims of the statistics; none if all of their elements are there."""
    dims, value = rows.dims_of(x), x.meta["val"]
    along = [d for d in range(value.ndim) if d != _CHANNELS]
    if all(dims[d] is None for d in along):
        return []
    if dims[_CHANNELS] is not None:
        rows.refuse("it normalizes by channels, of which a mask selects some")
    if value.dtype not in (torch.float32, torch.float64):
        rows.refuse(f"its statistics are of {value.dtype}: compute it in float32")
    return along


def _sum(rows: AllRows, x: fx.Node, dims: Dims, along: list[int]) -> fx.Node:
    rows.dims[x] = dims
    return rows.emit(aten.sum.dim_IntList, rows.filled(x, 0, along), along)


def _shown(rows: AllRows, own: Any, x: fx.Node) -> fx.Node:
    """One number a channel, in the dims of ``x``."""
    return rows.emit(aten.reshape.default, own, [-1 if d == _CHANNELS else 1 for d in range(x.meta["val"].ndim)])


def _averaged(rows: AllRows, old: Any, new: fx.Node, momentum: Any) -> Any:
    if not isinstance(old, fx.Node):
        return None
    kept = rows.emit(aten.mul.Scalar, old, 1 - momentum)
    return rows.emit(aten.add.Tensor, kept, rows.emit(aten.mul.Scalar, new, momentum))
