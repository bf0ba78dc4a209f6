"""`Weights`: prices of kernels and communication under which the cost of a plan bounds the time of its step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import highspy
import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.ir.graph import Value, is_backward
from autopar.search.overlap.regions import BEFORE, BLOCKING_KINDS, CHUNKED
from autopar.search.overlap.step_time import FILLING, KERNELS, Floats, StepTime, feature
from autopar.search.solver.highs import new_solver

LEAST = 1e-3
"""Weight of each link where kernels hide what it sends: of two plans that take the same time, one sends less."""

CHAIN = 0.5
"""Weight, to begin with, of what the first or last unit communicates in a row, beside regions of few kernels."""

LEVEL, LEVEL_WITH_MEMORY = 0.5, 0.9
"""Between the bound and what plans say that bounds may reach: lower levels take smaller steps. The second where memory
has a price: the two plans next to the budget say nearly all (Llama-3-8B in 8 GiB: two steps in place of five)."""

STEPS = 1000
"""Of the quadratic solver: it may cycle, and then the weights with the highest bound by the cuts are tried instead."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Weights:
    """A weight for each row of each region, see `autopar.search.overlap.step_time`; those of a region sum to one.

    Attributes:
        step: how the time of a step follows from its regions.
        rows: weights by region; others have nearly all weight on kernels, or on what is communicated before these.
        of: the axes that are priced; None: all of them.
        chunks: whether chunks of products hide what they can; False: products and collectives are in one piece.
    """

    step: StepTime
    rows: Mapping[str, Floats] = field(default_factory=dict)
    of: tuple[int, ...] | None = None
    chunks: bool = True

    def prices(self, region: str) -> Floats:
        """The price of each feature of a region, in seconds a second."""
        step = self.step
        parts = [self._rows(r) @ step.rows(r)[region] for r in step.affected(region)]
        found: Floats = sum(parts[1:], parts[0])
        if self.of is not None:
            found = np.concatenate([found[:2], found[2:].reshape(-1, self.step.axes)[:, self.of].reshape(-1)])
        return found

    def of_kernels(self, node: fx.Node) -> tuple[float, float, float]:
        """Price of a second of an operator's kernels where it first runs, is recomputed, or runs once a step."""
        regions = self.step.regions
        filling = node in regions.filling
        first = self.prices(regions.names[node])[FILLING if filling else KERNELS]
        recomputed = first if is_backward(node) else self.prices(regions.of_recomputed(node))[KERNELS]
        return float(first), float(recomputed), float(self.prices(BEFORE)[KERNELS])

    def of_moves(self, value: Value, axes: int, reader: fx.Node | None) -> tuple[Floats, Floats, Floats]:
        """Prices of a second of each part of a move, see `MoveSeconds.chunked_seconds`, [2 + 3 axes] each.

        They are where the value is first moved, where it is once more in the backward pass, and once a step.

        Args:
            value: a node and the number of its result.
            axes: of the problem.
            reader: of the value, if there is one only.
        """
        found, regions = [], self.step.regions
        for backward, hoisted in ((False, False), (True, False), (False, True)):
            region, kind = regions.of_move(value, backward=backward, hoisted=hoisted, reader=reader)
            prices = self.prices(region)
            kernels = prices[KERNELS]
            sent, hidden = (prices[[feature(k, axis, axes) for axis in range(axes)]] for k in (kind, CHUNKED))
            messages, waits = self.messages(region, kind) * sent, kernels * (kind in BLOCKING_KINDS)
            found.append(np.concatenate([[kernels], sent, hidden, messages, [waits]]))
        return found[0], found[1], found[2]

    def messages(self, region: str, kind: int) -> Floats:
        """How many messages each move in a region counts as, on each axis of the problem."""
        found = self.step.messages(region, kind)
        return found if self.of is None else found[list(self.of)]

    def of_axes(self, axes: Sequence[int]) -> Weights:
        """The same prices for a problem that has some of the axes alone."""
        return replace(self, of=tuple(axes))

    def at_level(self, plans: Sequence[Mapping[str, Floats]], bound: float) -> tuple[Weights, float]:
        """The next weights to try, and seconds that no weights' bound exceeds, whatever other plans there are.

        Under any weights each plan costs at least what is minimized: plans are cuts of a concave function. The next
        weights are the nearest ones to these under which all plans cost at least `LEVEL` of what the cuts allow above
        the bound. C. Lemarechal, A. Nemirovskii, Y. Nesterov, "New variants of bundle methods", 1995.

        Args:
            plans: features of their regions.
            bound: the highest known one, that of these weights.
        """
        found, _, most = self.at_level_with_memory(plans, bound, None, 0.0)
        return found, most

    def at_level_with_memory(
        self, plans: Sequence[Mapping[str, Floats]], bound: float, excess: Sequence[float] | None, price: float
    ) -> tuple[Weights, float, float]:
        """The same, with a price of memory that is chosen together with the weights.

        Args:
            plans: features of their regions.
            bound: the highest known one, that of these weights and this price.
            excess: bytes of each plan beyond the budget; negative where it fits. None: memory has no price.
            price: seconds a byte.

        Returns:
            The weights, the price, and seconds that no bound exceeds.
        """
        regions = list(dict.fromkeys(r for features in plans for own in features for r in self.step.affected(own)))
        counts = [len(self.step.rows(r)[r]) for r in regions]
        ends = np.cumsum([0, *counts])
        # In units of a plan's time: HiGHS's tolerances are absolute.
        unit = max(self.step.seconds(plans[0]), 1e-30)
        cuts = np.array([np.concatenate([self.step.seconds_of_rows(r, f) for r in regions]) for f in plans]) / unit
        floor = np.concatenate([self._floor(r, n) for r, n in zip(regions, counts, strict=True)])
        center = np.concatenate([self._rows(r) for r in regions])
        share = LEVEL
        if excess is not None:  # the last column is a multiple of the price that is known
            cuts = np.column_stack([cuts, np.array(excess) * price / unit])
            floor, center, share = np.append(floor, 0.0), np.append(center, 1.0), LEVEL_WITH_MEMORY
        best = _highest(cuts, floor, ends)
        if best is None:  # Ctrl-C, or no plan fits
            return self, price, bound
        most = float((cuts @ best).min()) * unit
        level = (1 - share) * bound + share * most
        near = _nearest(cuts, level / unit, floor, ends, center)
        found = best if near is None else near
        each = zip(regions, itertools.pairwise(ends), strict=True)
        weights = replace(self, rows={r: found[a:b] for r, (a, b) in each})
        return weights, price * float(found[ends[-1] :].sum()), most

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


