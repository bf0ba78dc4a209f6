"""Known labelings make up one that takes least, as all of what they make up says when it is looked at one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.program import Program
from autopar.search.overlap.buckets import Unit
from autopar.search.overlap.combine import combined, step_seconds
from autopar.search.overlap.regions import Regions
from autopar.search.overlap.step_time import Floats, StepTime, no_features
from autopar.search.solver.problem import Edge, Ints, Node, Problem, evaluate

AXES = 2
NAMES = ("first forward", "blocks forward", "blocks backward", "last backward")
UNITS = dict.fromkeys(NAMES, (Unit(1.0),) * 2)
REGIONS = Regions(
    cast(Program, None), {}, UNITS, NAMES[:2], (NAMES[3], NAMES[2]), NAMES[2], frozenset(),
    frozenset(), frozenset(), {}, frozenset(), {},
)  # fmt: skip


class Case:
    """A random problem whose labels and pairs spend time in regions at random."""

    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.sizes = draw.integers(2, 4, size=4)
        size = len(no_features(AXES))
        self.own = [(NAMES[draw.integers(4)], draw.random((size, n)) * (draw.random((size, n)) < 0.4))
                    for n in self.sizes]  # fmt: skip
        ends = [(0, 1), (1, 2), (2, 3), (3, 0), (2, 2)]
        self.pairs = [(u, v, NAMES[draw.integers(4)], draw.random((size, self.sizes[u], self.sizes[v])))
                      for u, v in ends]  # fmt: skip
        nodes = tuple(Node(f"{i}", np.where(draw.random(n) < 0.1, np.inf, 0.0), np.zeros(n))
                      for i, n in enumerate(self.sizes))  # fmt: skip
        edges = tuple(
            Edge(u, v, np.arange(self.sizes[u]), np.arange(self.sizes[v]),
                 np.where(draw.random((self.sizes[u], self.sizes[v])) < 0.1, np.inf, 0.0))
            for u, v in ends
        )  # fmt: skip
        self.problem = Problem(nodes, edges)
        self.step = StepTime(REGIONS, AXES, int(draw.integers(1, 3)), UNITS, limits=(0.0, 2.0))
        self.pool = [np.array([draw.integers(n) for n in self.sizes]) for _ in range(3)]

    def spent(self, labels: Sequence[Ints]) -> Iterator[tuple[int, int | None, str, Floats]]:
        for i, (region, features) in enumerate(self.own):
            yield i, None, region, features[:, labels[i]]
        for u, v, region, features in self.pairs:
            among = features[:, labels[u][:, None], labels[v][None, :]]
            yield (u, None, region, np.diagonal(among, axis1=1, axis2=2)) if u == v else (u, v, region, among)

    def seconds(self, labels: Ints) -> float:
        allowed = np.isfinite(evaluate(self.problem, labels)[0])
        return step_seconds(self.spent, self.step, labels) if allowed else np.inf


@given(st.integers(0, 2**32 - 1))
def test_the_fastest_of_what_labelings_make_up(seed: int) -> None:
    case = Case(seed)
    every = itertools.product(*(sorted(set(column)) for column in np.stack(case.pool).T))
    least = min(case.seconds(np.array(labels)) for labels in every)
    found = combined(case.problem, case.spent, case.step, case.pool, 60.0)
    if found is None:
        assert least == np.inf
    else:
        assert case.seconds(found) == pytest.approx(least, rel=2e-4)
        assert all(label in column for label, column in zip(found, np.stack(case.pool).T, strict=True))
