"""Variances and norms. Split along what they look at, they are put together from sums over devices."""

import math
from collections.abc import Callable
from typing import Any

import torch

from autopar.strategy import Dim, Lowering, Rule, Spec, kept_letters, rule, whole_dims, whole_equation

aten = torch.ops.aten


def _variance(x: Spec, dim: Dim, correction: float, keepdim: bool, *, root: bool) -> Rule:
    """Two passes, the mean first, since squares less the mean's would cancel."""
    equation, reduced = whole_equation(x, dim, keepdim)
    if not (x.dtype.is_floating_point and x.ndim):
        return Rule(equation, blocked=reduced)
    along = list(whole_dims(x, dim))
    count = math.prod(x.shape[d] for d in along)
    half = x.dtype in (torch.float16, torch.bfloat16)

    def build(context: Any, x: Any, *_: Any, **__: Any) -> Any:
        wide = aten._to_copy.default(x, dtype=torch.float32) if half else x
        mean = aten.div.Scalar(context.all_reduce(aten.sum.dim_IntList(wide, along, True), "sum"), count)
        centred = aten.sub.Tensor(wide, mean)
        squares = aten.sum.dim_IntList(aten.mul.Tensor(centred, centred), along, keepdim)
        result = aten.div.Scalar(context.all_reduce(squares, "sum"), max(count - correction, 0.0))
        result = aten.sqrt.default(result) if root else result
        return aten._to_copy.default(result, dtype=spec.dtype) if half else result

    spec = x
    return Rule(equation, keep=reduced, lower=dict.fromkeys(reduced, Lowering(build, (kept_letters(equation),) * 2)))


def _corrected(root: bool) -> Callable[..., Rule]:
    def moment(x: Spec, dim: Dim = None, *, correction: float | None = None, keepdim: bool = False) -> Rule:
        return _variance(x, dim, 1 if correction is None else correction, keepdim, root=root)

    return moment


def _unbiased(root: bool) -> Callable[..., Rule]:
    def moment(x: Spec, dim: Dim, unbiased: bool = True, keepdim: bool = False) -> Rule:
        return _variance(x, dim, int(unbiased), keepdim, root=root)

    return moment


for _op, _root in ((aten.var, False), (aten.std, True)):
    rule(_op.correction)(_corrected(_root))
    rule(_op.dim)(_unbiased(_root))


@rule(torch.ops.prims.var.default)
def primitive_variance(x: Spec, dim: Dim, correction: float = 1) -> Rule:
    """What torch's decomposition of ``var_mean`` has for the variance."""
    return _variance(x, dim, correction, False, root=False)


def _norm(target: Any) -> Callable[..., Rule]:
    """Norms of parts, divided by the largest of them so that no power overflows: ``m * sum((n / m)**p)**(1/p)``."""

    def norm(
        x: Spec, order: Any = 2, dim: Dim = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> Rule:
        equation, reduced = whole_equation(x, dim, keepdim)
        power = 2.0 if order is None else float(order)

        def build(context: Any, *args: Any, **kwargs: Any) -> Any:
            part = target(*args, **kwargs)
            if power == 0:
                return context.all_reduce(part, "sum")
            largest = context.all_reduce(part, "max")
            usable = aten.logical_and.default(aten.gt.Scalar(largest, 0), aten.lt.Scalar(largest, math.inf))
            scale = aten.masked_fill.Scalar(largest, aten.logical_not.default(usable), 1.0)
            powers = aten.pow.Tensor_Scalar(aten.div.Tensor(part, scale), power)
            total = context.all_reduce(powers, "sum")
            return aten.mul.Tensor(aten.pow.Tensor_Scalar(total, 1 / power), scale)

        if math.isinf(power) or not x.ndim:
            return Rule(equation, blocked=reduced)
        kept = (kept_letters(equation),) * (1 if power == 0 else 2)
        return Rule(equation, keep=reduced, lower=dict.fromkeys(reduced, Lowering(build, kept)))

    return norm


for _overload in (aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim, aten.norm.Scalar):
    rule(_overload)(_norm(_overload))
