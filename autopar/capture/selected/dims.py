"""Dims of which a mask selects some elements, and how they go through an operator.

In a trace, the size of what a mask selects is a symbol. A `Selected` dim has all elements, and knows the mask. Dims
that are merged or split keep what their factors were: rows of 3 numbers, seen as one dim, are ``[N, mask] x [3]``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.rules.rule import Rule


@dataclass(frozen=True)
class Factor:
    """Some elements of a dim.

    Attributes:
        size: how many there are with those that the mask leaves out.
        mask: number of the mask, a tensor of booleans ``[size]``; None: all are selected.
    """

    size: int
    mask: int | None = None


Selected = tuple[Factor, ...]
"""The factors of a dim, the slowest first; at least one has a mask, and no two beside each other have none."""

Dim = Selected | None
"""None: all of it is there."""

Dims = tuple[Dim, ...]
"""Of a tensor."""


def size_of(dim: Selected) -> int:
    """How many elements there are with those that are left out."""
    return math.prod(f.size for f in dim)


def merged(parts: Iterable[tuple[int, Dim]]) -> Dim:
    """One dim of several, each a size and what is selected of it."""
    factors: list[Factor] = []
    for size, dim in parts:
        for factor in (Factor(size),) if dim is None else dim:
            if factor.mask is None and factors and factors[-1].mask is None:
                factors[-1] = Factor(factors[-1].size * factor.size)
            elif factor.mask is not None or factor.size != 1:
                factors.append(factor)
    return tuple(factors) if any(f.mask is not None for f in factors) else None


def divided(dim: Dim, sizes: Sequence[int]) -> list[Dim] | None:
    """The dims of these sizes that a dim is split into; None if a mask would be."""
    if dim is None:
        return [None] * len(sizes)
    pending, found = list(dim), list[Dim]()
    for size in sizes:
        own: list[tuple[int, Dim]] = []
        missing = size
        while missing > 1:
            if not pending:
                return None
            first = pending.pop(0)
            if first.mask is None and first.size > missing and first.size % missing == 0:
                pending.insert(0, Factor(first.size // missing))
                first = Factor(missing)
            if missing % first.size:
                return None
            own.append((first.size, (first,)))
            missing //= first.size
        found.append(merged(own))
    return None if pending else found


def by_letter(rule: Rule, sizes: dict[str, int], inputs: Sequence[Dims]) -> dict[str, Dim] | str:
    """What is selected of each letter of an operator's rule; a text says why that cannot be told.

    Args:
        rule: of the call.
        sizes: of its letters.
        inputs: dims of its tensor arguments.
    """
    found: dict[str, Dim] = {}
    for letters, dims in zip(rule.inputs, inputs, strict=True):
        for group, dim in zip(letters, dims, strict=True):
            if not group and dim is not None:
                return "a mask of one element"
            parts = divided(dim, [sizes[c] for c in group]) if len(group) > 1 else [dim] * len(group)
            if parts is None:
                return "rows are divided between dims"
            for c, part in zip(group, parts, strict=True):
                if found.setdefault(c, part) != part:
                    return "rows of one mask meet others, and may not be as many"
    return found


def outputs_by_letter(rule: Rule, sizes: dict[str, int], letters: dict[str, Dim]) -> list[Dims]:
    """Dims of an operator's outputs, none of one that does not exist."""
    return [tuple(merged((sizes[c], letters.get(c)) for c in group) for group in dims or ()) for dims in rule.outputs]
