"""Pooling and resampling: samples and channels are free, the spatial dims are not split."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.strategy import Rule, Spec, letters, rule

aten = torch.ops.aten


def _planes(x: Spec, spatial: int) -> tuple[str, str, str, str]:
    """The plane before and after, and the spatial letters of both."""
    names = letters(x.ndim)
    free = names[: x.ndim - spatial]
    after = letters(spatial, x.ndim)
    return names, free + after, names[len(free) :], after


def _forward(spatial: int, outputs: int = 1) -> Callable[..., Rule]:
    def forward(x: Spec, *_: Any) -> Rule:
        before, after, inside, outside = _planes(x, spatial)
        return Rule(f"{before}->{','.join([after] * outputs)}", blocked=inside + outside)

    return forward


def _backward(spatial: int) -> Callable[..., Rule]:
    def backward(grad: Spec, x: Spec, *rest: Any) -> Rule:
        before, after, inside, outside = _planes(x, spatial)
        indices = [after for t in rest if isinstance(t, Spec)]
        return Rule(f"{','.join([after, before, *indices])}->{before}", blocked=inside + outside, linear=((0,),))

    return backward


def _resample_backward(spatial: int) -> Callable[..., Rule]:
    def backward(grad: Spec, output_size: Sequence[int], input_size: Sequence[int], *_: Any) -> Rule:
        before, after, inside, outside = _planes(grad, spatial)
        return Rule(f"{before}->{after}", blocked=inside + outside, linear=((0,),), shapes=(2,))

    return backward


def _linear_forward(spatial: int) -> Callable[..., Rule]:
    def forward(x: Spec, *_: Any) -> Rule:
        before, after, inside, outside = _planes(x, spatial)
        return Rule(f"{before}->{after}", blocked=inside + outside, linear=((0,),))

    return forward


for _op in (aten.max_pool2d_with_indices, aten.max_pool3d_with_indices):
    rule(_op.default)(_forward(3 if "3d" in str(_op) else 2, outputs=2))
for _op in (aten.max_pool2d_with_indices_backward, aten.max_pool3d_with_indices_backward):
    rule(_op.default)(_backward(3 if "3d" in str(_op) else 2))

rule(aten.avg_pool2d.default, aten._adaptive_avg_pool2d.default)(_linear_forward(2))
rule(aten.avg_pool2d_backward.default, aten._adaptive_avg_pool2d_backward.default)(_backward(2))
rule(aten.avg_pool3d.default, aten._adaptive_avg_pool3d.default)(_linear_forward(3))
rule(aten.avg_pool3d_backward.default, aten._adaptive_avg_pool3d_backward.default)(_backward(3))

for _op in (aten.upsample_nearest2d, aten.upsample_bilinear2d, aten.upsample_bicubic2d):
    rule(_op.default, _op.vec)(_linear_forward(2))
for _op in (aten.upsample_nearest2d_backward, aten.upsample_bilinear2d_backward, aten.upsample_bicubic2d_backward):
    rule(_op.default)(_resample_backward(2))

for _kind in ("reflection", "replication"):
    for _n in (1, 2, 3):
        rule(getattr(aten, f"{_kind}_pad{_n}d").default)(_linear_forward(_n))
        rule(getattr(aten, f"{_kind}_pad{_n}d_backward").default)(_backward(_n))
