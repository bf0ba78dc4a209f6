"""What is left of a problem as an ILP, solved by HiGHS: the local polytope, with an optional memory constraint.

There is a binary column for each label and a continuous one for each finite entry of a factor's table. With binary
labels the entries need not be: their marginals fix them.
"""

from __future__ import annotations

import highspy
import numpy as np

from autopar.search.solver.highs import new_solver
from autopar.search.solver.problem import Floats, Ints, Minimum
from autopar.search.solver.workspace import Workspace

# HiGHS's tolerances are absolute (1e-6, 1e-7): seconds are scaled so that the incumbent costs this much.
OBJECTIVE_SCALE = 1e5
MEMORY_SCALE = 1e3
# Share of the objective by which the tolerances may make HiGHS's dual bound too high.
BOUND_SLACK = 1e-9


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
    solver = new_solver(seconds, mip_rel_gap=0.0, mip_abs_gap=gap * unit, mip_feasibility_tolerance=1e-7)
    solver.passModel(integer_program(graph, unit, budget))
    solver.run()
    status, info = solver.getModelStatus(), solver.getInfo()
    if status == highspy.HighsModelStatus.kInfeasible:
        return None, float("inf"), "MIP"
    timed_out = status != highspy.HighsModelStatus.kOptimal
    bound = graph.constant + info.mip_dual_bound / unit - BOUND_SLACK * abs(scale)
    labels = None
    if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        labels = read_labels(np.asarray(solver.getSolution().col_value), graph)
    return labels, bound if np.isfinite(bound) else -np.inf, "time limit" if timed_out else "MIP"


def integer_program(graph: Workspace, unit: float, budget: float | None) -> highspy.HighsLp:
    """The program for HiGHS.

    Columns: the labels of each live node, then the finite entries of each factor. Rows: one label per node; for each
    row of a factor's axis, its entries add up to its labels; memory last.

    Args:
        graph: Presolved core; factors of any arity.
        unit: Of the objective, in units a second.
        budget: Bytes allowed to the live nodes, or None.
    """
    nodes = graph.live_nodes()
    position = {n: i for i, n in enumerate(nodes)}
    labels, first = [graph.alive(n) for n in nodes], _first_columns(graph)
    sizes = np.diff(first)
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
    lower[: len(nodes)] = 1.0  # the rows of marginals add up to 0
    upper = lower.copy()
    if budget is not None:
        memory = np.concatenate([graph.memory[n][ls] for n, ls in zip(nodes, labels, strict=True)])
        per_byte = MEMORY_SCALE / (budget or 1.0)
        columns.append(np.flatnonzero(memory))
        rows.append(np.full(len(columns[-1]), next_row))
        values.append(memory[columns[-1]] * per_byte)
        lower, upper = np.append(lower, -np.inf), np.append(upper, budget * per_byte)
    column, row, value = np.concatenate(columns), np.concatenate(rows), np.concatenate(values)
    # HiGHS takes the matrix column by column.
    order = np.lexsort((row, column))
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = next_column, len(lower)
    lp.col_cost_ = np.concatenate(cost) * unit
    lp.col_lower_, lp.col_upper_ = np.zeros(next_column), np.ones(next_column)
    lp.row_lower_, lp.row_upper_ = lower, upper
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.searchsorted(column[order], np.arange(next_column + 1))
    lp.a_matrix_.index_, lp.a_matrix_.value_ = row[order], value[order]
    binary = int(first[-1])
    kinds = [highspy.HighsVarType.kInteger] * binary
    lp.integrality_ = kinds + [highspy.HighsVarType.kContinuous] * (next_column - binary)
    return lp


def columns_of(graph: Workspace) -> int:
    """How many columns the program of a workspace has."""
    return int(_first_columns(graph)[-1]) + sum(int(np.isfinite(f.table).sum()) for f in graph.factors.values())


def _first_columns(graph: Workspace) -> Ints:
    """The first column of each live node, and at the end the number of the columns of labels."""
    sizes = np.array([len(graph.alive(n)) for n in graph.live_nodes()], dtype=np.int64)
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def read_labels(values: Floats, graph: Workspace) -> Ints:
    """The label of each node that has the largest value; zero for nodes that are not live."""
    out = np.zeros(len(graph.cost), dtype=np.int64)
    for node, first in zip(graph.live_nodes(), _first_columns(graph), strict=False):
        labels = graph.alive(node)
        out[node] = labels[int(np.argmax(values[first : first + len(labels)]))]
    return out
