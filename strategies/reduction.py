"""Sums, and operators that read whole dims: sorts, products, medians.

Means are sums divided by the global count before rules are asked.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from autopar.rules.rule import (
    Dim,
    Lowering,
    Padding,
    Rule,
    Spec,
    dims,
    letters,
    rule,
    whole_dims,
    whole_equation,
)

aten = torch.ops.aten


@rule(aten.sum.dim_IntList)
def sum_(x: Spec, dim: Dim, keepdim: bool = False, *, dtype: Any = None) -> Rule:
    """Sum over some dims, or all."""
    equation, reduced = whole_equation(x, dim, keepdim)
    # A sum of booleans is a count, which partial booleans would not add up to.
    return Rule(equation, reduce=reduced, linear=() if x.dtype == torch.bool else ((0,),), zero=True)


def _whole(outputs: int) -> Callable[..., Rule]:
    def whole(x: Spec, dim: Dim = None, keepdim: bool = False, **_: Any) -> Rule:
        equation, reduced = whole_equation(x, dim, keepdim, outputs)
        return Rule(equation, blocked=reduced)

    return whole


rule(aten.prod.default)(_whole(1))
rule(aten.var_mean.correction)(_whole(2))


def _same(x: Spec, dim: int, outputs: int, linear: bool = False) -> Rule:
    """An operator whose result has every dim, and which reads all of ``dim`` at once."""
    names = letters(x.ndim)
    equation = f"{names or '.'}->{','.join([names or '.'] * outputs)}"
    return Rule(equation, blocked=names[dim % x.ndim] if x.ndim else "", linear=((0,),) if linear else ())


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
    if x.ndim == 0:
        return Rule(".->.,.")
    # The k largest of a part are not those of the whole; those of all parts are, but of equal ones the kernel may name
    # others than on one device: experts that tie, say, which is often in bfloat16.
    names = list(letters(x.ndim))
    last = letters(1, x.ndim)
    right = [last if d == dim % x.ndim else c for d, c in enumerate(names)]
    return Rule(f"{dims(names)}->{dims(right)},{dims(right)}", blocked=names[dim % x.ndim] + last)


@rule(aten.histc.default)
def histc(x: Spec, bins: int = 100, min: float = 0, max: float = 0) -> Rule:
    """Counts of values in intervals; equal bounds stand for those of the data."""
    names, counted = letters(x.ndim), letters(1, x.ndim)
    given = min < max
    equation = f"{names or '.'}->{counted}"
    return Rule(equation, reduce=names if given else "", blocked=counted if given else names + counted)


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
    return Rule(equation, reduce=reduced, zero=True)


def _variance(x: Spec, dim: Dim, correction: float, keepdim: bool, *, root: bool) -> Rule:
    """Two passes, the mean first, since squares less the mean's would cancel."""
    equation, reduced = whole_equation(x, dim, keepdim)
    if not (x.dtype.is_floating_point and x.ndim):
        return Rule(equation, blocked=reduced)
    # The global count, which on a shard is not that of its elements.
    along = list(whole_dims(x, dim))
    count = math.prod(x.shape[d] for d in along)
    half = x.dtype in (torch.float16, torch.bfloat16)

    def build(context: Any, x: Any, *_: Any, **__: Any) -> Any:
        # As the kernel does: squares in float16 overflow from 256 on.
        wide = aten._to_copy.default(x, dtype=torch.float32) if half else x
        mean = aten.div.Scalar(context.all_reduce(aten.sum.dim_IntList(wide, along, True), "sum"), count)
        centred = aten.sub.Tensor(wide, mean)
        squares = aten.sum.dim_IntList(aten.mul.Tensor(centred, centred), along, keepdim)
        result = aten.div.Scalar(context.all_reduce(squares, "sum"), max(count - correction, 0.0))
        result = aten.sqrt.default(result) if root else result
        return aten._to_copy.default(result, dtype=spec.dtype) if half else result

    spec = x
    return Rule(equation, keep=reduced, lower=dict.fromkeys(reduced, Lowering(build, anywhere=True)))


def _corrected(root: bool) -> Callable[..., Rule]:
    def spread(x: Spec, dim: Dim = None, *, correction: float | None = None, keepdim: bool = False) -> Rule:
        return _variance(x, dim, 1 if correction is None else correction, keepdim, root=root)

    return spread


def _unbiased(root: bool) -> Callable[..., Rule]:
    def spread(x: Spec, dim: Dim, unbiased: bool = True, keepdim: bool = False) -> Rule:
        return _variance(x, dim, int(unbiased), keepdim, root=root)

    return spread


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
            # The number of elements that are not zero.
            if power == 0:
                return context.all_reduce(part, "sum")
            largest = context.all_reduce(part, "max")
            # Zero or infinity cannot be divided by; the sum of powers is right without a scale then.
            usable = aten.logical_and.default(aten.gt.Scalar(largest, 0), aten.lt.Scalar(largest, math.inf))
            scale = aten.masked_fill.Scalar(largest, aten.logical_not.default(usable), 1.0)
            powers = aten.pow.Tensor_Scalar(aten.div.Tensor(part, scale), power)
            total = context.all_reduce(powers, "sum")
            return aten.mul.Tensor(aten.pow.Tensor_Scalar(total, 1 / power), scale)

        # Zeros add nothing to sums of powers, and are no maximum.
        padded = dict.fromkeys(reduced, Padding((0.0,))) if power >= 0 else {}
        # A maximum, which the lowering's powers cannot express.
        if math.isinf(power) or not x.ndim:
            return Rule(equation, blocked=reduced, padded=padded)
        lower = dict.fromkeys(reduced, Lowering(build, anywhere=True))
        return Rule(equation, keep=reduced, lower=lower, padded=padded)

    return norm


