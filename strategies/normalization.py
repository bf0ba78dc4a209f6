"""Layer, RMS and group normalisation, forward and backward."""

from collections.abc import Sequence
from typing import Any

import torch

from autopar.strategy import ROW_MAJOR, Rule, Spec, letters, rule

aten = torch.ops.aten


def _rows(x: Spec, normalized_shape: Sequence[int]) -> tuple[str, str, str]:
    """Letters of the free dims, of the normalised ones, and the equation of a statistic."""
    names = letters(x.ndim)
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
    spatial = letters(x.ndim - 2, letters(52).index("u"))
    return f"n(gc){spatial}", spatial


@rule(aten.native_group_norm.default)
def group_norm(x: Spec, weight: Spec | None, bias: Spec | None, *sizes: Any) -> Rule:
    """Each group of channels of each sample normalised; ``sizes`` are N, C, HxW, groups, eps."""
    whole, spatial = _grouped(x)
    inputs = [whole, *["(gc)"] * _present(weight, bias)]
    return Rule(
        f"{','.join(inputs)}->{whole},ng,ng",
        blocked="c" + spatial,
        keep="n",
        scaled={3: "n", 4: "g", 6: "g"},
        sizes={"g": sizes[3]},
        strides=ROW_MAJOR,
    )


@rule(aten.native_group_norm_backward.default)
def group_norm_backward(grad: Spec, x: Spec, mean: Spec, rstd: Spec, weight: Spec | None, *sizes: Any) -> Rule:
    """Gradients of input, weight and bias; ``sizes`` are N, C, HxW, groups, output mask."""
    whole, spatial = _grouped(x)
    inputs = [whole, whole, "ng", "ng", *["(gc)"] * _present(weight)]
    return Rule(
        f"{','.join(inputs)}->{_masked([whole, '(gc)', '(gc)'], sizes[4])}",
        blocked="c" + spatial,
        reduce="n",
        linear=((0,),),
        scaled={5: "n", 6: "g", 8: "g"},
        sizes={"g": sizes[3]},
        strides=ROW_MAJOR,
    )