def _highest(cuts: Floats, floor: Floats, ends: Ints) -> Floats | None:
    """Weights under which the least of the cuts is highest; None if the solver was stopped."""
    solver, count = _program(floor, ends), len(floor)
    solver.addVar(-np.inf, np.inf)
    solver.changeColCost(count, -1.0)
    columns = np.arange(count + 1, dtype=np.int32)
    for cut in cuts:
        solver.addRow(0.0, np.inf, count + 1, columns, np.append(cut, -1.0))
    return _solution(solver, floor, ends)


def _nearest(cuts: Floats, level: float, floor: Floats, ends: Ints, center: Floats) -> Floats | None:
    """The nearest weights to some under which no cut is below a level; None where none were found."""
    solver, count = _program(floor, ends, qp_iteration_limit=STEPS), len(floor)
    columns = np.arange(count, dtype=np.int32)
    for cut in cuts:
        solver.addRow(level, np.inf, count, columns, cut)
    solver.changeColsCost(count, columns, -center)
    hessian = highspy.HighsHessian()
    hessian.dim_, hessian.format_ = count, highspy.HessianFormat.kTriangular
    hessian.start_, hessian.index_, hessian.value_ = np.arange(count + 1), np.arange(count), np.ones(count)
    solver.passHessian(hessian)
    return _solution(solver, floor, ends)


def _program(floor: Floats, ends: Ints, **options: int) -> highspy.Highs:
    """A program whose columns are weights of rows, and others; those of a region sum to one."""
    solver = new_solver(np.inf, **options)
    solver.addVars(len(floor), floor, np.full(len(floor), np.inf))
    for start, stop in itertools.pairwise(ends):
        columns = np.arange(start, stop, dtype=np.int32)
        solver.addRow(1.0, 1.0, len(columns), columns, np.ones(len(columns)))
    return solver


def _solution(solver: highspy.Highs, floor: Floats, ends: Ints) -> Floats | None:
    """Its weights, which sum to one exactly."""
    solver.run()
    solution = solver.getSolution()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    found = np.maximum(np.array(solution.col_value)[: len(floor)], floor)
    parts = [found[a:b] / found[a:b].sum() for a, b in itertools.pairwise(ends)]
    return np.concatenate([*parts, found[ends[-1] :]])
