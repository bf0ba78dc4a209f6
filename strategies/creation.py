"""Tensors made from nothing, and triangles."""

from collections.abc import Sequence
from typing import Any

import torch

from autopar.strategy import Rule, Spec, letters, rule

aten = torch.ops.aten


@rule(aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format)
def full(size: Sequence[int], *_: Any, **__: Any) -> Rule:
    """One value everywhere: each device makes its own block."""
    return Rule(f"->{letters(len(size)) or '.'}", shapes=(0,))


@rule(aten.scalar_tensor.default)
def scalar_tensor(value: Any, **_: Any) -> Rule:
    """A tensor without dims."""
    return Rule("->.")


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(*_: Any, **__: Any) -> Rule:
    """Numbers in order: every device makes all of them, a split is a slice of that."""
    return Rule("->a", blocked="a")


@rule(aten.eye.default, aten.eye.m)
def eye(*_: Any, **__: Any) -> Rule:
    """The identity: made whole."""
    return Rule("->ab", blocked="ab")


@rule(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default)
def new(x: Spec, size: Sequence[int], *_: Any, **__: Any) -> Rule:
    """One value everywhere; ``x``, of which only the dtype matters, may lie in any way."""
    names = letters(x.ndim)
    if tuple(size) == x.shape:
        return Rule(f"{names or '.'}->{names or '.'}", shapes=(1,))
    return Rule(f"{names or '.'}->{letters(len(size), x.ndim) or '.'}", keep=names, shapes=(1,))


@rule(aten.triu.default, aten.tril.default)
def triangle(x: Spec, diagonal: int = 0) -> Rule:
    """Zero below or above a diagonal of the last two dims."""
    names = letters(x.ndim)
    return Rule(f"{names}->{names}", blocked=names[-2:], linear=((0,),) if x.dtype != torch.bool else ())