for _overload in (aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim, aten.norm.Scalar):
    rule(_overload)(_norm(_overload))


def _whole_or_lowered(x: Spec, dim: Dim, keepdim: bool, build: Callable[..., Any] | None) -> Rule:
    """A reduction of ``dim``, with ``build`` where it is split; without it, it cannot be."""
    equation, reduced = whole_equation(x, dim, keepdim)
    if build is None:
        return Rule(equation, blocked=reduced)
    lowering = Lowering(build, anywhere=True)
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
        # A maximum over devices may drop a NaN; one device would return it.
        lost = context.all_reduce(aten._to_copy.default(aten.isnan.default(found), dtype=x.dtype), "max")
        return aten.masked_fill.Scalar(whole, aten.gt.Scalar(lost, 0), float("nan"))

    found = _whole_or_lowered(x, dim, keepdim, None if x.dtype == torch.bool else build)
    if not floating:
        return found
    return replace(found, padded=dict.fromkeys(found.keep, Padding((math.inf if least else -math.inf,))))


rule(aten.amax.default)(lambda x, dim=None, keepdim=False: _extremum(aten.amax.default, x, dim, keepdim, least=False))
rule(aten.amin.default)(lambda x, dim=None, keepdim=False: _extremum(aten.amin.default, x, dim, keepdim, least=True))
rule(aten.max.default)(lambda x: _extremum(aten.max.default, x, None, False, least=False))
rule(aten.min.default)(lambda x: _extremum(aten.min.default, x, None, False, least=True))


def _first_extremum(extremum: Any, least: bool, outputs: int) -> Callable[..., Rule]:
    """Extrema along a dim and where they are first, or that alone; of all devices the first that has the extremum."""

    def rule_of(x: Spec, dim: int | None = None, keepdim: bool = False) -> Rule:
        def build(context: Any, x: Any, dim: int, keepdim: bool = False) -> Any:
            own = extremum(x, dim, keepdim)
            places = aten.add.Scalar(own[1], context.axis_index() * context.local_size(reduced))
            found = extremum(context.all_gather(own[0]), 0, True)
            places = aten.select.int(aten.gather.default(context.all_gather(places), 0, found[1]), 0, 0)
            return (aten.select.int(found[0], 0, 0), places) if outputs == 2 else places

        equation, reduced = whole_equation(x, dim, keepdim, outputs)
        if dim is None or not reduced:
            return Rule(equation, blocked=reduced)
        found = Rule(equation, keep=reduced, lower={reduced: Lowering(build)})
        if not x.dtype.is_floating_point:
            return found
        return replace(found, padded={reduced: Padding((math.inf if least else -math.inf,))})

    return rule_of


for _op, _place, _least in ((aten.max, aten.argmax, False), (aten.min, aten.argmin, True)):
    rule(_op.dim)(_first_extremum(_op.dim, _least, outputs=2))
    rule(_place.default)(_first_extremum(_op.dim, _least, outputs=1))


@rule(aten.prod.dim_int)
def product(x: Spec, dim: int, keepdim: bool = False, *, dtype: Any = None) -> Rule:
    """The product of the products that devices have."""

    def build(context: Any, *args: Any, **kwargs: Any) -> Any:
        return aten.prod.dim_int(context.all_gather(aten.prod.dim_int(*args, **kwargs)), 0)

    return _padded(_whole_or_lowered(x, dim, keepdim, build), 1.0)


def _padded(found: Rule, neutral: float) -> Rule:
    """A reduction whose padding holds what changes nothing."""
    return replace(found, padded=dict.fromkeys(found.keep + found.blocked, Padding((neutral,))))


def _vote(target: Any, every: bool) -> Callable[..., Rule]:
    """``any`` and ``all``: maxima and minima of zeros and ones."""

    def build(context: Any, *args: Any, **kwargs: Any) -> Any:
        found = target(*args, **kwargs)
        # Collectives have no maximum of booleans.
        votes = aten._to_copy.default(aten.logical_not.default(found) if every else found, dtype=torch.int32)
        some = aten.ne.Scalar(context.all_reduce(votes, "max"), 0)
        return aten.logical_not.default(some) if every else some

    def vote(x: Spec, dim: Dim = None, keepdim: bool = False) -> Rule:
        found = _whole_or_lowered(x, dim, keepdim, None if x.dtype == torch.uint8 else build)  # bytes give bytes
        return _padded(found, float(every))

    return vote


for _op, _every in ((aten.any, False), (aten.all, True)):
    for _overload in (_op.default, _op.dim, _op.dims):
        rule(_overload)(_vote(_overload, _every))


@rule(aten.logsumexp.default)
def logsumexp(x: Spec, dim: Dim, keepdim: bool = False) -> Rule:
    """``log(sum(exp(x - m))) + m`` with the maximum ``m``, or zero for ``m`` where that is infinite."""

    def build(context: Any, x: Any, dim: Any, keepdim: bool = False) -> Any:
        along = list(dim) if isinstance(dim, list | tuple) else [dim]
        largest = context.all_reduce(aten.amax.default(x, along, True), "max")
        # Infinity less infinity would be NaN: a row of minus infinities has the logarithm of 0.
        largest = aten.masked_fill.Scalar(largest, aten.isinf.default(largest), 0.0)
        exponential = aten.exp.default(aten.sub.Tensor(x, largest))
        total = context.all_reduce(aten.sum.dim_IntList(exponential, along, keepdim), "sum")
        shift = largest if keepdim else aten.sum.dim_IntList(largest, along, False)
        return aten.add.Tensor(aten.log.default(total), shift)

    found = _whole_or_lowered(x, dim, keepdim, build if x.dtype.is_floating_point and x.ndim else None)
    return _padded(found, -math.inf) if x.dtype.is_floating_point else found
