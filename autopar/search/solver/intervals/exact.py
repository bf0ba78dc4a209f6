"""Small instances: an ILP whose limits are added at the points that its solution exceeds, until it exceeds none."""

from __future__ import annotations

import time
from dataclasses import replace

import highspy
import numpy as np

from autopar.search.solver.eliminate import fold, unfold
from autopar.search.solver.highs import new_solver, requested
from autopar.search.solver.ilp import (
    BOUND_SLACK,
    MEMORY_SCALE,
    OBJECTIVE_SCALE,
    columns_of,
    integer_program,
    read_labels,
)
from autopar.search.solver.intervals.instance import Instance
from autopar.search.solver.intervals.multipliers import Best
from autopar.search.solver.minimize import LEVELS, MOST_COLUMNS, WORK_PER_ENTRY
from autopar.search.solver.presolve import presolve
from autopar.search.solver.problem import Edge, Ints, Node, Problem
from autopar.search.solver.workspace import Workspace, build

MOST_ROWS_PER_ROUND = 5


def close(instance: Instance, best: Best, deadline: float, gap: float, points: tuple[int, ...] = ()) -> bool:
    """Solve the instance to the gap.

    Each round's problem has some of the limits, so its bound is one of the instance too.

    Args:
        instance: the problem.
        best: edited in place. A bound of inf: nothing fits.
        deadline: of the monotonic clock.
        gap: relative.
        points: whose limits the first round has.

    Returns:
        Whether it was solved; False where time is up or the ILP is too large.
    """
    problem = as_problem(instance)
    scale = (best.value if np.isfinite(best.value) else abs(best.bound)) or 1.0
    scale = scale if np.isfinite(scale) else 1.0
    rows = list(points)
    while time.monotonic() < deadline and not requested():
        alive = np.zeros(len(problem.nodes), dtype=bool)
        for point in rows:
            alive |= instance.alive(point)
        nodes = tuple(
            n if a else replace(n, memory=np.zeros_like(n.memory)) for n, a in zip(problem.nodes, alive, strict=True)
        )
        graph = build(Problem(nodes, problem.edges), True)
        feasible = presolve(graph)
        for degree, entries in LEVELS[:2]:
            feasible = feasible and fold(graph, degree, entries, entries * WORK_PER_ENTRY)
        if feasible and columns_of(graph) > MOST_COLUMNS:
            return False
        labels: Ints | None = None
        bound = float("inf")
        if feasible:
            labels, bound = _solved(graph, instance, rows, scale, gap / 2, deadline)
        best.bound = max(best.bound, bound)
        if bound == float("inf"):
            return True
        if labels is None:
            return False
        if instance.fits(labels):
            best.offer(instance, labels)
            return best.value - best.bound <= gap * abs(best.value)
        new = [p for p in instance.exceeded(labels) if p not in rows][:MOST_ROWS_PER_ROUND]
        if not new:
            return False  # exceeded by no more than HiGHS's tolerance
        rows += new
    return False


def _solved(
    graph: Workspace, instance: Instance, points: list[int], scale: float, gap: float, deadline: float
) -> tuple[Ints | None, float]:
    """Labels of all nodes, None if none were found, and the bound: inf if there are none."""
    rooms = [_room(graph, instance, point) for point in points]
    live = graph.live_nodes()
    if not live:
        if min(rooms, default=0.0) < -instance.tolerance:
            return None, float("inf")
        return unfold(graph, np.zeros(len(graph.cost), dtype=np.int64)), graph.constant
    unit, per_byte = OBJECTIVE_SCALE / scale, MEMORY_SCALE / (float(np.abs(instance.limit).max()) or 1.0)
    solver = new_solver(
        deadline - time.monotonic(), mip_rel_gap=0.0, mip_abs_gap=gap * OBJECTIVE_SCALE, mip_feasibility_tolerance=1e-7
    )
    solver.passModel(integer_program(graph, unit, None))
    owner = np.repeat(live, [len(graph.alive(n)) for n in live])
    memory = np.concatenate([graph.memory[n][graph.alive(n)] for n in live])
    for point, room in zip(points, rooms, strict=True):
        mine = np.flatnonzero(instance.alive(point)[owner] & (memory > 0))
        solver.addRow(-np.inf, room * per_byte, len(mine), mine.astype(np.int32), memory[mine] * per_byte)
    solver.run()
    info = solver.getInfo()
    if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        return None, float("inf")
    bound = graph.constant + info.mip_dual_bound / unit - BOUND_SLACK * scale
    labels = None
    if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        labels = unfold(graph, read_labels(np.asarray(solver.getSolution().col_value), graph))
    return labels, bound if np.isfinite(bound) else -np.inf


def _room(graph: Workspace, instance: Instance, point: int) -> float:
    """Bytes that live nodes may take at a point: folded ones take the same with each of their labels."""
    alive = instance.alive(point)
    taken = sum(float(graph.memory[n][np.isfinite(cost)][0]) for n, cost, _ in graph.folded if alive[n])
    return float(instance.limit[point]) - taken


def as_problem(instance: Instance) -> Problem:
    """The instance without limits."""
    own = [slice(a, b) for a, b in zip(instance.first[:-1].tolist(), instance.first[1:].tolist(), strict=True)]
    nodes = tuple(Node(str(n), instance.cost[o], instance.memory[o]) for n, o in enumerate(own))
    edges = []
    for e, (u, v) in enumerate(zip(instance.u.tolist(), instance.v.tolist(), strict=True)):
        rows, columns = instance.sizes_of(u), instance.sizes_of(v)
        table = instance.table[instance.edge_first[e] : instance.edge_first[e + 1]].reshape(rows, columns)
        edges.append(Edge(u, v, np.arange(rows), np.arange(columns), table))
    return Problem(nodes, tuple(edges))
