"""Softmax and its relatives; cross-entropy reaches the rules as these, ``gather`` and ``scatter``.

Split along the softmax dim they need two scalars a row from everyone: the maximum and the sum (vocabulary-parallel
cross-entropy, Megatron-LM, https://arxiv.org/abs/1909.08053, section 3).
"""

import math
from typing import Any

import torch

from autopar.rules.rule import Lowering, Padding, Rule, Spec, letters, rule

aten = torch.ops.aten


def _rule(x: Spec, dim: int, linear: tuple[tuple[int, ...], ...], lowering: Any, sums: int, padding: Padding) -> Rule:
    """Every dim kept; ``dim`` is split with ``lowering``, which all-reduces ``sums`` numbers a row."""
    names = letters(x.ndim)
    equation = f"{','.join([names or '.'] * len(padding.inputs))}->{names or '.'}"
    # A tensor without dims has nothing to split.
    if not x.ndim:
        return Rule(equation, linear=linear)
    row, own = names.replace(names[dim], ""), names[dim]
    return Rule(
        equation, linear=linear, lower={own: Lowering(lowering, (row,) * sums, together=True)}, padded={own: padding}
    )


def _shifted(context: Any, x: Any, dim: int, half_to_float: bool) -> tuple[Any, Any, Any]:
    """``x`` less its row maximum, the exponential of that, and its row sum, over all devices."""
    x = aten._to_copy.default(x, dtype=torch.float32) if half_to_float else x
    # The maximum of the whole row: with that of a part, exponentials of two devices would have different scales.
    shifted = aten.sub.Tensor(x, context.all_reduce(aten.amax.default(x, [dim], True), "max"))
    exponential = aten.exp.default(shifted)
    return shifted, exponential, context.all_reduce(aten.sum.dim_IntList(exponential, [dim], True), "sum")


def _build_softmax(context: Any, x: Any, dim: int, half_to_float: bool) -> Any:
    _, exponential, total = _shifted(context, x, dim, half_to_float)
    return aten.div.Tensor(exponential, total)


def _build_log_softmax(context: Any, x: Any, dim: int, half_to_float: bool) -> Any:
    shifted, _, total = _shifted(context, x, dim, half_to_float)
    return aten.sub.Tensor(shifted, aten.log.default(total))


def _build_softmax_backward(context: Any, grad: Any, output: Any, dim: int, input_dtype: torch.dtype) -> Any:
    # (grad - sum(grad * y)) * y, the sum over all devices.
    product = aten.mul.Tensor(grad, output)
    total = context.all_reduce(aten.sum.dim_IntList(product, [dim], True), "sum")
    return aten._to_copy.default(aten.sub.Tensor(product, aten.mul.Tensor(output, total)), dtype=input_dtype)


def _build_log_softmax_backward(context: Any, grad: Any, output: Any, dim: int, input_dtype: torch.dtype) -> Any:
    total = context.all_reduce(aten.sum.dim_IntList(grad, [dim], True), "sum")
    result = aten.sub.Tensor(grad, aten.mul.Tensor(aten.exp.default(output), total))
    return aten._to_copy.default(result, dtype=input_dtype)


@rule(aten._softmax.default)
def softmax(x: Spec, dim: int, half_to_float: bool) -> Rule:
    """Softmax."""
    # Padding of minus infinity adds nothing to the sum, and is 0 in the result.
    return _rule(x, dim, (), _build_softmax, 2, Padding((-math.inf,), 0.0))


@rule(aten._log_softmax.default)
def log_softmax(x: Spec, dim: int, half_to_float: bool) -> Rule:
    """Logarithm of softmax."""
    return _rule(x, dim, (), _build_log_softmax, 2, Padding((-math.inf,), -math.inf))


@rule(aten._softmax_backward_data.default)
def softmax_backward(grad: Spec, output: Spec, dim: int, input_dtype: torch.dtype) -> Rule:
    """Gradient of softmax, from its output."""
    return _rule(grad, dim, ((0,),), _build_softmax_backward, 1, Padding((0.0, 0.0), 0.0))


@rule(aten._log_softmax_backward_data.default)
def log_softmax_backward(grad: Spec, output: Spec, dim: int, input_dtype: torch.dtype) -> Rule:
    """Gradient of the logarithm of softmax, from its output."""
    return _rule(grad, dim, ((0,),), _build_log_softmax_backward, 1, Padding((0.0, -math.inf), 0.0))


@rule(aten._safe_softmax.default)
def safe_softmax(x: Spec, dim: int, dtype: torch.dtype | None = None) -> Rule:
    """Softmax that is zero where a whole row is minus infinity."""
    names = letters(x.ndim)
    return Rule(f"{names or '.'}->{names or '.'}", blocked=names[dim] if names else "")
