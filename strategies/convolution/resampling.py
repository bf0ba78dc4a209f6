"""Images that are enlarged, made smaller, padded with what they have, or whose channels become pixels."""

import math
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from autopar.rules.rule import Rule, Spec, dims, letters, rule

aten = torch.ops.aten


def _planes(x: Spec, spatial: int) -> tuple[str, str, str, str]:
    """The plane before and after, and the spatial letters of both."""
    names = letters(x.ndim)
    # A window may reach into the next block, so positions are not split; samples and channels are free.
    free = names[: x.ndim - spatial]
    after = letters(spatial, x.ndim)
    return names, free + after, names[len(free) :], after


def _backward(spatial: int) -> Callable[..., Rule]:
    def backward(grad: Spec, x: Spec, *_: Any) -> Rule:
        before, after, inside, outside = _planes(x, spatial)
        return Rule(f"{after},{before}->{before}", blocked=inside + outside, linear=((0,),))

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


RESAMPLING = {
    1: ("upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_linear1d"),
    2: ("upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d", "upsample_bicubic2d"),
    3: ("upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_trilinear3d"),
}
"""By number of spatial dims: the operators of `torch.nn.functional.interpolate`."""


@lru_cache(256)
def _repeats(name: str, size: int, out: int, scale: float | None) -> bool:
    """Whether each element of a dim is repeated, all of them as often.

    Kernels multiply positions by a float: at some sizes they take another element, of a block and of the whole.
    """
    if not size or out % size:
        return False
    half, step = 0.5 if "exact" in name else 0.0, 1 / scale if scale else size / out
    return all(
        math.floor(rounded((i + half) * rounded(step))) == i // (out // size)
        for rounded in (float, _single)
        for i in range(out)
    )


def _single(value: float) -> float:
    """The nearest number in float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _nearest_rule(
    name: str, before: Sequence[int], after: Sequence[int], scales: Sequence[float | None], backward: bool
) -> Rule:
    """Dims that are repeated are ``x`` and ``(xu)``, and free in x; others are whole."""
    ndim, spatial = len(before), len(after)
    names, others = letters(ndim), letters(spatial, ndim)
    right, blocked, counts, own = list(names), others, dict[str, int](), list[str]()
    for i, (size, out, other) in enumerate(zip(before[-spatial:], after, others, strict=True)):
        d = ndim - spatial + i
        if _repeats(name, size, out, scales[i] if i < len(scales) else None):
            right[d], counts[other] = names[d] + other, out // size
        else:
            right[d], blocked = other, blocked + names[d]
        own.append(names[d] if other in counts else "")
    options: dict[str, Any] = {"blocked": blocked, "linear": ((0,),), "scaled": {1: tuple(own)}, "sizes": counts}
    if backward:
        return Rule(f"{dims(right)}->{names}", shapes=(2,), **options)
    return Rule(f"{names}->{dims(right)}", **options)


def _nearest(name: str) -> Callable[..., Rule]:
    def forward(x: Spec, output_size: Sequence[int], *scales: float | None) -> Rule:
        return _nearest_rule(name, x.shape, output_size, scales, backward=False)

    return forward


def _nearest_backward(name: str) -> Callable[..., Rule]:
    def backward(grad: Spec, output_size: Sequence[int], input_size: Sequence[int], *scales: float | None) -> Rule:
        return _nearest_rule(name, input_size, output_size, scales, backward=True)

    return backward


for _n, _names in RESAMPLING.items():
    for _name in _names:
        _near = "nearest" in _name
        rule(getattr(aten, _name).default)(_nearest(_name) if _near else _linear_forward(_n))
        rule(getattr(aten, f"{_name}_backward").default)(_nearest_backward(_name) if _near else _resample_backward(_n))

for _kind in ("reflection", "replication"):
    for _n in (1, 2, 3):
        rule(getattr(aten, f"{_kind}_pad{_n}d").default)(_linear_forward(_n))
        rule(getattr(aten, f"{_kind}_pad{_n}d_backward").default)(_backward(_n))


@rule(aten.pixel_shuffle.default)
def pixel_shuffle(x: Spec, r: int) -> Rule:
    """Channels in groups of ``r * r`` become pixels."""
    names = letters(x.ndim - 3, 10)  # from k on: c, h, w, u and v have a meaning here
    sizes = {"u": r, "v": r}
    return Rule(f"{names}(cuv)hw->{names}c(hu)(wv)", blocked="uv", linear=((0,),), sizes=sizes)


@rule(aten.pixel_unshuffle.default)
def pixel_unshuffle(x: Spec, r: int) -> Rule:
    """Pixels of each ``r`` by ``r`` square become channels."""
    names = letters(x.ndim - 3, 10)
    sizes = {"u": r, "v": r}
    return Rule(f"{names}c(hu)(wv)->{names}(cuv)hw", blocked="uv", linear=((0,),), sizes=sizes)
