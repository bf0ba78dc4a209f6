"""Claims of the search are examined by duals of the local polytope's linear program, of the whole problem at once.

Nothing is eliminated and no label dropped. The duals are messages for `autopar.search.solver.certify`, where any
messages prove a bound, so that the linear program may be solved inexactly. Its solution, rounded to labels, is a
labeling that can refute a claim.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from autopar.errors import CertificateError
from autopar.search.solver.certify import Claim, Messages, recount, verified_bound
from autopar.search.solver.highs import new_solver
from autopar.search.solver.ilp import OBJECTIVE_SCALE, integer_program, read_labels
from autopar.search.solver.layer_mix import LayerMix
from autopar.search.solver.problem import Floats, Ints, Node, Problem
from autopar.search.solver.workspace import build

ROUNDING = 1e-8
"""Relative tolerance of claims, which is more than the error that the solver's own tolerances cause."""

BUG = "this is an error of autopar, not of the model; please report it"


def require_cost(problem: Problem, mix: LayerMix, counts: Sequence[int]) -> None:
    """Check the cost and memory of a choice by exact sums.

    Args:
        problem: the problem.
        mix: the choice.
        counts: members of each node's class.

    Raises:
        CertificateError: the search counts something else.
    """
    # Whole members: the search's shares are rounded up class by class, too.
    shares = [[(b - a) / n for a, b in itertools.pairwise(mix.starts(n))] for n in counts]
    cost, memory = recount(problem, mix.labelings, [*zip(*shares, strict=True)])
    if not math.isclose(cost, mix.cost, rel_tol=ROUNDING) or not math.isclose(memory, mix.memory, rel_tol=ROUNDING):
        raise CertificateError(
            f"the search counts {mix.cost:.9g} s and {mix.memory:.9g} bytes for a choice of {cost:.9g} s and "
            f"{memory:.9g} bytes: {BUG}"
        )


def examine(claim: Claim, seconds: float) -> float:
    """A verified lower bound for the problem of a claim; it may be lower than the claim's bound, or higher.

    Args:
        claim: of the search.
        seconds: time limit for the duals; with less time the bound is lower.

    Raises:
        CertificateError: a labeling undercuts the claim, which therefore is wrong.
    """
    problem, price = claim.problem, claim.price
    scale = abs(claim.bound + price * claim.budget)
    messages, labels = relax(problem, price, seconds, scale if 0 < scale < math.inf else 1.0)
    cost, memory = recount(problem, [labels], [[1.0] * len(labels)])
    value = cost + price * (memory - claim.budget)
    if math.isfinite(cost) and value < claim.bound - ROUNDING * (abs(cost) + price * (memory + claim.budget)):
        raise CertificateError(
            f"the search claims that no labeling costs less than {claim.bound:.9g} s, with memory at {price:.3g} s a "
            f"byte, and there is one of {value:.9g} s: {BUG}"
        )
    return verified_bound(problem, messages, price, claim.budget)


def relax(problem: Problem, price: float, seconds: float, scale: float = 1.0) -> tuple[Messages, Ints]:
    """Solve the linear program of a problem whose memory is in its objective.

    Args:
        problem: the problem.
        price: the multiplier of memory, in seconds per byte.
        seconds: time limit.
        scale: magnitude of the objective.

    Returns:
        Messages from the duals, and of each node the label with the largest value in the solution.
    """
    nodes = tuple(Node(n.name, n.cost + price * n.memory, n.memory) for n in problem.nodes)
    graph = build(Problem(nodes, problem.edges), False)
    unit = OBJECTIVE_SCALE / scale
    lp = integer_program(graph, unit, None)
    if not all(len(graph.alive(n)) for n in graph.live_nodes()):  # a node has no label: any messages prove infinity
        return _messages(problem, np.zeros(lp.num_row_)), np.zeros(len(nodes), dtype=np.int64)
    lp.integrality_ = []
    solver = new_solver(seconds)
    solver.passModel(lp)
    solver.run()
    found = solver.getSolution()
    # Where time ran out there may be no duals: messages of zero prove a bound, too.
    duals = -np.asarray(found.row_dual) / unit if found.dual_valid else np.zeros(lp.num_row_)
    values = np.asarray(found.col_value) if found.value_valid else np.zeros(lp.num_col_)
    return _messages(problem, duals[len(graph.live_nodes()) :]), read_labels(values, graph)


def _messages(problem: Problem, duals: Floats) -> Messages:
    """Messages from the duals of `integer_program`: an edge's rows, then its columns; self loops have none."""
    found: list[tuple[Floats, Floats]] = []
    at = 0
    for edge in problem.edges:
        rows, columns = (0, 0) if edge.u == edge.v else edge.table.shape
        found.append((duals[at : at + rows], duals[at + rows : at + rows + columns]))
        at += rows + columns
    return found
