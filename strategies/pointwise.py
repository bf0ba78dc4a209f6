"""Operators that compute each element from the elements at the same position, with broadcasting.

They can be split along every dim. What differs is only which operands they are linear in: the tables below.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch

import autopar.ir.ops.accumulate  # noqa: F401  defines the operator
from autopar.rules.rule import Rule, Spec, dims, letters, rule

aten = torch.ops.aten

Linear = tuple[tuple[int, ...], ...]

FIRST: Linear = ((0,),)

NONLINEAR = (
    *(aten.abs, aten.sign, aten.sgn, aten.reciprocal, aten.rsqrt, aten.sqrt, aten.exp, aten.exp2, aten.expm1),
    *(
        aten.log,
        aten.log1p,
        aten.log2,
        aten.sin,
        aten.cos,
        aten.tan,
        aten.asin,
        aten.acos,
        aten.atan,
        aten.sinh,
        aten.cosh,
    ),
    *(aten.tanh, aten.erf, aten.floor, aten.ceil, aten.round, aten.trunc, aten.sigmoid, aten.relu, aten.silu),
    *(aten.gelu, aten.leaky_relu, aten.elu, aten.softplus, aten.hardtanh, aten.hardsigmoid, aten.hardswish, aten.mish),
    *(aten.clamp, aten.clamp_min, aten.clamp_max, aten.maximum, aten.minimum, aten.isnan, aten.isinf, aten.isfinite),
    *(aten.logical_not, aten.logical_and, aten.logical_or, aten.logical_xor, aten.bitwise_not, aten.floor_divide),
    *(aten.nan_to_num, aten.square, aten.atan2, aten.ones_like, aten.full_like, aten.empty_like),
)
"""Operators whose default overload is linear in no operand."""

ZERO = (aten.relu, aten.gelu, aten.silu, aten.tanh, aten.abs, aten.sign, aten.sin, aten.erf, aten.square, aten.sqrt)
"""Those of them that give zero for zero, whatever their other arguments."""

NONLINEAR_OVERLOADS = (
    *(op.Tensor for op in (aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.remainder, aten.fmod)),
    *(op.Scalar for op in (aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.remainder, aten.fmod)),
    *(op.Tensor for op in (aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor, aten.clamp)),
    *(op.Scalar for op in (aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor, aten.floor_divide, aten.fill)),
    *(aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar, aten.pow.Scalar, aten.div.Tensor_mode, aten.div.Scalar_mode),
    aten.round.decimals,
)

LINEAR_IN_FIRST = (
    *(
        op.default
        for op in (aten.neg, aten.clone, aten.alias, aten.detach, aten.zeros_like, aten.native_dropout_backward)
    ),
    *(op.default for op in (aten.silu_backward, aten.gelu_backward, aten.threshold_backward, aten.tanh_backward)),
    *(op.default for op in (aten.sigmoid_backward, aten.leaky_relu_backward, aten.elu_backward, aten.mish_backward)),
    *(op.default for op in (aten.hardtanh_backward, aten.softplus_backward, aten.hardsigmoid_backward)),
    *(aten.hardswish_backward.default, aten.div.Scalar, aten.mul.Scalar),
)

LINEAR: dict[Any, Linear] = {
    aten.where.self: ((1, 2),),
    aten.masked_fill.Tensor: ((0, 2),),
    aten.lerp.Scalar: ((0, 1),),
    aten.lerp.Tensor: ((0, 1),),
    aten.addcmul.default: ((0, 1), (0, 2)),
    aten.copy.default: ((1,),),
    aten.fill.Tensor: ((1,),),
}
"""Other sets of tensor operands in which an operator is jointly linear."""


def equation(tensors: list[Spec]) -> str:
    """Letters for operands that broadcast: a dim of size 1, or repeated, has none."""
    # Broadcasting aligns shapes at the last dim.
    padded = itertools.zip_longest(*(reversed(t.shape) for t in tensors), fillvalue=1)
    shape = [next((n for n in column if n != 1), 1) for column in padded][::-1]
    names = [c if n != 1 else "" for c, n in zip(letters(len(shape)), shape, strict=True)]
    inputs = []
    for t in tensors:
        aligned = names[len(shape) - t.ndim :]
        inputs.append(dims([c if n != 1 else "" for c, n in zip(aligned, t.shape, strict=True)]) or ".")
    return f"{','.join(inputs)}->{dims(names) or '.'}"


def pointwise(linear: Callable[..., Linear], *, zero: bool | None = None) -> Callable[..., Rule]:
    """A rule function for an operator with the linear sets of arguments that ``linear(*args, **kwargs)`` names."""

    def pointwise_rule(*args: Any, **kwargs: Any) -> Rule:
        # In the order of the equation: positional tensors, then those passed by name.
        given = {i: a for i, a in enumerate((*args, *kwargs.values())) if isinstance(a, Spec)}
        # A sum of booleans is no boolean: they are never Partial. Nor is a number, which may be in a tensor's place:
        # `torch.div(2.0, x)` is linear in no tensor.
        place = {i: place for place, (i, a) in enumerate(given.items()) if a.dtype != torch.bool}
        sets = linear(*args, **kwargs)
        valid = tuple(tuple(place[i] for i in s) for s in sets if all(i in place for i in s))
        return Rule(equation(list(given.values())), linear=valid, zero=zero)

    return pointwise_rule


def _sum(_: Any, other: Any, alpha: Any = 1) -> Linear:
    if isinstance(other, Spec):
        return ((0, 1),)
    # Adding 1 to each of several terms would add several.
    return FIRST if other == 0 else ()


def _product(_: Any, other: Any) -> Linear:
    # Bilinear: partial in either operand, but not in both, whose product has cross terms.
    return ((0,), (1,)) if isinstance(other, Spec) else FIRST


def _masked_fill(_: Spec, mask: Spec, value: Any) -> Linear:
    # Every term would be filled with the value, and the sum with a multiple of it.
    return FIRST if value == 0 else ()


def _cast(x: Spec, *, dtype: torch.dtype | None = None, **_: Any) -> Linear:
    # Rounding to integers is not linear, and a sum of masks is none.
    kinds = [d is None or d.is_floating_point or d.is_complex for d in (x.dtype, dtype)]
    return FIRST if all(kinds) else ()


def _always(linear: Linear) -> Callable[..., Linear]:
    return lambda *args, **kwargs: linear


rule(*(op.default for op in NONLINEAR if op not in ZERO), *NONLINEAR_OVERLOADS)(pointwise(_always(())))
rule(*(op.default for op in ZERO))(pointwise(_always(()), zero=True))
rule(*LINEAR_IN_FIRST)(pointwise(_always(FIRST)))
for _op, _sets in LINEAR.items():
    rule(_op)(pointwise(_always(_sets)))

rule(aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor)(pointwise(_sum))
rule(aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar)(pointwise(_sum))
rule(aten.mul.Tensor)(pointwise(_product))
# 0 / 0 is NaN: zeros in the padding do not stay zeros, though the operator is linear.
rule(aten.div.Tensor)(pointwise(_always(FIRST), zero=False))
rule(aten.addcdiv.default)(pointwise(_always(((0, 1),)), zero=False))
rule(aten.masked_fill.Scalar)(pointwise(_masked_fill))
rule(aten._to_copy.default)(pointwise(_cast))

SPECIAL = (
    *("acosh asinh atanh erfc erfinv lgamma digamma polygamma mvlgamma i0 sinc logit frac signbit angle".split()),
    *("hypot heaviside nextafter logaddexp logaddexp2 igamma igammac fmax fmin isposinf isneginf".split()),
    *("hardshrink softshrink special_entr special_ndtri special_log_ndtr special_erfcx special_i0e special_i1".split()),
    *("special_i1e special_bessel_j0 special_bessel_j1 special_modified_bessel_i0 special_zeta".split()),
)
"""Further operators, by name, whose default overload is linear in no operand."""

rule(*(getattr(aten, name).default for name in SPECIAL))(pointwise(_always(())))
rule(aten.clamp_min.Tensor, aten.clamp_max.Tensor, aten.copysign.Tensor, aten.copysign.Scalar)(pointwise(_always(())))
for _op in (aten.logit_backward, aten.hardshrink_backward, aten.softshrink_backward):
    rule(_op.default)(pointwise(_always(FIRST)))
for _op in (aten.deg2rad, aten.rad2deg, aten.real, aten.imag, aten._conj, aten._conj_physical, aten.polar):
    rule(_op.default)(pointwise(_always(FIRST)))
rule(aten.complex.default)(pointwise(_always(((0, 1),))))
# Its second operand is a slope for each channel: linear in it only where the first is negative.
rule(aten._prelu_kernel.default)(pointwise(_always(())))


@rule(torch.ops.autopar.accumulate.default)
def accumulate(term: Spec, op: str = "sum") -> Rule:
    """A sum of sums over devices is the same in either order; a maximum of sums is not."""
    # Partial terms may be accumulated and reduced once, after the last microbatch.
    names = letters(term.ndim) or "."
    return Rule(f"{names}->{names}", linear=((0,),) if op == "sum" else ())
