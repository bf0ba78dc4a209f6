"""Layer, RMS and group normalization, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from autopar.rules.rule import ANY, ROW_MAJOR, Lowering, Rule, Spec, letters, rule

aten = torch.ops.aten


def _rows(x: Spec, normalized_shape: Sequence[int]) -> tuple[str, str, str]:
    """Letters of the free dims, of the normalized ones, and the equation of a statistic."""
    names = letters(x.ndim)
    # Statistics are of each row: rows are free, and a row is whole.
    free, inner = names[: x.ndim - len(normalized_shape)], names[x.ndim - len(normalized_shape) :]
    return free, inner, free + "1" * len(inner)


def _present(*tensors: Spec | None) -> int:
    return sum(t is not None for t in tensors)


@rule(aten.native_layer_norm.default)
def layer_norm(x: Spec, normalized_shape: Sequence[int], weight: Spec | None, bias: Spec | None, eps: float) -> Rule:
    """Each row less its mean, over its deviation; mean and reciprocal deviation are outputs too."""
    free, inner, statistic = _rows(x, normalized_shape)
    inputs = [free + inner, *[inner] * _present(weight, bias)]
    return Rule(f"{','.join(inputs)}->{free + inner},{statistic},{statistic}", blocked=inner)


@rule(aten.native_layer_norm_backward.default)
def layer_norm_backward(
    grad: Spec,
    x: Spec,
    normalized_shape: Sequence[int],
    mean: Spec,
    rstd: Spec,
    weight: Spec | None,
    bias: Spec | None,
    output_mask: Sequence[bool],
) -> Rule:
    """Gradients of input, weight and bias; the last two are sums over rows."""
    free, inner, statistic = _rows(x, normalized_shape)
    inputs = [free + inner] * 2 + [statistic] * 2 + [inner] * _present(weight, bias)
    outputs = _masked([free + inner, inner, inner], output_mask)
    strides = (ROW_MAJOR,) * 4
    return Rule(f"{','.join(inputs)}->{outputs}", reduce=free, blocked=inner, linear=((0,),), strides=strides)


def _masked(outputs: Sequence[str], mask: Sequence[bool]) -> str:
    return ",".join(text if wanted else "_" for text, wanted in zip(outputs, mask, strict=True))


@rule(aten._fused_rms_norm.default)
def rms_norm(x: Spec, normalized_shape: Sequence[int], weight: Spec | None, eps: float | None) -> Rule:
    """Each row over its root mean square, the reciprocal of which is an output too."""
    free, inner, statistic = _rows(x, normalized_shape)
    inputs = [free + inner, *[inner] * _present(weight)]
    return Rule(f"{','.join(inputs)}->{free + inner},{statistic}", blocked=inner)


@rule(aten._fused_rms_norm_backward.default)
def rms_norm_backward(
    grad: Spec, x: Spec, normalized_shape: Sequence[int], rstd: Spec, weight: Spec | None, output_mask: Sequence[bool]
) -> Rule:
    """Gradients of input and weight; the latter is a sum over rows."""
    free, inner, statistic = _rows(x, normalized_shape)
    inputs = [free + inner] * 2 + [statistic] + [inner] * _present(weight)
    outputs = _masked([free + inner, inner], output_mask)
    strides = (ROW_MAJOR,) * 3
    return Rule(f"{','.join(inputs)}->{outputs}", reduce=free, blocked=inner, linear=((0,),), strides=strides)


def _grouped(x: Spec) -> tuple[str, str]:
    """A batch of channels in groups, ``n(gc)xy``, and its spatial letters."""
    # Letters from u on: n, g and c have meanings in the equation.
    spatial = letters(x.ndim - 2, letters(52).index("u"))
    return f"n(gc){spatial}", spatial


def _within_groups(x: Spec, spatial: str, build: Any) -> tuple[str, dict[str, Lowering]]:
    """What groups are normalized over and cannot be split, and what may be by other code, all of it together."""
    within = "c" + spatial
    return ("", dict.fromkeys(within, Lowering(build, anywhere=True))) if math.prod(x.shape) else (within, {})


@rule(aten.native_group_norm.default)
def group_norm(x: Spec, weight: Spec | None, bias: Spec | None, *sizes: Any) -> Rule:
    """Each group of channels of each sample normalized; ``sizes`` are N, C, HxW, groups, eps."""
    whole, spatial = _grouped(x)
    inputs = [whole, *["(gc)"] * _present(weight, bias)]
    blocked, lower = _within_groups(x, spatial, partial(_group_norm, x, weight))
    return Rule(
        f"{','.join(inputs)}->{whole},ng,ng",
        blocked=blocked,
        keep="nc" + spatial,
        lower=lower,
        scaled={3: "n", 4: "gc", 5: spatial, 6: "g"},
        sizes={"g": sizes[3]},
        strides=ROW_MAJOR,
    )


@rule(aten.native_group_norm_backward.default)
def group_norm_backward(grad: Spec, x: Spec, mean: Spec, rstd: Spec, weight: Spec | None, *sizes: Any) -> Rule:
    """Gradients of input, weight and bias; ``sizes`` are N, C, HxW, groups, output mask."""
    whole, spatial = _grouped(x)
    inputs = [whole, whole, "ng", "ng", *["(gc)"] * _present(weight)]
    blocked, lower = _within_groups(x, spatial, partial(_group_norm_backward, x, weight, sizes[3]))
    return Rule(
        f"{','.join(inputs)}->{_masked([whole, '(gc)', '(gc)'], sizes[4])}",
        blocked=blocked,
        reduce="n" + spatial,
        linear=((0,),),
        lower=lower,
        scaled={5: "n", 6: "gc", 7: spatial, 8: "g"},
        sizes={"g": sizes[3]},
        strides=ROW_MAJOR,
    )


# Builders of group norm's lowerings. ``spec``, ``gamma`` and ``all_groups`` are of the whole call; sizes are local.


def _positions(spec: Spec, x: Any) -> Any:
    """``[N, C, ...]`` summed to ``[N, C]``."""
    return aten.sum.dim_IntList(x, list(range(2, spec.ndim)), False) if spec.ndim > 2 else x


def _of_group(n: int, groups: int, channels: Any) -> Any:
    """``[N, C]`` summed to ``[N, groups]``."""
    return aten.sum.dim_IntList(aten.reshape.default(channels, [n, groups, -1]), [2], False)


def _to_channels(n: int, c: int, groups: int, numbers: Any) -> Any:
    """A group's number for each of its channels, ``[N, C]``."""
    each = aten.expand.default(aten.reshape.default(numbers, [n, groups, 1]), [n, groups, c // groups])
    return aten.reshape.default(each, [n, c])


def _along(spec: Spec, channels: Any, n: int) -> Any:
    """``[N, C]`` in a shape that broadcasts."""
    return aten.reshape.default(channels, [n, -1, *[1] * (spec.ndim - 2)])


def _as(dtype: Any, x: Any) -> Any:
    return aten._to_copy.default(x, dtype=dtype)


def _group_norm(
    spec: Spec,
    gamma: Spec | None,
    context: Any,
    x: Any,
    weight: Any,
    bias: Any,
    n: int,
    c: int,
    _: int,
    groups: int,
    eps: float,
) -> tuple[Any, Any, Any]:
    """Output, mean and reciprocal deviation; variances are each part's, and that of the parts' means."""
    wide = _widen(spec, x)
    # Parts are equally large. Squares less the mean's would cancel.
    own = aten.var_mean.correction(aten.reshape.default(wide, [n, groups, -1]), [2], correction=0)
    mean = aten.div.Scalar(context.all_reduce(own[1], "sum"), context.parts)
    apart = aten.sub.Tensor(own[1], mean)
    variance = aten.add.Tensor(own[0], aten.mul.Tensor(apart, apart))
    variance = aten.div.Scalar(context.all_reduce(variance, "sum"), context.parts)
    rstd = aten.rsqrt.default(aten.add.Scalar(variance, eps))
    # One pass, as the kernel: x * scale + (bias - mean * scale).
    scale = _to_channels(n, c, groups, rstd)
    scale = scale if weight is None else aten.mul.Tensor(scale, weight)
    shift = aten.neg.default(aten.mul.Tensor(_to_channels(n, c, groups, mean), scale))
    shift = shift if bias is None else aten.add.Tensor(shift, bias)
    output = aten.addcmul.default(_along(spec, shift, n), wide, _along(spec, scale, n))
    if not _is_half(spec):
        return output, mean, rstd
    # The kernel's statistics are in float32 where its weight is.
    saved = spec.dtype if gamma is None or _is_half(gamma) else gamma.dtype
    return _as(spec.dtype, output), _as(saved, mean), _as(saved, rstd)


def _group_norm_backward(
    spec: Spec,
    gamma: Spec | None,
    all_groups: int,
    context: Any,
    grad: Any,
    x: Any,
    mean: Any,
    rstd: Any,
    weight: Any,
    n: int,
    c: int,
    _: int,
    groups: int,
    mask: Sequence[bool],
) -> tuple[Any, ...]:
    """``(dxhat - mean(dxhat) - xhat * mean(dxhat * xhat)) * rstd``; terms of ``sum(grad * xhat)`` and ``sum(grad)``.

    Here ``xhat = (x - mean) * rstd`` and ``dxhat = grad * weight``.
    """
    count = math.prod(spec.shape[1:]) // all_groups
    wide, rstd = _widen(spec, grad), _widen(spec, rstd)
    centred = aten.sub.Tensor(_widen(spec, x), _along(spec, _to_channels(n, c, groups, _widen(spec, mean)), n))
    total, along = _positions(spec, wide), _positions(spec, aten.mul.Tensor(wide, centred))
    scale = _to_channels(n, c, groups, rstd)
    found: list[Any] = [None, aten.sum.dim_IntList(aten.mul.Tensor(along, scale), [0], False)]
    found.append(aten.sum.dim_IntList(total, [0], False))
    if mask[0]:
        weighted = [t if weight is None else aten.mul.Tensor(t, weight) for t in (total, along)]
        both = context.all_reduce(aten.stack.default([_of_group(n, groups, t) for t in weighted]), "sum")
        shift = aten.mul.Tensor(aten.select.int(both, 0, 0), rstd)
        slope = aten.mul.Tensor(aten.select.int(both, 0, 1), aten.pow.Tensor_Scalar(rstd, 3))
        less, turned = (_along(spec, _to_channels(n, c, groups, aten.div.Scalar(t, -count)), n) for t in (shift, slope))
        scale = _along(spec, scale if weight is None else aten.mul.Tensor(scale, weight), n)
        found[0] = aten.addcmul.default(aten.addcmul.default(less, wide, scale), centred, turned)
    if _is_half(spec):
        dtypes = [spec.dtype, *[spec.dtype if gamma is None else gamma.dtype] * 2]
        found = [None if t is None else _as(dtype, t) for t, dtype in zip(found, dtypes, strict=True)]
    return tuple(t if wanted else None for t, wanted in zip(found, mask, strict=True))


CHANNEL = letters(2)[1]


# Builders of batch norm's lowerings. ``spec`` is the whole batch, of which dim 1 is the channel.


def _is_half(spec: Spec) -> bool:
    """Whether sums need more precision than the tensor has."""
    return spec.dtype in (torch.float16, torch.bfloat16)


def _count(spec: Spec) -> int:
    """Elements of a channel in the whole batch."""
    return math.prod(spec.shape) // spec.shape[1]


def _widen(spec: Spec, x: Any) -> Any:
    return aten._to_copy.default(x, dtype=torch.float32) if _is_half(spec) else x


def _total(spec: Spec, context: Any, x: Any) -> Any:
    """Sum of each channel over the whole batch."""
    dims = [d for d in range(spec.ndim) if d != 1]
    return context.all_reduce(aten.sum.dim_IntList(x, dims, False), "sum")


def _mean(spec: Spec, context: Any, x: Any) -> Any:
    return aten.div.Scalar(_total(spec, context, x), _count(spec))


def _spread(spec: Spec, channels: Any) -> Any:
    """A number for each channel, in a shape that broadcasts."""
    return aten.reshape.default(channels, [1, -1, *[1] * (spec.ndim - 2)])


def _normalize(
    spec: Spec, context: Any, x: Any, weight: Any, bias: Any, momentum: float, eps: float
) -> tuple[Any, Any, Any, Any]:
    """Output, mean, reciprocal deviation and variance; two passes, since squares less the mean's would cancel."""
    wide = _widen(spec, x)
    mean = _mean(spec, context, wide)
    centred = aten.sub.Tensor(wide, _spread(spec, mean))
    variance = _mean(spec, context, aten.mul.Tensor(centred, centred))
    # With the statistics given, the kernel in evaluation mode normalizes: one pass over the tensor.
    output = aten.native_batch_norm.default(x, weight, bias, mean, variance, False, momentum, eps)[0]
    return output, mean, aten.rsqrt.default(aten.add.Scalar(variance, eps)), variance


def _build(
    spec: Spec,
    context: Any,
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    """Code for the operator that returns new running statistics, of which the variance is the unbiased one."""
    output, mean, rstd, variance = _normalize(spec, context, x, weight, bias, momentum, eps)
    # torch normalizes by the biased variance, and has the unbiased one in its running statistics.
    unbiased = aten.mul.Scalar(variance, _count(spec) / max(_count(spec) - 1, 1))

    def moved(old: Any, new: Any) -> Any:
        return aten.add.Tensor(aten.mul.Scalar(old, 1 - momentum), aten.mul.Scalar(new, momentum))

    return output, mean, rstd, moved(running_mean, mean), moved(running_var, unbiased)


def _build_without_statistics(
    spec: Spec, context: Any, x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, ...]:
    """Code for the operator without running statistics."""
    return _normalize(spec, context, x, weight, bias, momentum, eps)[:3]


def _build_backward(
    spec: Spec,
    context: Any,
    grad: Any,
    x: Any,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    mean: Any,
    rstd: Any,
    train: bool,
    eps: float,
    mask: Sequence[bool],
) -> tuple[Any, ...]:
    """``(grad - mean(grad) - xhat * mean(grad * xhat)) * rstd * weight``, ``sum(grad * xhat)``, ``sum(grad)``."""
    # xhat is centred * rstd; both factors of rstd are multiplied with numbers of channels, which are few.
    wide, centred = _widen(spec, grad), aten.sub.Tensor(_widen(spec, x), _spread(spec, mean))
    total = _total(spec, context, wide)
    along = aten.mul.Tensor(_total(spec, context, aten.mul.Tensor(wide, centred)), rstd)
    shift = _spread(spec, aten.div.Scalar(total, _count(spec)))
    slope = _spread(spec, aten.div.Scalar(aten.mul.Tensor(along, rstd), _count(spec)))
    scale = _spread(spec, rstd if weight is None else aten.mul.Tensor(rstd, weight))
    rest = aten.sub.Tensor(aten.sub.Tensor(wide, shift), aten.mul.Tensor(centred, slope))
    result = aten.mul.Tensor(rest, scale)
    result = aten._to_copy.default(result, dtype=spec.dtype) if _is_half(spec) else result
    return tuple(v if wanted else None for v, wanted in zip((result, along, total), mask, strict=True))


def _lowered(names: str, build: Any) -> dict[str, Lowering]:
    """The same code for every letter but the channel's: they may be split together."""
    # One object for all letters: samples and positions may be split at once, over several axes.
    lowering = Lowering(build, anywhere=True)
    return {c: lowering for c in names if c != CHANNEL}


def _forward(x: Spec, channelwise: Sequence[Any], training: bool, outputs: int, build: Any = None) -> Rule:
    """Statistics over the batch tie samples together in training; the saved ones are empty otherwise."""
    names = letters(x.ndim)
    free = names.replace(CHANNEL, "")
    inputs = [names, *[CHANNEL for t in channelwise if isinstance(t, Spec)]]
    # In evaluation the saved statistics are empty tensors.
    saved = [CHANNEL if training else "1"] * 2
    equation = f"{','.join(inputs)}->{','.join([names, *saved, *[CHANNEL] * (outputs - 3)])}"
    if not training:
        return Rule(equation, keep=names)
    # The operator writes to its running statistics in place, which a lowering cannot.
    if build is None:
        return Rule(equation, blocked=free)
    return Rule(equation, keep=free, lower=_lowered(names, build))


@rule(aten.native_batch_norm.default)
def native_batch_norm(x: Spec, *args: Any) -> Rule:
    """Batch normalization, which in training writes to its arguments: weight, bias, running mean and variance, ..."""
    return _forward(x, args[:4], args[4], 3)


@rule(aten._native_batch_norm_legit_functional.default)
def functional(x: Spec, *args: Any) -> Rule:
    """The same, returning new running statistics; ``args[4]`` is whether it trains."""
    return _forward(x, args[:4], args[4], 5, partial(_build, x))


@rule(aten._native_batch_norm_legit.no_stats)
def without_statistics(x: Spec, *args: Any) -> Rule:
    """The same, without running statistics: arguments are weight, bias, training, momentum, eps."""
    return _forward(x, args[:2], args[2], 3, partial(_build_without_statistics, x))


@rule(aten._native_batch_norm_legit_no_training.default)
def inference(x: Spec, *args: Any) -> Rule:
    """The same, with the running statistics."""
    return _forward(x, args[:4], False, 3)


@rule(aten.native_batch_norm_backward.default)
def backward(grad: Spec, x: Spec, *args: Any) -> Rule:
    """Gradients of input, weight and bias; ``args`` are weight, four statistics, train, eps, output mask."""
    names = letters(x.ndim)
    # Running statistics may be absent, and saved ones are empty in evaluation.
    statistics = [CHANNEL if t.shape == (x.shape[1],) else "1" for t in args[:5] if t is not None]
    outputs = [text if wanted else "_" for text, wanted in zip((names, CHANNEL, CHANNEL), args[7], strict=True)]
    equation = f"{','.join([names, names, *statistics])}->{','.join(outputs)}"
    free = names.replace(CHANNEL, "")
    strides = (ANY, ANY, *[ROW_MAJOR] * len(statistics))
    # In evaluation statistics are constants, and the gradient is linear in each element.
    if not args[5]:
        return Rule(equation, reduce=free, linear=((0,),), strides=strides)
    lower = _lowered(names, partial(_build_backward, x))
    return Rule(equation, keep=free, linear=((0,),), lower=lower, strides=strides)
