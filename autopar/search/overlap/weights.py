"""`Weights`: prices of kernels and communication under which the cost of a plan bounds the time of its step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from torch import fx

from autopar.ir.graph import Value, is_backward
from autopar.search.overlap.regions import BEFORE
from autopar.search.overlap.step_time import FILLING, KERNELS, Floats, StepTime, feature

LEAST = 1e-3
"""Weight of each link where kernels hide what it sends: of two plans that take the same time, one sends less."""


@dataclass(frozen=True, eq=False)
class Weights:
    """A weight for each row of each region, see `autopar.search.overlap.step_time`; those of a region sum to one.

    Attributes:
        step: how the time of a step follows from its regions.
        rows: weights by region; others have nearly all weight on kernels.
        axis: the only axis of the problem that is priced; None: all of them.
    """

    step: StepTime
    rows: Mapping[str, Floats] = field(default_factory=dict)
    axis: int | None = None

    def prices(self, region: str) -> Floats:
        """The price of each feature of a region, in seconds a second; without regions that axis has all features."""
        rows = self.step.rows(region)
        found: Floats = self._rows(region, len(rows)) @ rows
        if self.axis is not None:
            found = np.concatenate([found[:2], found[2 + self.axis :: self.step.axes]])
        return found

    def of_kernels(self, node: fx.Node) -> tuple[float, float, float]:
        """Price of a second of an operator's kernels where it first runs, is recomputed, or runs once a step."""
        regions = self.step.regions
        filling = node in regions.filling
        first = self.prices(regions.names[node])[FILLING if filling else KERNELS]
        again = first if is_backward(node) else self.prices(regions.again(node))[KERNELS]
        return float(first), float(again), float(self.prices(BEFORE)[KERNELS])

    def of_moves(self, value: Value, axes: int, reader: fx.Node | None) -> tuple[Floats, Floats, Floats]:
        """Prices of a second of a move's kernels, and of its collectives on each axis, [1 + axes] each.

        They are where the value is first moved, where it is once more in the backward pass, and once a step.

        Args:
            value: a node and the number of its result.
            axes: of the problem.
            reader: of the value, if there is one only.
        """
        found = []
        for backward, hoisted in ((False, False), (True, False), (False, True)):
            region, kind = self.step.regions.of_move(value, backward=backward, hoisted=hoisted, reader=reader)
            prices = self.prices(region)
            found.append(prices[[KERNELS, *(feature(kind, axis, axes) for axis in range(axes))]])
        return found[0], found[1], found[2]

    def of_axis(self, axis: int) -> Weights:
        """The same prices for a problem that has one of the axes alone."""
        return replace(self, axis=axis)

    def _rows(self, region: str, count: int) -> Floats:
        found = self.rows.get(region)
        if found is None:
            found = np.zeros(count)
            if region != BEFORE:
                found[2 : 2 + self.step.axes] = LEAST
            found[0] = 1 - found.sum()
        return found

    def towards(self, features: Mapping[str, Floats]) -> Weights:
        """Weights at which the rows count that are the longest of a plan, from the features of its regions."""
        rows = {}
        for region, own in features.items():
            seconds = self.step.rows(region) @ own
            found = np.zeros(len(seconds))
            found[2 : 2 + self.step.axes] = LEAST * (region != BEFORE)
            found[int(seconds.argmax())] += 1 - found.sum()
            rows[region] = found
        return replace(self, rows=rows)

    def between(self, other: Weights) -> Weights:
        """The mean of two."""
        regions = dict.fromkeys((*self.rows, *other.rows))
        count = {region: len(self.step.rows(region)) for region in regions}
        rows = {r: (self._rows(r, count[r]) + other._rows(r, count[r])) / 2 for r in regions}
        return replace(self, rows=rows)

    def same(self, other: Weights) -> bool:
        """Whether both are equal in each region."""
        regions = dict.fromkeys((*self.rows, *other.rows))
        count = {region: len(self.step.rows(region)) for region in regions}
        return all(np.array_equal(self._rows(r, count[r]), other._rows(r, count[r])) for r in regions)
