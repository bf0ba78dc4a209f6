"""Sums over the microbatches of a step: element by element, so they may be split, and reduced later, in any way."""

import torch

import autopar.accumulate  # noqa: F401  defines the operator
from autopar.strategy import Rule, Spec, letters, rule


@rule(torch.ops.autopar.accumulate.default)
def accumulate(term: Spec) -> Rule:
    """A sum of sums over devices is the same in either order."""
    names = letters(term.ndim) or "."
    return Rule(f"{names}->{names}", linear=((0,),))
