"""The canonical form of a captured graph: what dimension analysis, rules and fingerprints see."""

from __future__ import annotations

from autopar.passes.canonicalize import canonicalize
from autopar.passes.canonicalize_random import canonicalize_random
from autopar.passes.canonicalize_strides import canonicalize_strides
from autopar.program import Program


def canonical(program: Program) -> Program:
    """Bring a program into canonical form; computes the same.

    Strides come first: they are those of the captured graph.
    """
    return canonicalize(canonicalize_random(canonicalize_strides(program)))
