"""Sums, and operators that look at whole dims: extrema, scans, sorts, moments, norms.

Means are sums divided by the global count before rules are asked.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.strategy import Rule, Spec, dims, letters, rule

aten = torch.ops.aten

Dim = int | Sequence[int] | None


def _normalize(x: Spec, dim: Dim) -> tuple[int, ...]:
    """The dims that ``dim`` names; None and ``[]`` name all of them."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(x.ndim))
    return tuple(d % x.ndim for d in ((dim,) if isinstance(dim, int) else dim)) if x.ndim else ()


def _equation(x: Spec, dim: Dim, keepdim: bool, outputs: int = 1) -> tuple[str, str]:
    """The equation of a reduction over ``dim``, and the letters that it reduces."""
    reduced = _normalize(x, dim)
    names = letters(x.ndim)
    left = [c if d not in reduced else "" for d, c in enumerate(names) if keepdim or d not in reduced]
    right = ",".join([dims(left) or "."] * outputs)
    return f"{names or '.'}->{right}", "".join(names[d] for d in reduced)


@rule(aten.sum.dim_IntList)
def sum_(x: Spec, dim: Dim, keepdim: bool = False, *, dtype: Any = None) -> Rule:
    """Sum over some dims, or all."""
    equation, reduced = _equation(x, dim, keepdim)
    return Rule(equation, reduce=reduced, linear=() if x.dtype == torch.bool else ((0,),))


def _whole(outputs: int) -> Callable[..., Rule]:
    def whole(x: Spec, dim: Dim = None, keepdim: bool = False, **_: Any) -> Rule:
        equation, reduced = _equation(x, dim, keepdim, outputs)
        return Rule(equation, blocked=reduced)

    return whole


for _op in (aten.amax, aten.amin, aten.argmax, aten.argmin, aten.any, aten.all, aten.max, aten.min, aten.logsumexp):
    rule(_op.default)(_whole(1))
rule(aten.any.dim, aten.any.dims, aten.all.dim, aten.all.dims, aten.prod.default, aten.prod.dim_int)(_whole(1))
rule(aten.var.correction, aten.std.correction)(_whole(1))
rule(aten.max.dim, aten.min.dim, aten.var_mean.correction)(_whole(2))


@rule(aten.var.dim, aten.std.dim)
def var(x: Spec, dim: Dim, unbiased: bool = True, keepdim: bool = False) -> Rule:
    """Variance and standard deviation: not split along the dims they look at."""
    return _whole(1)(x, dim, keepdim)


@rule(aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim, aten.norm.Scalar)
def norm(x: Spec, order: Any = 2, dim: Dim = None, keepdim: bool = False, *, dtype: Any = None) -> Rule:
    """Vector norms: not split along the dims they look at."""
    return _whole(1)(x, dim, keepdim)


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
    return Rule(f"{letters(x.ndim)}->{letters(1, x.ndim)}", blocked=letters(x.ndim + 1))


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
    equation, reduced = _equation(x, dim, keepdim=False)
    return Rule(equation, reduce=reduced)


@rule(aten.dist.default)
def dist(x: Spec, y: Spec, p: float = 2) -> Rule:
    """Norm of a difference: whole."""
    return Rule(f"{'1' * x.ndim or '.'},{'1' * y.ndim or '.'}->.")
