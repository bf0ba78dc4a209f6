"""The fastest labeling that known labelings make up together: each variable has its label in one of them.

The time of a step is a sum of maxima, see `autopar.search.overlap.step_time`: no weights of their rows find a plan that
balances the links of several axes, since each plan that sends along one of them costs no more than the mean. Among the
labels of known plans the maxima themselves are minimized: by a program with a column for the time of each region, for
each label and for each pair of labels, which HiGHS solves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import highspy
import numpy as np
from numpy.typing import NDArray

from autopar.search.overlap.step_time import Floats, StepTime
from autopar.search.solver.highs import new_solver
from autopar.search.solver.ilp import OBJECTIVE_SCALE
from autopar.search.solver.problem import Ints, Problem

NODES = 300
"""Of the branch and bound: a limit that is the same on any machine."""

MOST_COLUMNS = 60_000
"""Of a program that is tried."""

Spent = Callable[[Sequence[Ints]], Iterator[tuple[int, int | None, str, Floats]]]
"""Seconds in each region by label: see `autopar.search.formulation.connections.spent`."""


def combined(problem: Problem, spent: Spent, step: StepTime, pool: Sequence[Ints], seconds: float) -> Ints | None:
    """Labels of all variables under which a step takes least, among those of a pool; None where none are found.

    Args:
        problem: forbids labels and pairs of them.
        spent: of some labels of each variable, the seconds that these spend in a region alone, ``[features, labels]``,
            and with each other.
        step: how the time follows from that.
        pool: labelings, at least one.
        seconds: time limit.
    """
    labels = [np.unique(column) for column in np.stack(pool).T]
    program = _Program()
    for node, own in zip(problem.nodes, labels, strict=True):
        program.add_variable(np.isfinite(node.cost[own]))
    allowed: dict[tuple[int, int], Floats] = {}
    for e in problem.edges:
        table = e.table[np.ix_(e.u_group[labels[e.u]], e.v_group[labels[e.v]])]
        before = allowed.get((e.u, e.v))
        allowed[e.u, e.v] = table if before is None else before + table
    for (u, v), table in allowed.items():
        program.add_pair(u, v, np.isfinite(table))
    if len(program.most) > MOST_COLUMNS:
        return None
    unit = OBJECTIVE_SCALE / (step_seconds(spent, step, pool[0]) or 1.0)
    for u, other, region, features in spent(labels):
        for affected in step.affected(region):
            program.add_time(
                affected, u, other, step.rows(affected)[region] @ features.reshape(len(features), -1) * unit
            )
    chosen = program.solved(seconds)
    return None if chosen is None else np.array([own[k] for own, k in zip(labels, chosen, strict=True)], dtype=np.int64)


def step_seconds(spent: Spent, step: StepTime, labeling: Ints) -> float:
    """Seconds of a step under one labeling."""
    found: dict[str, Floats] = {}
    for _, _, region, features in spent([np.array([label]) for label in labeling]):
        own = features.reshape(len(features))
        found[region] = found[region] + own if region in found else own
    return step.seconds(found)


@dataclass
class _Program:
    """The program as it grows.

    Attributes:
        most: upper limit of each column.
        timed: whether the column is the time of a region.
        limits: of each row, the least and the largest sum.
        entries: rows, columns and values, some at a time.
        labels: first column of each variable, and how many labels it has.
        pairs: first column of each two variables.
        regions: first row of each region.
    """

    most: list[float] = field(default_factory=list)
    timed: list[bool] = field(default_factory=list)
    limits: list[tuple[float, float]] = field(default_factory=list)
    entries: list[tuple[Ints, Ints, Floats]] = field(default_factory=list)
    labels: list[tuple[int, int]] = field(default_factory=list)
    pairs: dict[tuple[int, int], int] = field(default_factory=dict)
    regions: dict[str, int] = field(default_factory=dict)

    def add_variable(self, allowed: NDArray[np.bool_]) -> None:
        """A variable of which one label is taken."""
        first = self._columns(allowed)
        self.labels.append((first, len(allowed)))
        row = self._rows(1, 1.0, 1.0)
        self._enter(np.array(row), first + np.arange(len(allowed)), 1.0)

    def add_pair(self, u: int, v: int, allowed: NDArray[np.bool_]) -> None:
        """Pairs of labels, of which the one is taken whose labels are: they add up to each label, from either side."""
        (of_u, rows), (of_v, columns) = self.labels[u], self.labels[v]
        if u == v:  # members of a class that read each other have one label
            for k in np.flatnonzero(~np.diagonal(allowed)).tolist():
                self.most[of_u + k] = 0.0
            return
        first = self.pairs[u, v] = self._columns(allowed.ravel())
        index = first + np.arange(rows * columns).reshape(rows, columns)
        for pairs, own, count in ((index, of_u, rows), (index.T, of_v, columns)):
            row = self._rows(count, 0.0, 0.0) + np.arange(count)
            self._enter(row[:, None], pairs, 1.0)
            self._enter(row, own + np.arange(count), -1.0)

    def add_time(self, region: str, u: int, v: int | None, seconds: Floats) -> None:
        """What labels, or pairs of them, add to each row of a region, ``[rows, labels]``: its time is at least each."""
        if region not in self.regions:
            column = self._columns(np.ones(1, dtype=bool), timed=True)
            self.regions[region] = self._rows(len(seconds), 0.0, np.inf)
            self._enter(self.regions[region] + np.arange(len(seconds)), np.array(column), 1.0)
        first = self.labels[u][0] if v is None else self.pairs[u, v]
        rows, columns = np.nonzero(seconds)
        self._enter(self.regions[region] + rows, first + columns, -seconds[rows, columns])

    def solved(self, seconds: float) -> list[int] | None:
        """The label of each variable, counted among its own; None if none are found."""
        lp = self._lp()
        solver = new_solver(seconds, mip_rel_gap=1e-4, mip_max_nodes=NODES)
        solver.passModel(lp)
        solver.run()
        if solver.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        values = np.asarray(solver.getSolution().col_value)
        return [int(np.argmax(values[first : first + count])) for first, count in self.labels]

    def _lp(self) -> highspy.HighsLp:
        row, column, value = (np.concatenate(parts) for parts in zip(*self.entries, strict=True))
        # HiGHS takes the matrix column by column, and each place once: what parallel edges take adds up.
        order = np.lexsort((row, column))
        row, column, value = row[order], column[order], value[order]
        begins = np.flatnonzero(np.concatenate([[True], (np.diff(column) != 0) | (np.diff(row) != 0)]))
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.most), len(self.limits)
        lp.col_cost_ = np.array(self.timed, dtype=np.float64)
        lp.col_lower_, lp.col_upper_ = np.zeros(len(self.most)), np.array(self.most)
        lp.row_lower_, lp.row_upper_ = np.array(self.limits).T
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_ = np.searchsorted(column[begins], np.arange(len(self.most) + 1))
        lp.a_matrix_.index_, lp.a_matrix_.value_ = row[begins], np.add.reduceat(value, begins)
        # With whole labels the pairs need not be: their sums fix them.
        kinds = np.full(len(self.most), highspy.HighsVarType.kContinuous)
        for first, count in self.labels:
            kinds[first : first + count] = highspy.HighsVarType.kInteger
        lp.integrality_ = kinds.tolist()
        return lp

    def _columns(self, allowed: NDArray[np.bool_], *, timed: bool = False) -> int:
        first = len(self.most)
        self.most += [np.inf] if timed else allowed.astype(float).tolist()
        self.timed += [timed] * len(allowed)
        return first

    def _rows(self, count: int, least: float, most: float) -> int:
        first = len(self.limits)
        self.limits += [(least, most)] * count
        return first

    def _enter(self, rows: Ints, columns: Ints, values: Floats | float) -> None:
        every = np.broadcast_arrays(rows, columns, values)
        self.entries.append((every[0].ravel(), every[1].ravel(), every[2].ravel().astype(np.float64)))
