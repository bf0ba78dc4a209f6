"""`Weights`: prices of kernels and communication under which the cost of a plan bounds the time of its step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import fx

from autopar.ir.graph import Value, is_backward
from autopar.search.overlap.regions import BEFORE, CHUNKED
from autopar.search.overlap.step_time import FILLING, KERNELS, Floats, StepTime, feature
from autopar.search.solver.highs import new_solver

LEAST = 1e-3
"""Weight of each link where kernels hide what it sends: of two plans that take the same time, one sends less."""

CHAIN = 0.5
"""Weight, to begin with, of what the first or last unit communicates in a row, beside regions of few kernels."""


@dataclass(frozen=True, eq=False)
class Weights:
    """A weight for each row of each region, see `autopar.search.overlap.step_time`; those of a region sum to one.

    Attributes:
        step: how the time of a step follows from its regions.
        rows: weights by region; others have nearly all weight on kernels, or on what is communicated before these.
        axis: the only axis of the problem that is priced; None: all of them.
        chunks: whether chunks of products hide what they can; False: products and collectives are in one piece.
    """

    step: StepTime
    rows: Mapping[str, Floats] = field(default_factory=dict)
    axis: int | None = None
    chunks: bool = True

    def prices(self, region: str) -> Floats:
        """The price of each feature of a region, in seconds a second; without regions that axis has all features."""
        step = self.step
        parts = [self._rows(r) @ step.rows(r)[region] for r in step.affected(region)]
        found: Floats = sum(parts[1:], parts[0])
        if self.axis is not None:
            found = np.concatenate([found[:2], found[2 + self.axis :: self.step.axes]])
        return found

    def of_kernels(self, node: fx.Node) -> tuple[float, float, float]:
        """Price of a second of an operator's kernels where it first runs, is recomputed, or runs once a step."""
        regions = self.step.regions
        filling = node in regions.filling
        first = self.prices(regions.names[node])[FILLING if filling else KERNELS]
        recomputed = first if is_backward(node) else self.prices(regions.of_recomputed(node))[KERNELS]
        return float(first), float(recomputed), float(self.prices(BEFORE)[KERNELS])

    def of_moves(self, value: Value, axes: int, reader: fx.Node | None) -> tuple[Floats, Floats, Floats]:
        """Prices of a second of a move's kernels, of its collectives on each axis, and where chunks hide these.

        They are where the value is first moved, where it is once more in the backward pass, and once a step,
        [1 + 2 axes] each.

        Args:
            value: a node and the number of its result.
            axes: of the problem.
            reader: of the value, if there is one only.
        """
        found = []
        for backward, hoisted in ((False, False), (True, False), (False, True)):
            region, kind = self.step.regions.of_move(value, backward=backward, hoisted=hoisted, reader=reader)
            prices = self.prices(region)
            found.append(prices[[KERNELS, *(feature(k, axis, axes) for k in (kind, CHUNKED) for axis in range(axes))]])
        return found[0], found[1], found[2]

    def of_axis(self, axis: int) -> Weights:
        """The same prices for a problem that has one of the axes alone."""
        return replace(self, axis=axis)

    def between(self, other: Weights) -> Weights:
        """The mean of two."""
        regions = dict.fromkeys((*self.rows, *other.rows))
        return replace(self, rows={r: (self._rows(r) + other._rows(r)) / 2 for r in regions})

    def best(self, plans: Sequence[Mapping[str, Floats]]) -> Weights:
        """The weights under which the cheapest of some plans costs the most: no plan has to be cheaper.

        J. E. Kelley, "The cutting-plane method for solving convex programs", 1960: each plan is a cut.

        Args:
            plans: features of their regions.
        """
        regions = list(dict.fromkeys(r for features in plans for own in features for r in self.step.affected(own)))
        seconds = [[self.step.seconds_of_rows(r, features) for r in regions] for features in plans]
        counts = [len(rows) for rows in seconds[0]]
        solver = new_solver(np.inf)
        # One column for the least cost, then one for each row of each region.
        least = np.concatenate([[-np.inf], *(self._floor(r, n) for r, n in zip(regions, counts, strict=True))])
        cost = np.where(np.arange(len(least)) == 0, -1.0, 0.0)
        solver.addVars(len(least), least, np.full(len(least), np.inf))
        solver.changeColsCost(len(least), np.arange(len(least), dtype=np.int32), cost)
        # In units of a plan's time: HiGHS's tolerances are absolute.
        unit = max(self.step.seconds(plans[0]), 1e-30)
        for rows in seconds:
            values = np.concatenate([[1.0], *(-row / unit for row in rows)])
            solver.addRow(-np.inf, 0.0, len(least), np.arange(len(least), dtype=np.int32), values)
        ends = np.cumsum([1, *counts])
        for start, stop in itertools.pairwise(ends):
            columns = np.arange(start, stop, dtype=np.int32)
            solver.addRow(1.0, 1.0, len(columns), columns, np.ones(len(columns)))
        solver.run()
        solution = solver.getSolution()
        if not solution.value_valid:  # Ctrl-C
            return self
        found = np.maximum(np.array(solution.col_value), least)
        each = zip(regions, itertools.pairwise(ends), strict=True)
        return replace(self, rows={r: found[a:b] / found[a:b].sum() for r, (a, b) in each})

    def _floor(self, region: str, count: int) -> Floats:
        """The least weight of each row."""
        found = np.zeros(count)
        found[2 : 2 + self.step.axes] = LEAST * (region != BEFORE)
        return found

    def _rows(self, region: str) -> Floats:
        found = self.rows.get(region)
        if found is None:
            found = self._floor(region, len(self.step.rows(region)[region]))
            rest = 1 - found.sum()
            found[-1] += CHAIN * rest * self.step.chained(region)
            found[0] += 1 - found.sum()
        return found
