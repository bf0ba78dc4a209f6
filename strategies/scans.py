"""Scans: running sums, products and extrema, and linear recurrences, of which devices may have blocks.

Each scans its own, and joins it with what the devices before it have in all, of which each sends a row.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from autopar.ir.ops.sequence import halo
from autopar.ir.ops.sequence.linear_scan import linear_scan
from autopar.ir.ops.sequence.own_rows import filled_but
from autopar.ir.ops.sequence.scan import reverse_cumsum
from autopar.rules.rule import Lowering, Padding, Rule, RuleFunction, Spec, letters, rule

aten = torch.ops.aten


def _scan(target: Any, join: Any, reduce: Callable[..., Any], neutral: float, back: bool = False) -> RuleFunction:
    """A scan of blocks: each device's own, joined with what the devices before it have in all, one row of each."""

    def scan(x: Spec, dim: int, *, dtype: Any = None) -> Rule:
        linear = ((0,),) if neutral == 0 and x.dtype != torch.bool else ()
        names, given = letters(x.ndim), x.dtype
        if not x.ndim or (given is not None and given.is_complex):
            return Rule(f"{names or '.'}->{names or '.'}", blocked=names[dim] if x.ndim else "", linear=linear)
        along = dim % x.ndim
        made = dtype or (torch.int64 if given is not None and not given.is_floating_point else given)
        # What devices have in all is added up in the precision in which a kernel does it, and rounded once.
        wide = torch.float32 if made in (torch.float16, torch.bfloat16) else made

        def build(context: Any, x: Any, *_: Any, **kwargs: Any) -> Any:
            own, size = target(x, along, **kwargs), context.local_size(names[along])
            first, end = (0, 1) if back else (size - 1, size)
            total = aten.slice.Tensor(own, along, first, end) if made == wide else reduce(x, along, True, dtype=wide)
            others = halo.before(context, total, lambda every: reduce(every, 0, False, dtype=wide), neutral, back)
            return join(own, others if made == wide else aten._to_copy.default(others, dtype=made))

        # What is behind the end is read by nothing before it, or is what changes nothing.
        padding = Padding((float(neutral),), float(neutral)) if back else Padding()
        lower, padded = {names[along]: Lowering(build)}, {names[along]: padding}
        return Rule(f"{names}->{names}", lower=lower, linear=linear, padded=padded)

    return scan


def _sum(x: Any, dim: int, keepdim: bool, dtype: torch.dtype) -> Any:
    return aten.sum.dim_IntList(x, [dim], keepdim, dtype=dtype)


def _logsumexp(x: Any, dim: int, keepdim: bool, dtype: torch.dtype) -> Any:
    return aten.logsumexp.default(aten._to_copy.default(x, dtype=dtype), [dim], keepdim)


rule(aten.cumsum.default)(_scan(aten.cumsum.default, aten.add.Tensor, _sum, 0))
rule(reverse_cumsum)(_scan(reverse_cumsum, aten.add.Tensor, _sum, 0, back=True))
rule(aten.cumprod.default)(_scan(aten.cumprod.default, aten.mul.Tensor, aten.prod.dim_int, 1))
rule(aten.logcumsumexp.default)(_scan(aten.logcumsumexp.default, aten.logaddexp.default, _logsumexp, -math.inf))


@rule(linear_scan)
def linear_scan_(factors: Spec, terms: Spec, dim: int, back: bool = False) -> Rule:
    """A linear recurrence of blocks: each device's own, and what those before it have in all, times its factors."""
    names, along = letters(terms.ndim), dim % terms.ndim
    equation, is_complex = f"{names},{names}->{names}", terms.dtype is not None and terms.dtype.is_complex
    # Two passes over all elements, each of half as many steps as the one before.
    between = 5.0 * math.prod(terms.shape) * getattr(terms.dtype, "itemsize", 4)
    if is_complex:
        return Rule(equation, blocked=names[along], linear=((1,),), between=between)

    def build(context: Any, factors: Any, terms: Any, *_: Any) -> Any:
        own, size = linear_scan(factors, terms, along, back), context.local_size(names[along])
        grown = aten.cumprod.default(aten.flip.default(factors, [along]) if back else factors, along)
        grown = aten.flip.default(grown, [along]) if back else grown
        last, first = (0, context.axis_index() + 1) if back else (size - 1, 0)
        end = context.parts if back else context.axis_index()
        ends = [aten.slice.Tensor(x, along, last, last + 1) for x in (grown, own)]
        every = context.all_gather(aten.cat.default(ends, along))
        # Devices that are not before this one change nothing: the last of all has what those before it make.
        parts = (aten.slice.Tensor(every, along + 1, i, i + 1) for i in range(2))
        others = linear_scan(*(filled_but(x, first, end, 1 - i) for i, x in enumerate(parts)), 0, back)
        return aten.addcmul.default(own, grown, aten.select.int(others, 0, 0 if back else context.parts - 1))

    return Rule(equation, lower={names[along]: Lowering(build)}, linear=((1,),), between=between)


def _running_extremum(target: Any, least: bool) -> RuleFunction:
    """Running extrema and where they are last: each device's own, or those of the devices before it."""
    beyond = aten.gt.Tensor if least else aten.lt.Tensor

    def scan(x: Spec, dim: int) -> Rule:
        dtype, names = x.dtype, letters(x.ndim) or "."
        if not x.ndim or dtype == torch.bool:
            return Rule(f"{names}->{names},{names}", blocked=names[dim] if x.ndim else "")
        along, floating = dim % x.ndim, dtype.is_floating_point
        sign = 1.0 if least else -1.0
        neutral = sign * math.inf if floating else getattr(torch.iinfo(dtype), "max" if least else "min")

        def build(context: Any, x: Any, *_: Any) -> Any:
            own, size = target(x, along), context.local_size(names[along])
            places = aten.add.Scalar(own[1], context.axis_index() * size)
            ends = (aten.slice.Tensor(t, along, size - 1, size) for t in (own[0], places))
            every, there = (context.all_gather(t) for t in ends)
            found = target(filled_but(every, 0, context.axis_index(), neutral), 0)
            last = context.parts - 1
            before, at = (aten.slice.Tensor(found[i], 0, last, last + 1) for i in range(2))
            at = aten.select.int(aten.gather.default(there, 0, at), 0, 0)
            before = aten.select.int(before, 0, 0)
            taken = beyond(own[0], before)
            if floating:  # a NaN stays, until the next one
                lost = aten.logical_and.default(
                    aten.isnan.default(before), aten.logical_not.default(aten.isnan.default(own[0]))
                )
                taken = aten.logical_or.default(taken, lost)
            return aten.where.self(taken, before, own[0]), aten.where.self(taken, at, places)

        lower, padded = {names[along]: Lowering(build)}, {names[along]: Padding()}
        return Rule(f"{names}->{names},{names}", lower=lower, padded=padded)

    return scan


rule(aten.cummax.default)(_running_extremum(aten.cummax.default, least=False))
rule(aten.cummin.default)(_running_extremum(aten.cummin.default, least=True))
