"""Copies of parameters for the backward pass stay split along some axes alone, as restrictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.ir.node_info import info
from autopar.search.formulation.pins import Restrictions
from autopar.sharding.candidates import REPLICATE, strategies
from autopar.sharding.dims import Dims, Operator
from autopar.sharding.layer_classes import LayerClasses


def secondary_copies(
    dims: Dims, classes: LayerClasses, axes: Mapping[str, int], secondary: Sequence[str], restrictions: Restrictions
) -> Restrictions:
    """Restrictions by which copies are split along the axes of the pin ``secondary``, and along no other.

    Args:
        dims: of a program with copies (`autopar.passes.copy_for_backward`).
        classes: which nodes share a decision.
        axes: name and size of each mesh axis.
        secondary: the axes.
        restrictions: what is decided already.
    """
    if not secondary:
        return restrictions
    allowed = dict(restrictions.strategies)
    for key, members in classes.members.items():
        if members[0] in dims.operators and info(members[0]).secondary:
            operator = dims.operators[members[0]]
            # Several axes may each divide what they do not divide together.
            also = frozenset({REPLICATE} if len(secondary) > 1 else ())
            allowed[key] = tuple(
                _allowed(operator, n) | also if axis in secondary else frozenset({REPLICATE})
                for axis, n in axes.items()
            )
    return replace(restrictions, strategies=allowed)


def _allowed(operator: Operator, size: int) -> frozenset[str]:
    """Strategies that split a copy along an axis; what it does not divide is whole on every device."""
    every = [s for s in strategies(operator) if s.splits]
    splits = (s for s in every if all(operator.letters[c].factors[j].size % size == 0 for c, j in s.factors))
    return frozenset(s.name for s in splits if size > 1) or frozenset({REPLICATE})
