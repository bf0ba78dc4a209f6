"""`LayerMix`: a plan split over layers: the first members of each class have the states of one labeling, and so on.

Repeated layers share their layouts, but not their states: "20 of 32 layers recompute".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.search.solver.problem import Floats, Ints, Problem, Solution

ROUNDING = 1e-9
"""A share of a member that is rounding of the ends, and no member."""


@dataclass(frozen=True)
class LayerMix:
    """Labelings that differ in states only, and how many members of each class have which.

    Attributes:
        labelings: of the first members, of the next, and so on.
        ends: share of the members that have a labeling or one before it, rounded up class by class; the last is 1.
        cost: seconds.
        memory: bytes.
        price: the shadow price of memory: seconds that another byte saves, approximately; 0 if the budget has slack.
    """

    labelings: tuple[Ints, ...]
    ends: tuple[float, ...]
    cost: float
    memory: float
    price: float = 0.0

    @classmethod
    def of(cls, labeling: Solution, price: float = 0.0) -> LayerMix:
        """All members in the states of one labeling."""
        return cls((labeling.labels,), (1.0,), labeling.objective, labeling.memory, price)

    @property
    def shares(self) -> list[float]:
        """The share of the members that have each labeling."""
        return [end - start for start, end in zip((0.0, *self.ends), self.ends, strict=False)]

    def starts(self, count: int) -> list[int]:
        """The first member with each labeling, in a class of so many members, and at the end their number."""
        return [math.ceil(end * count - ROUNDING) for end in (0.0, *self.ends)]


def weights(ends: Sequence[float], counts: NDArray[np.int64]) -> Floats:
    """The share of each class's members that have each labeling, [labelings, classes]; see `LayerMix.ends`."""
    starts = np.ceil(np.outer([0.0, *ends], counts) - ROUNDING)
    found: Floats = np.diff(starts, axis=0) / counts
    return found


def mix_of(
    problem: Problem, labelings: Sequence[Ints], ends: Sequence[float], counts: NDArray[np.int64], price: float = 0.0
) -> LayerMix:
    """The mix with its cost and memory; an edge has the share of its second node.

    Args:
        problem: whose labels these are.
        labelings: see `LayerMix`.
        ends: of the labelings, see `LayerMix`.
        counts: members of each node's class.
        price: shadow price of memory, in seconds per byte.
    """
    cost = memory = 0.0
    for labels, share in zip(labelings, weights(ends, counts), strict=True):
        # Without weights of 0: times the inf of a forbidden label they would be NaN.
        known = [(w, n.cost[x], n.memory[x]) for w, n, x in zip(share, problem.nodes, labels, strict=True) if w]
        known += [(share[e.v], e.table[e.u_group[labels[e.u]], e.v_group[labels[e.v]]], 0.0)
                  for e in problem.edges if share[e.v]]  # fmt: skip
        cost += sum(float(w * seconds) for w, seconds, _ in known)
        memory += sum(float(w * size) for w, _, size in known)
    return LayerMix(tuple(labelings), tuple(ends), cost, memory, price)
