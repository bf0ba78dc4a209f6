"""Softmax and its relatives, and cross-entropy, which is an operator of ours.

Split along the softmax dim they need two scalars a row from everyone: the maximum and the sum (vocabulary-parallel
cross-entropy, Megatron-LM, https://arxiv.org/abs/1909.08053, section 3).
"""

import math
from typing import Any

import torch

from autopar.ir.ops import cross_entropy as ours
from autopar.ir.ops.sequence.ctc import ctc, ctc_backward
from autopar.rules.rule import Lowering, Padding, Rule, Spec, letters, rule

aten = torch.ops.aten


def _rule(x: Spec, dim: int, linear: tuple[tuple[int, ...], ...], lowering: Any, padding: Padding) -> Rule:
    """Every dim kept; ``dim`` is split with ``lowering``."""
    names = letters(x.ndim)
    equation = f"{','.join([names or '.'] * len(padding.inputs))}->{names or '.'}"
    # A tensor without dims has nothing to split.
    if not x.ndim:
        return Rule(equation, linear=linear)
    own = names[dim]
    return Rule(equation, linear=linear, lower={own: Lowering(lowering, together=True)}, padded={own: padding})


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
    return _rule(x, dim, (), _build_softmax, Padding((-math.inf,), 0.0))


@rule(aten._log_softmax.default)
def log_softmax(x: Spec, dim: int, half_to_float: bool) -> Rule:
    """Logarithm of softmax."""
    return _rule(x, dim, (), _build_log_softmax, Padding((-math.inf,), -math.inf))


@rule(aten._softmax_backward_data.default)
def softmax_backward(grad: Spec, output: Spec, dim: int, input_dtype: torch.dtype) -> Rule:
    """Gradient of softmax, from its output."""
    return _rule(grad, dim, ((0,),), _build_softmax_backward, Padding((0.0, 0.0), 0.0))


@rule(aten._log_softmax_backward_data.default)
def log_softmax_backward(grad: Spec, output: Spec, dim: int, input_dtype: torch.dtype) -> Rule:
    """Gradient of the logarithm of softmax, from its output."""
    return _rule(grad, dim, ((0,),), _build_log_softmax_backward, Padding((0.0, -math.inf), 0.0))


@rule(aten._safe_softmax.default)
def safe_softmax(x: Spec, dim: int, dtype: torch.dtype | None = None) -> Rule:
    """Softmax that is zero where a whole row is minus infinity."""
    names = letters(x.ndim)
    return Rule(f"{names or '.'}->{names or '.'}", blocked=names[dim] if names else "")


def _forward(letter: str) -> Any:
    def build(context: Any, logits: Any, target: Any, start: None) -> Any:
        # One pass over the logits of this device's classes; then a number a row is reduced, and then two.
        part = ours.cross_entropy(logits, target, context.axis_index() * context.local_size(letter))
        picked, total = part[0], part[1]
        largest = context.all_reduce(total, "max")
        # Of all devices but one the target's logit is zero: one reduction sums both.
        terms = aten.cat.default([picked, aten.exp.default(aten.sub.Tensor(total, largest))], -1)
        sums = context.all_reduce(terms, "sum")
        whole = aten.add.Tensor(aten.log.default(aten.slice.Tensor(sums, -1, 1, 2)), largest)
        return aten.slice.Tensor(sums, -1, 0, 1), whole

    return build


def _backward(letter: str) -> Any:
    def build(context: Any, *args: Any) -> Any:
        *tensors, _, dtype = args
        return ours.cross_entropy_backward(*tensors, context.axis_index() * context.local_size(letter), dtype)

    return build


@rule(ours.cross_entropy)
def cross_entropy(logits: Spec, target: Spec, start: int | None) -> Rule:
    """Of each row the logit of its target, and the logarithm of its sum of exponentials."""
    names = letters(logits.ndim)
    row, own = names[:-1], names[-1]
    return Rule(
        f"{names},{row}1->{row}1,{row}1",
        keep=own,
        lower={own: Lowering(_forward(own), together=True)},
        padded={own: Padding((-math.inf,))},
    )


@rule(ours.cross_entropy_backward)
def cross_entropy_backward(
    grad: Spec, logits: Spec, target: Spec, logsumexp: Spec, start: int | None, dtype: torch.dtype
) -> Rule:
    """The gradient of the logits."""
    names = letters(logits.ndim)
    row, own = names[:-1], names[-1]
    return Rule(
        f"{row}1,{names},{row}1,{row}1->{names}",
        linear=((0,),),
        lower={own: Lowering(_backward(own), together=True)},
        padded={own: Padding((None, -math.inf), 0.0)},
    )


@rule(ctc)
def ctc_(log_probs: Spec, targets: Spec, lengths: Spec, target_lengths: Spec, blank: int, zero_infinity: bool) -> Rule:
    """Samples are apart; each is a recurrence along its time and targets."""
    return Rule("tnc,ns,n,n->n", blocked="tcs", padded=None)


@rule(ctc_backward)
def ctc_backward_(
    grad: Spec, log_probs: Spec, targets: Spec, lengths: Spec, target_lengths: Spec, blank: int, zero_infinity: bool
) -> Rule:
    """Likewise; of a sample with more targets than time the gradient is no number, whatever it is multiplied by."""
    return Rule("n,tnc,ns,n,n->tnc", blocked="tcs", linear=((0,),), padded=None)
