"""Sums over the microbatches of a step: element by element, so they may be split, and reduced later, in any way."""

from autopar.accumulate import accumulate as operator
from autopar.strategy import Rule, Spec, letters, rule


@rule(operator)
def accumulate(term: Spec) -> Rule:
    """A sum of sums over devices is the same in either order."""
    names = letters(term.ndim) or "."
    return Rule(f"{names}->{names}", linear=((0,),))
