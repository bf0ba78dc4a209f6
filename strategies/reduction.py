"""Sums, and operators that look at whole dims: scans, sorts, products, medians.

Means are sums divided by the global count before rules are asked.
"""

from collections.abc import Callable
from typing import Any

import torch

from autopar.strategy import Dim, Rule, Spec, dims, letters, rule, whole_equation

aten = torch.ops.aten


@rule(aten.sum.dim_IntList)
def sum_(x: Spec, dim: Dim, keepdim: bool = False, *, dtype: Any = None) -> Rule:
    """Sum over some dims, or all."""
    equation, reduced = whole_equation(x, dim, keepdim)
    return Rule(equation, reduce=reduced, linear=() if x.dtype == torch.bool else ((0,),))


def _whole(outputs: int) -> Callable[..., Rule]:
    def whole(x: Spec, dim: Dim = None, keepdim: bool = False, **_: Any) -> Rule:
        equation, reduced = whole_equation(x, dim, keepdim, outputs)
        return Rule(equation, blocked=reduced)

    return whole


rule(aten.argmax.default, aten.argmin.default, aten.prod.default, aten.prod.dim_int)(_whole(1))
rule(aten.max.dim, aten.min.dim, aten.var_mean.correction)(_whole(2))


def _same(x: Spec, dim: int, outputs: int, linear: bool = False) -> Rule:
    """An operator that keeps every dim and looks along ``dim``."""
    names = letters(x.ndim)
    equation = f"{names or '.'}->{','.join([names or '.'] * outputs)}"
    return Rule(equation, blocked=names[dim % x.ndim] if x.ndim else "", linear=((0,),) if linear else ())


@rule(aten.cumsum.default)
def cumsum(x: Spec, dim: int, *, dtype: Any = None) -> Rule:
    """Running sum."""
    return _same(x, dim, 1, linear=x.dtype != torch.bool)


@rule(aten.cumprod.default, aten.logcumsumexp.default)
def cumprod(x: Spec, dim: int, *, dtype: Any = None) -> Rule:
    """Running product and the like."""
    return _same(x, dim, 1)


@rule(aten.sort.default)
def sort(x: Spec, dim: int = -1, descending: bool = False) -> Rule:
    """Sorted values and where they were."""
    return _same(x, dim, 2)


@rule(aten.sort.stable)
def stable_sort(x: Spec, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Rule:
    """Sorted values and where they were, equal ones in order."""
    return _same(x, dim, 2)


@rule(aten.topk.default)
def topk(x: Spec, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Rule:
    """The largest entries along a dim."""
    names = list(letters(x.ndim))
    last = letters(1, x.ndim)
    right = [last if d == dim % x.ndim else c for d, c in enumerate(names)]
    return Rule(f"{dims(names)}->{dims(right)},{dims(right)}", blocked=names[dim % x.ndim] + last)


@rule(aten.histc.default)
def histc(x: Spec, *_: Any) -> Rule:
    """Counts of values in intervals."""
    return Rule(f"{letters(x.ndim) or '.'}->{letters(1, x.ndim)}", blocked=letters(x.ndim + 1))


@rule(aten.cummax.default, aten.cummin.default)
def cummax(x: Spec, dim: int) -> Rule:
    """Running extremum, and where it was."""
    return _same(x, dim, 2)


@rule(aten.mode.default, aten.median.dim, aten.nanmedian.dim)
def median(x: Spec, dim: int = -1, keepdim: bool = False) -> Rule:
    """One element of a dim, and where it was."""
    return _whole(2)(x, dim, keepdim)


rule(aten.median.default, aten.nanmedian.default)(_whole(1))
rule(aten.kthvalue.default)(lambda x, k, dim=-1, keepdim=False: _whole(2)(x, dim, keepdim))
rule(aten.aminmax.default)(lambda x, *, dim=None, keepdim=False: _whole(2)(x, dim, keepdim))


@rule(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def count_nonzero(x: Spec, dim: Dim = None) -> Rule:
    """How many are not zero: counts of parts add up."""
    equation, reduced = whole_equation(x, dim, keepdim=False)
    return Rule(equation, reduce=reduced)
