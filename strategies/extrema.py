"""Extrema and what is found with them: maximum, minimum, any, all, and the logarithm of a sum of exponentials.

Split along what they look at, devices agree on a number for each output element by a reduction that takes the maximum.
"""

from collections.abc import Callable
from typing import Any

import torch

from autopar.strategy import Dim, Lowering, Rule, Spec, kept_letters, rule, whole_equation

aten = torch.ops.aten


def _looks(x: Spec, dim: Dim, keepdim: bool, build: Callable[..., Any] | None, reductions: int) -> Rule:
    """A whole look along ``dim``, by ``build`` where it is split; it reduces ``reductions`` tensors like the output."""
    equation, reduced = whole_equation(x, dim, keepdim)
    if build is None:
        return Rule(equation, blocked=reduced)
    lowering = Lowering(build, (kept_letters(equation),) * reductions)
    return Rule(equation, keep=reduced, lower=dict.fromkeys(reduced, lowering))


def _negated(x: Any, floating: bool) -> Any:
    """What turns the order of numbers around; bits do it for every integer, the least of all and unsigned ones too."""
    return aten.neg.default(x) if floating else aten.bitwise_not.default(x)


def _extremum(target: Any, x: Spec, dim: Dim, keepdim: bool, *, least: bool) -> Rule:
    floating = x.dtype.is_floating_point

    def build(context: Any, *args: Any, **kwargs: Any) -> Any:
        found = target(*args, **kwargs)
        whole = context.all_reduce(_negated(found, floating) if least else found, "max")
        whole = _negated(whole, floating) if least else whole
        if not floating:
            return whole
        # A maximum over devices may drop what is no number; one device would not.
        lost = context.all_reduce(aten._to_copy.default(aten.isnan.default(found), dtype=x.dtype), "max")
        return aten.masked_fill.Scalar(whole, aten.gt.Scalar(lost, 0), float("nan"))

    return _looks(x, dim, keepdim, None if x.dtype == torch.bool else build, 2 if floating else 1)


rule(aten.amax.default)(lambda x, dim=None, keepdim=False: _extremum(aten.amax.default, x, dim, keepdim, least=False))
rule(aten.amin.default)(lambda x, dim=None, keepdim=False: _extremum(aten.amin.default, x, dim, keepdim, least=True))
rule(aten.max.default)(lambda x: _extremum(aten.max.default, x, None, False, least=False))
rule(aten.min.default)(lambda x: _extremum(aten.min.default, x, None, False, least=True))


def _found(target: Any, every: bool) -> Callable[..., Rule]:
    """``any`` and ``all``: maxima and minima of zeros and ones."""

    def build(context: Any, *args: Any, **kwargs: Any) -> Any:
        found = target(*args, **kwargs)
        votes = aten._to_copy.default(aten.logical_not.default(found) if every else found, dtype=torch.int32)
        some = aten.ne.Scalar(context.all_reduce(votes, "max"), 0)
        return aten.logical_not.default(some) if every else some

    def look(x: Spec, dim: Dim = None, keepdim: bool = False) -> Rule:
        return _looks(x, dim, keepdim, None if x.dtype == torch.uint8 else build, 1)  # bytes give bytes

    return look


for _op, _every in ((aten.any, False), (aten.all, True)):
    for _overload in (_op.default, _op.dim, _op.dims):
        rule(_overload)(_found(_overload, _every))


@rule(aten.logsumexp.default)
def logsumexp(x: Spec, dim: Dim, keepdim: bool = False) -> Rule:
    """``log(sum(exp(x - m))) + m`` with the maximum ``m``, or zero for ``m`` where that is infinite."""

    def build(context: Any, x: Any, dim: Any, keepdim: bool = False) -> Any:
        along = list(dim) if isinstance(dim, list | tuple) else [dim]
        largest = context.all_reduce(aten.amax.default(x, along, True), "max")
        largest = aten.masked_fill.Scalar(largest, aten.isinf.default(largest), 0.0)
        exponential = aten.exp.default(aten.sub.Tensor(x, largest))
        total = context.all_reduce(aten.sum.dim_IntList(exponential, along, keepdim), "sum")
        shift = largest if keepdim else aten.sum.dim_IntList(largest, along, False)
        return aten.add.Tensor(aten.log.default(total), shift)

    return _looks(x, dim, keepdim, build if x.dtype.is_floating_point and x.ndim else None, 2)
