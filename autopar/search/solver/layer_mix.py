"""`LayerMix`: of the members of each class, the first in the states of one labeling, those behind them in another's.

Layers are laid out alike, and need not be treated alike: "20 of 32 layers recompute".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.search.solver.problem import Floats, Ints, Labeling, Problem

ROUNDING = 1e-9
"""So much of a member more than a whole one is none."""


@dataclass(frozen=True)
class LayerMix:
    """Labelings that differ in states alone, and how many members of each class have which.

    Attributes:
        labelings: of the first members, of those behind them, and so on.
        ends: share of the members, rounded up class by class, that have a labeling or one before it; the last is 1.
        cost: seconds.
        memory: bytes.
        price: seconds that a byte more saves, about; 0 if the budget does not bind.
    """

    labelings: tuple[Ints, ...]
    ends: tuple[float, ...]
    cost: float
    memory: float
    price: float = 0.0

    @classmethod
    def of(cls, labeling: Labeling, price: float = 0.0) -> LayerMix:
        """All members in the states of one labeling."""
        return cls((labeling.labels,), (1.0,), labeling.cost, labeling.memory, price)

    @property
    def shares(self) -> list[float]:
        """Of each labeling, the share of the members that have it."""
        return [end - start for start, end in zip((0.0, *self.ends), self.ends, strict=False)]

    def starts(self, count: int) -> list[int]:
        """Of a class of so many members, the first of each labeling, and the number of all behind them."""
        return [math.ceil(end * count - ROUNDING) for end in (0.0, *self.ends)]


def weights(ends: Sequence[float], counts: NDArray[np.int64]) -> Floats:
    """The share of each class's members that have each labeling, [labelings, classes]; see `LayerMix.ends`."""
    starts = np.ceil(np.outer([0.0, *ends], counts) - ROUNDING)
    found: Floats = np.diff(starts, axis=0) / counts
    return found


def mix_of(
    problem: Problem, labelings: Sequence[Ints], ends: Sequence[float], counts: NDArray[np.int64], price: float = 0.0
) -> LayerMix:
    """The mix with what it costs and needs; an edge counts as its second node does.

    Args:
        problem: whose labels these are.
        labelings: of the first members, and so on.
        ends: of the labelings, see `LayerMix`.
        counts: members of each node's class.
        price: seconds a byte.
    """
    cost = memory = 0.0
    for labels, share in zip(labelings, weights(ends, counts), strict=True):
        known = [(w, n.cost[x], n.memory[x]) for w, n, x in zip(share, problem.nodes, labels, strict=True) if w]
        known += [(share[e.v], e.table[e.u_group[labels[e.u]], e.v_group[labels[e.v]]], 0.0)
                  for e in problem.edges if share[e.v]]  # fmt: skip
        cost += sum(float(w * seconds) for w, seconds, _ in known)
        memory += sum(float(w * size) for w, _, size in known)
    return LayerMix(tuple(labelings), tuple(ends), cost, memory, price)
