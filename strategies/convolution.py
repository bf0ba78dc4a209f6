"""Convolution, pooling and resampling, forward and backward: batch, groups, channels, and whole patches.

Where the kernel is as large as the stride and nothing is padded (1x1 convolutions, patch embeddings), every output
reads a patch of its own: the spatial dims are ``(Xu)`` and free in X.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.rules.rule import Rule, Spec, dims, letters, rule

aten = torch.ops.aten

INSIDE, KERNEL, OUTSIDE = "xyz", "uvw", "XYZ"


def _spatial(x: Spec, weight: Spec, args: Sequence[Any]) -> tuple[list[str], list[str], list[str], str]:
    """Letters of the spatial dims of input, weight and output, and which of them are blocked."""
    stride, padding, dilation, transposed, output_padding, _ = args
    small = INSIDE if transposed else OUTSIDE
    sides: tuple[list[str], list[str], list[str]] = ([], [], [])
    blocked = ""
    for i, size in enumerate(x.shape[2:]):
        k = weight.shape[2 + i]
        # Each output reads a patch of its own, so that positions may be split like samples.
        patches = (
            k == _at(stride, i)
            and _at(padding, i) == 0
            and (_at(dilation, i) == 1 or k == 1)
            and _at(output_padding, i) == 0
            and (transposed or size % k == 0)
        )
        if patches:
            fine, coarse = small[i] + KERNEL[i], small[i]
            sides[0].append(coarse if transposed else fine)
            sides[2].append(fine if transposed else coarse)
            blocked += KERNEL[i]
        else:
            sides[0].append(INSIDE[i])
            sides[2].append(OUTSIDE[i])
            blocked += INSIDE[i] + KERNEL[i] + OUTSIDE[i]
        sides[1].append(KERNEL[i])
    return *sides, blocked


def _at(sizes: Sequence[int], i: int) -> int:
    return sizes[i] if len(sizes) > 1 else sizes[0]


def _tensors(x: Spec, weight: Spec, args: Sequence[Any]) -> tuple[str, str, str, str]:
    """Equations of input, weight and output, and the blocked letters."""
    inside, kernel, outside, blocked = _spatial(x, weight, args)
    # A transposed convolution's weight has input channels first.
    first = ["gi", "o"] if args[3] else ["go", "i"]
    return dims(["n", "gi", *inside]), dims([*first, *kernel]), dims(["n", "go", *outside]), blocked


def _flops(x: Spec, weight: Spec, args: Sequence[Any]) -> float:
    """Two operations for each weight, sample and position (of the input where transposed, else of the output)."""
    count = 2.0 * x.shape[0] * math.prod(weight.shape)
    for i in range(x.ndim - 2):
        s, p, d = _at(args[0], i), _at(args[1], i), _at(args[2], i)
        positions = x.shape[2 + i]
        count *= positions if args[3] else (positions + 2 * p - d * (weight.shape[2 + i] - 1) - 1) // s + 1
    return count


@rule(aten.convolution.default)
def convolution(x: Spec, weight: Spec, bias: Spec | None, *args: Any) -> Rule:
    """Convolution; ``args``: stride, padding, dilation, transposed, output padding, groups."""
    a, b, c, blocked = _tensors(x, weight, args)
    # A bias is added once: terms over input channels would each add it. So ``i`` is summed over only without one.
    plain = bias is None
    return Rule(
        f"{a},{b}->{c}" if plain else f"{a},{b},(go)->{c}",
        reduce="i" if plain else "",
        blocked=blocked + ("" if plain else "i"),
        linear=((0,), (1,)) if plain else ((0, 2), (1, 2)),
        scaled={8: "g"},
        sizes={"g": args[5]},
        flops=_flops(x, weight, args),
    )


@rule(aten.convolution_backward.default)
def convolution_backward(grad: Spec, x: Spec, weight: Spec, bias_sizes: Sequence[int] | None, *args: Any) -> Rule:
    """Gradients of input, weight and bias; ``args`` as of the convolution, and the output mask."""
    a, b, c, blocked = _tensors(x, weight, args[:6])
    # The output mask leaves out gradients that nobody asks for.
    outputs = ",".join(t if wanted else "_" for t, wanted in zip((a, b, "(go)"), args[6], strict=True))
    return Rule(
        f"{c},{a},{b}->{outputs}",
        # The weight's gradient sums over samples and positions, and the input's over output channels.
        reduce="noXYZ" if not args[3] else "noxyz",
        keep="i",
        blocked=blocked,
        linear=((0,),),
        scaled={9: "g"} if bias_sizes is None else {3: "go", 9: "g"},
        sizes={"g": args[5]},
        flops=2.0 * _flops(x, weight, args[:6]),
    )


def _planes(x: Spec, spatial: int) -> tuple[str, str, str, str]:
    """The plane before and after, and the spatial letters of both."""
    names = letters(x.ndim)
    # A window may reach into the next block, so positions are not split; samples and channels are free.
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
        # Max pooling saves where each maximum was: numbers within the plane, which is whole.
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
