"""What is left of a problem as an ILP, solved by HiGHS: the local polytope, with an optional memory constraint.

There is a binary column for each label and a continuous one for each finite entry of a factor's table. With binary
labels the entries need not be: their marginals fix them.
"""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np

from autopar.search.solver.interrupt import obey
from autopar.search.solver.problem import Floats, Ints, Minimum
from autopar.search.solver.workspace import Workspace

# HiGHS's tolerances are absolute (1e-6, 1e-7): seconds are scaled so that the incumbent costs this much.
OBJECTIVE_SCALE = 1e5
MEMORY_SCALE = 1e3
# Share of the objective by which the tolerances may make HiGHS's dual bound too high.
BOUND_SLACK = 1e-9


@dataclass(frozen=True)
class IlpModel:
    """An ILP, stored by column: first the labels of each live node, then the finite entries of each factor.

    Attributes:
        cost: of each column.
        starts: where each column starts in ``rows`` and ``values``.
        rows: row of each coefficient.
        values: the coefficients.
        row_lower: of each row.
        row_upper: of each row.
        label_columns: how many columns are labels.
        nodes: the live nodes.
        labels: of each live node.
        first: the first column of each live node.
    """

    cost: Floats
    starts: Ints
    rows: Ints
    values: Floats
    row_lower: Floats
    row_upper: Floats
    label_columns: int
    nodes: list[int]
    labels: list[Ints]
    first: Ints


def solve_ilp(graph: Workspace, scale: float, gap: float, seconds: float, budget: float | None = None) -> Minimum:
    """Solve what is left of a problem to the gap.

    Args:
        graph: Presolved core; factors of any arity.
        scale: Magnitude of the objective.
        gap: Absolute gap at which to stop.
        seconds: Time limit.
        budget: Bytes allowed to the live nodes, or None.

    Returns:
        The best labels found of the live nodes, zero elsewhere, and a bound on all labelings of the workspace.
    """
    unit = OBJECTIVE_SCALE / (scale or 1.0)
    model = build_model(graph, budget)
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    for option, value in (
        ("output_flag", False), ("threads", 1), ("random_seed", 0), ("time_limit", max(seconds, 0.01)),
        ("mip_rel_gap", 0.0), ("mip_abs_gap", gap * unit), ("mip_feasibility_tolerance", 1e-7),
    ):  # fmt: skip
        solver.setOptionValue(option, value)
    obey(solver)
    solver.passModel(highs_lp(model, unit))
    solver.run()
    status, info = solver.getModelStatus(), solver.getInfo()
    if status == highspy.HighsModelStatus.kInfeasible:
        return Minimum(None, float("inf"), "MIP")
    timed_out = status != highspy.HighsModelStatus.kOptimal
    bound = graph.constant + info.mip_dual_bound / unit - BOUND_SLACK * abs(scale)
    labels = None
    if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        labels = read_labels(np.asarray(solver.getSolution().col_value), model, len(graph.cost))
    return Minimum(labels, bound if np.isfinite(bound) else -np.inf, "time limit" if timed_out else "MIP")


def build_model(graph: Workspace, budget: float | None) -> IlpModel:
    """Rows: one label per node; for each row of a factor's axis, its entries add up to its labels; memory last."""
    nodes = graph.live_nodes()
    position = {n: i for i, n in enumerate(nodes)}
    labels = [graph.alive(n) for n in nodes]
    sizes = np.array([len(ls) for ls in labels], dtype=np.int64)
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    columns, rows, values = [np.arange(first[-1])], [np.repeat(np.arange(len(nodes)), sizes)], [np.ones(first[-1])]
    cost = [graph.cost[n][ls] for n, ls in zip(nodes, labels, strict=True)]
    next_row, next_column = len(nodes), int(first[-1])
    for factor in graph.factors.values():
        where = np.nonzero(np.isfinite(factor.table))
        entries = np.arange(next_column, next_column + len(where[0]))
        cost.append(factor.table[where])
        next_column += len(entries)
        for axis, n in enumerate(factor.nodes):
            i = position[n]
            columns += [entries, first[i] + np.arange(sizes[i])]
            rows += [next_row + where[axis], next_row + factor.groups[axis][labels[i]]]
            values += [np.ones(len(entries)), -np.ones(sizes[i])]
            next_row += factor.table.shape[axis]
    lower = np.zeros(next_row)
    lower[: len(nodes)] = 1.0
    upper = lower.copy()
    if budget is not None:
        memory = np.concatenate([graph.memory[n][ls] for n, ls in zip(nodes, labels, strict=True)])
        unit = MEMORY_SCALE / (budget or 1.0)
        columns.append(np.flatnonzero(memory))
        rows.append(np.full(len(columns[-1]), next_row))
        values.append(memory[columns[-1]] * unit)
        lower, upper = np.append(lower, -np.inf), np.append(upper, budget * unit)
    column, row, value = np.concatenate(columns), np.concatenate(rows), np.concatenate(values)
    order = np.lexsort((row, column))
    starts = np.searchsorted(column[order], np.arange(next_column + 1))
    return IlpModel(
        np.concatenate(cost), starts, row[order], value[order], lower, upper, int(first[-1]), nodes, labels, first
    )


def highs_lp(model: IlpModel, unit: float) -> highspy.HighsLp:
    """The model with seconds times ``unit``, for HiGHS."""
    lp = highspy.HighsLp()
    columns = len(model.cost)
    lp.num_col_, lp.num_row_ = columns, len(model.row_lower)
    lp.col_cost_ = model.cost * unit
    lp.col_lower_, lp.col_upper_ = np.zeros(columns), np.ones(columns)
    lp.row_lower_, lp.row_upper_ = model.row_lower, model.row_upper
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = model.starts, model.rows, model.values
    kinds = [highspy.HighsVarType.kInteger] * model.label_columns
    lp.integrality_ = kinds + [highspy.HighsVarType.kContinuous] * (columns - model.label_columns)
    return lp


def read_labels(values: Floats, model: IlpModel, n: int) -> Ints:
    """The label of each of n nodes that has the largest value; zero for those that the model leaves out."""
    out = np.zeros(n, dtype=np.int64)
    for node, ls, c in zip(model.nodes, model.labels, model.first, strict=False):
        out[node] = ls[int(np.argmax(values[c : c + len(ls)]))]
    return out
