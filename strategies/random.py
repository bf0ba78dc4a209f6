"""Random numbers; how a split one is drawn, as the whole and a slice of it or block by block, is up to the passes."""

from collections.abc import Sequence
from typing import Any

import torch

import autopar.draw  # noqa: F401  defines the operator
from autopar.strategy import Rule, Spec, letters, rule

aten = torch.ops.aten


@rule(torch.ops.autopar.draw.default)
def draw(distribution: str, parameters: Sequence[float], size: Sequence[int], order: Sequence[int], **_: Any) -> Rule:
    """Independent numbers, which may be split in any way; not so a permutation."""
    names = letters(len(size))
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
