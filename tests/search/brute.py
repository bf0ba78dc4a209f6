"""Random small problems and their brute-force minimum."""

from __future__ import annotations

import itertools

import numpy as np

from autopar.search.solver.problem import Edge, Node, Problem, evaluate


def random_problem(seed: int, nodes: int, density: float, scale: float, forbid: float, heavy: float) -> Problem:
    """A problem with ties, forbidden entries, self loops, parallel edges and disconnected parts.

    Args:
        seed: Decides everything.
        nodes: Number of nodes.
        density: Edges per node.
        scale: Magnitude of costs.
        forbid: Share of infinite entries.
        heavy: Share of nodes that carry memory.
    """
    rng = np.random.default_rng(seed)
    ties = bool(rng.integers(2))

    def costs(shape: tuple[int, ...]) -> np.ndarray:
        drawn = rng.integers(0, 4, shape) if ties else rng.random(shape) * rng.integers(0, 2, shape)
        return np.where(rng.random(shape) < forbid, np.inf, drawn * scale)

    made = []
    for i in range(nodes):
        labels = int(rng.integers(1, 5))
        memory = rng.integers(0, 6, labels) * 1e10 if rng.random() < heavy else np.zeros(labels)
        made.append(Node(f"n{i}", costs((labels,)), memory.astype(np.float64)))
    edges = []
    for _ in range(int(density * nodes)):
        u, v = (int(x) for x in rng.integers(0, nodes, 2))
        a, b = (int(x) for x in rng.integers(1, 4, 2))
        u_group, v_group = rng.integers(0, a, len(made[u].cost)), rng.integers(0, b, len(made[v].cost))
        edges.append(Edge(u, v, u_group, v_group, costs((a, b))))
    return Problem(tuple(made), tuple(edges))


def brute_force(problem: Problem, budget: float | None) -> tuple[float, float]:
    """Least cost within the budget, and least memory of any labeling of finite cost; inf if there is none."""
    best = least = float("inf")
    for labels in itertools.product(*(range(len(n.cost)) for n in problem.nodes)):
        cost, memory = evaluate(problem, np.array(labels))
        if cost < float("inf"):
            least = min(least, memory)
            if budget is None or memory <= budget:
                best = min(best, cost)
    return best, least
