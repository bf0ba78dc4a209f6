"""The fastest labeling of those that known labelings make up together, of which each variable has its label in one.

The time of a step is a sum of maxima, see `autopar.search.overlap.step_time`: no weights of their rows find a plan that
balances the links of several axes, since each plan that sends along one of them costs no more than the mean. Among the
labels of known plans the maxima themselves are minimized: a program of a column for each region's time, each label and
each pair of labels, solved by HiGHS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import highspy
import numpy as np

from autopar.search.overlap.step_time import Floats, StepTime
from autopar.search.solver.highs import new_solver
from autopar.search.solver.ilp import OBJECTIVE_SCALE
from autopar.search.solver.problem import Ints, Problem

NODES = 300
"""Of the branch and bound: a limit that is the same on any machine."""

MOST_COLUMNS = 60_000

Spent = Callable[[Sequence[Ints]], Iterator[tuple[int, int | None, str, Floats]]]
"""Seconds in each region by label: see `autopar.search.formulation.connections.spent`."""


@dataclass
class _Program:
    """Columns and entries of the program."""

    cost: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    columns: list[Ints] = field(default_factory=list)
    rows: list[Ints] = field(default_factory=list)
    values: list[Floats] = field(default_factory=list)

    def column(self, count: int, cost: float, *, integer: bool) -> int:
        """Add columns, and say which is the first."""
        first = len(self.cost)
        self.cost += [cost] * count
        self.integer += [integer] * count
        return first

    def entries(self, rows: Ints, columns: Ints, values: Floats) -> None:
        """Add entries, all of one shape."""
        self.rows.append(rows.ravel())
        self.columns.append(columns.ravel())
        self.values.append(values.ravel())


def combined(
    problem: Problem,
    spent: Spent,
    step: StepTime,
    pool: Sequence[Ints],
    seconds: float,
) -> Ints | None:
    """Labels of all variables under which a step takes least, among those of a pool; None where none are found.

    Args:
        problem: forbids labels and pairs of them.
        spent: of some labels of each variable, the seconds that these spend in a region alone,
            ``(variable, None, region, [features, labels])``, and with each other, ``(variable, other, region,
            [features, labels, labels of the other])``.
        step: how the time follows from that.
        pool: labelings; the first one is the best known.
        seconds: time limit.
    """
    labels = [np.unique(column) for column in np.stack(pool).T]
    program, unit = _Program(), OBJECTIVE_SCALE / step_seconds(spent, step, pool[0])
    first = [program.column(len(own), 0.0, integer=len(own) > 1) for own in labels]
    upper: dict[int, float] = {}
    for own, at, node in zip(labels, first, problem.nodes, strict=True):
        upper |= {at + k: 0.0 for k in np.flatnonzero(~np.isfinite(node.cost[own])).tolist()}
    # Rows: one label for each variable; what is left of each region's time beside each of its rows; and marginals.
    rows = len(labels)
    program.entries(
        np.repeat(np.arange(len(labels)), [len(own) for own in labels]), np.arange(len(program.cost)),
        np.ones(len(program.cost)),
    )  # fmt: skip
    pairs: dict[tuple[int, int], Floats] = {}
    for e in problem.edges:
        table = e.table[np.ix_(e.u_group[labels[e.u]], e.v_group[labels[e.v]])]
        if e.u != e.v:
            pairs[e.u, e.v] = pairs.get((e.u, e.v), 0.0) + table
        else:
            upper |= {first[e.u] + k: 0.0 for k in np.flatnonzero(~np.isfinite(np.diagonal(table))).tolist()}
    lower: list[float] = [1.0] * rows
    at_pair: dict[tuple[int, int], int] = {}
    for (u, v), table in pairs.items():
        a, b = table.shape
        at = at_pair[u, v] = program.column(a * b, 0.0, integer=False)
        upper |= {at + k: 0.0 for k in np.flatnonzero(~np.isfinite(table)).tolist()}
        index = at + np.arange(a * b).reshape(a, b)
        for count, own, by in ((a, first[u], np.arange(a)[:, None]), (b, first[v], np.arange(b)[None, :])):
            program.entries(rows + np.broadcast_to(by, (a, b)), index, np.ones((a, b)))
            program.entries(rows + np.arange(count), own + np.arange(count), -np.ones(count))
            rows += count
            lower += [0.0] * count
    if len(program.cost) > MOST_COLUMNS:
        return None
    times: dict[str, tuple[int, int]] = {}
    equal = rows
    for u, v, region, features in spent(labels):
        at = first[u] if v is None else at_pair[u, v]
        flat = features.reshape(len(features), -1)
        used = np.flatnonzero(flat.any(axis=0))
        for affected in step.affected(region) if len(used) else ():
            factors = step.rows(affected)[region] @ flat[:, used] * unit
            if affected not in times:
                column = program.column(1, 1.0, integer=False)
                times[affected] = rows, column
                program.entries(rows + np.arange(len(factors)), np.full(len(factors), column), np.ones(len(factors)))
                rows += len(factors)
            where = times[affected][0] + np.broadcast_to(np.arange(len(factors))[:, None], factors.shape)
            program.entries(where, np.broadcast_to(at + used, factors.shape), -factors)
    return _solved(program, rows, equal, np.array(lower), upper, labels, first, seconds)


def step_seconds(spent: Spent, step: StepTime, labeling: Ints) -> float:
    """Seconds of a step under one labeling."""
    found: dict[str, Floats] = {}
    for _, _, region, features in spent([np.array([label]) for label in labeling]):
        own = features.reshape(len(features))
        found[region] = found[region] + own if region in found else own
    return step.seconds(found)


def _solved(
    program: _Program, rows: int, equal: int, lower: Floats, upper: Mapping[int, float], labels: Sequence[Ints],
    first: Sequence[int], seconds: float,
) -> Ints | None:  # fmt: skip
    column, row, value = (np.concatenate(x) for x in (program.columns, program.rows, program.values))
    order = np.lexsort((row, column))
    # Parallel edges are two entries of one place: they add up.
    column, row, value = column[order], row[order], value[order]
    new = np.concatenate([[True], (np.diff(column) != 0) | (np.diff(row) != 0)])
    starts = np.flatnonzero(new)
    column, row, value = column[starts], row[starts], np.add.reduceat(value, starts)
    count = len(program.cost)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = count, rows
    lp.col_cost_ = np.array(program.cost)
    bound = np.where(np.array(program.cost) > 0, np.inf, 1.0)
    for k, most in upper.items():
        bound[k] = most
    lp.col_lower_, lp.col_upper_ = np.zeros(count), bound
    lp.row_lower_ = np.concatenate([lower, np.zeros(rows - equal)])
    lp.row_upper_ = np.concatenate([lower, np.full(rows - equal, np.inf)])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.searchsorted(column, np.arange(count + 1))
    lp.a_matrix_.index_, lp.a_matrix_.value_ = row, value
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    lp.integrality_ = [kinds[integer] for integer in program.integer]
    solver = new_solver(seconds, mip_rel_gap=1e-4, mip_max_nodes=NODES)
    solver.passModel(lp)
    solver.run()
    if solver.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None
    values = np.asarray(solver.getSolution().col_value)
    return np.array(
        [own[int(np.argmax(values[at : at + len(own)]))] for own, at in zip(labels, first, strict=True)],
        dtype=np.int64,
    )
