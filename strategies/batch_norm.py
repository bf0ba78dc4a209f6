"""Batch normalisation, whose statistics in training are those of the whole batch, however it is split.

Split along samples or space, devices add up their sums: two numbers a channel forward and two backward, as in
synchronised batch norm (Zhang et al., https://arxiv.org/abs/1803.08904, section 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.strategy import ANY, ROW_MAJOR, Lowering, Rule, Spec, letters, rule

aten = torch.ops.aten

CHANNEL = letters(2)[1]


@dataclass(frozen=True)
class _Samples:
    """What a channel's statistics are taken over.

    Attributes:
        ndim: of the tensor; dim 1 is the channel.
        count: elements of a channel in the whole batch.
        dtype: of the tensor; sums of half precision are taken in float32.
    """

    ndim: int
    count: int
    dtype: Any

    @property
    def half(self) -> bool:
        """Whether sums need more precision than the tensor has."""
        return self.dtype in (torch.float16, torch.bfloat16)

    def widen(self, x: Any) -> Any:
        return aten._to_copy.default(x, dtype=torch.float32) if self.half else x

    def total(self, context: Any, x: Any) -> Any:
        """Sum of each channel over the whole batch."""
        dims = [d for d in range(self.ndim) if d != 1]
        return context.all_reduce(aten.sum.dim_IntList(x, dims, False), "sum")

    def mean(self, context: Any, x: Any) -> Any:
        return aten.div.Scalar(self.total(context, x), self.count)

    def spread(self, channels: Any) -> Any:
        """A number for each channel, in a shape that broadcasts."""
        return aten.reshape.default(channels, [1, -1, *[1] * (self.ndim - 2)])

    def normalize(
        self, context: Any, x: Any, weight: Any, bias: Any, momentum: float, eps: float
    ) -> tuple[Any, Any, Any, Any]:
        """Output, mean, reciprocal deviation and variance; two passes, since squares less the mean's would cancel."""
        wide = self.widen(x)
        mean = self.mean(context, wide)
        centred = aten.sub.Tensor(wide, self.spread(mean))
        variance = self.mean(context, aten.mul.Tensor(centred, centred))
        output = aten.native_batch_norm.default(x, weight, bias, mean, variance, False, momentum, eps)[0]
        return output, mean, aten.rsqrt.default(aten.add.Scalar(variance, eps)), variance

    def build(
        self,
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
        output, mean, rstd, variance = self.normalize(context, x, weight, bias, momentum, eps)
        unbiased = aten.mul.Scalar(variance, self.count / max(self.count - 1, 1))

        def moved(old: Any, new: Any) -> Any:
            return aten.add.Tensor(aten.mul.Scalar(old, 1 - momentum), aten.mul.Scalar(new, momentum))

        return output, mean, rstd, moved(running_mean, mean), moved(running_var, unbiased)

    def build_without_statistics(
        self, context: Any, x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
    ) -> tuple[Any, ...]:
        """Code for the operator without running statistics."""
        return self.normalize(context, x, weight, bias, momentum, eps)[:3]

    def build_backward(
        self,
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
        wide, centred = self.widen(grad), aten.sub.Tensor(self.widen(x), self.spread(mean))
        total = self.total(context, wide)
        along = aten.mul.Tensor(self.total(context, aten.mul.Tensor(wide, centred)), rstd)
        shift = self.spread(aten.div.Scalar(total, self.count))
        slope = self.spread(aten.div.Scalar(aten.mul.Tensor(along, rstd), self.count))
        scale = self.spread(rstd if weight is None else aten.mul.Tensor(rstd, weight))
        rest = aten.sub.Tensor(aten.sub.Tensor(wide, shift), aten.mul.Tensor(centred, slope))
        result = aten.mul.Tensor(rest, scale)
        result = aten._to_copy.default(result, dtype=self.dtype) if self.half else result
        return tuple(v if wanted else None for v, wanted in zip((result, along, total), mask, strict=True))


def _samples(x: Spec) -> _Samples:
    return _Samples(x.ndim, math.prod(x.shape) // x.shape[1], x.dtype)


def _lowered(names: str, build: Any) -> dict[str, Lowering]:
    """The same code for every letter but the channel's: they may be split together."""
    lowering = Lowering(build, (CHANNEL, CHANNEL))
    return {c: lowering for c in names if c != CHANNEL}


def _forward(x: Spec, channelwise: Sequence[Any], training: bool, outputs: int, build: Any = None) -> Rule:
    """Statistics over the batch tie samples together in training; the saved ones are empty otherwise."""
    names = letters(x.ndim)
    free = names.replace(CHANNEL, "")
    inputs = [names, *[CHANNEL for t in channelwise if isinstance(t, Spec)]]
    saved = [CHANNEL if training else "1"] * 2
    equation = f"{','.join(inputs)}->{','.join([names, *saved, *[CHANNEL] * (outputs - 3)])}"
    if not training:
        return Rule(equation, keep=names)
    if build is None:
        return Rule(equation, blocked=free)
    return Rule(equation, keep=free, lower=_lowered(names, build))


@rule(aten.native_batch_norm.default)
def native_batch_norm(x: Spec, *args: Any) -> Rule:
    """Batch normalisation, which in training writes to its arguments: weight, bias, running mean and variance, ..."""
    return _forward(x, args[:4], args[4], 3)


@rule(aten._native_batch_norm_legit_functional.default)
def functional(x: Spec, *args: Any) -> Rule:
    """The same, returning new running statistics; ``args[4]`` is whether it trains."""
    return _forward(x, args[:4], args[4], 5, _samples(x).build)


@rule(aten._native_batch_norm_legit.no_stats)
def without_statistics(x: Spec, *args: Any) -> Rule:
    """The same, without running statistics: arguments are weight, bias, training, momentum, eps."""
    return _forward(x, args[:2], args[2], 3, _samples(x).build_without_statistics)


@rule(aten._native_batch_norm_legit_no_training.default)
def inference(x: Spec, *args: Any) -> Rule:
    """The same, with the running statistics."""
    return _forward(x, args[:4], False, 3)


@rule(aten.native_batch_norm_backward.default)
def backward(grad: Spec, x: Spec, *args: Any) -> Rule:
    """Gradients of input, weight and bias; ``args`` are weight, four statistics, train, eps, output mask."""
    names = letters(x.ndim)
    statistics = [CHANNEL if t.shape == (x.shape[1],) else "1" for t in args[:5] if t is not None]
    outputs = [text if wanted else "_" for text, wanted in zip((names, CHANNEL, CHANNEL), args[7], strict=True)]
    equation = f"{','.join([names, names, *statistics])}->{','.join(outputs)}"
    free = names.replace(CHANNEL, "")
    strides = (ANY, ANY, *[ROW_MAJOR] * len(statistics))
    if not args[5]:
        return Rule(equation, reduce=free, linear=((0,),), strides=strides)
    lower = _lowered(names, _samples(x).build_backward)
    return Rule(equation, keep=free, linear=((0,),), lower=lower, strides=strides)
