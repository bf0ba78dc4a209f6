"""Tensors made from nothing, and triangles."""

from collections.abc import Sequence
from typing import Any

import torch

import autopar.ir.ops.random  # noqa: F401  defines the operator
from autopar.rules.rule import Rule, Spec, letters, rule

aten = torch.ops.aten


@rule(aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format)
def full(size: Sequence[int], *_: Any, **__: Any) -> Rule:
    """One value everywhere: each device makes its own block."""
    # The size argument becomes the local one.
    return Rule(f"->{letters(len(size)) or '.'}", shapes=(0,))


@rule(aten.scalar_tensor.default)
def scalar_tensor(value: Any, **_: Any) -> Rule:
    """A tensor without dims."""
    return Rule("->.")


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(*_: Any, **__: Any) -> Rule:
    """Numbers in order: every device makes all of them, a split is a slice of that."""
    # A block of a range begins at another number, which no argument of the call could say on all ranks alike.
    return Rule("->a", blocked="a")


@rule(aten.eye.default, aten.eye.m)
def eye(*_: Any, **__: Any) -> Rule:
    """The identity: made whole."""
    return Rule("->ab", blocked="ab")


@rule(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default)
def new(x: Spec, size: Sequence[int], *_: Any, **__: Any) -> Rule:
    """One value everywhere; ``x``, of which only the dtype matters, may have any layout."""
    names = letters(x.ndim)
    # The usual case: split as ``x`` is, it needs nothing from other devices.
    if tuple(size) == x.shape:
        return Rule(f"{names or '.'}->{names or '.'}", shapes=(1,))
    return Rule(f"{names or '.'}->{letters(len(size), x.ndim) or '.'}", keep=names, shapes=(1,))


@rule(aten.triu.default, aten.tril.default)
def triangle(x: Spec, diagonal: int = 0) -> Rule:
    """Zero below or above a diagonal of the last two dims."""
    names = letters(x.ndim)
    return Rule(f"{names}->{names}", blocked=names[-2:], linear=((0,),) if x.dtype != torch.bool else ())


@rule(torch.ops.autopar.draw.default)
def draw(distribution: str, parameters: Sequence[float], size: Sequence[int], order: Sequence[int], **_: Any) -> Rule:
    """Independent numbers, which may be split in any way; not so a permutation."""
    names = letters(len(size))
    # Blocks drawn apart would repeat numbers.
    if distribution == "permutation":
        return Rule("->a", blocked="a", random=True)
    return Rule(f"->{names or '.'}", shapes=(2,), random=True)


@rule(aten.multinomial.default)
def multinomial(chances: Spec, samples: int, replacement: bool = False, **_: Any) -> Rule:
    """Rows draw one after the other, so each from another part of the stream."""
    names = letters(chances.ndim + 1)
    rows, options, drawn = names[:-2], names[-2], names[-1]
    return Rule(f"{rows}{options}->{rows}{drawn}", blocked=names, random=True)


@rule(aten.poisson.default)
def poisson(rate: Spec, **_: Any) -> Rule:
    """How many numbers it takes depends on the rates."""
    names = letters(rate.ndim)
    return Rule(f"{names or '.'}->{names or '.'}", blocked=names, random=True)


@rule(aten.rrelu_with_noise_functional.default)
def random_leaky_relu(x: Spec, noise: Spec, *_: Any, **__: Any) -> Rule:
    """A slope for each negative number, and only for these: how many it takes depends on the numbers before."""
    names = letters(x.ndim)
    return Rule(f"{names or '.'},{names or '.'}->{names or '.'},{names or '.'}", blocked=names, random=True)


@rule(aten.rrelu_with_noise_backward.default)
def random_leaky_relu_backward(grad: Spec, x: Spec, noise: Spec, *_: Any) -> Rule:
    """The gradient times the slopes."""
    names = letters(x.ndim) or "."
    return Rule(f"{names},{names},{names}->{names}", linear=((0,),))
