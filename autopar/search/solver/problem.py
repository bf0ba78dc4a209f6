"""The values of the combinatorial solver: a pairwise cost minimization with one optional memory budget."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Node:
    """A variable with L labels.

    Attributes:
        name: Used in messages only.
        cost: Seconds of each label, [L]; inf forbids a label.
        memory: Bytes of each label, [L].
    """

    name: str
    cost: Floats
    memory: Floats


@dataclass(frozen=True)
class Edge:
    """A cost between two nodes: `table[u_group[label of u], v_group[label of v]]`.

    Attributes:
        u: Index of the first node.
        v: Index of the second node; equal to `u` for a self loop.
        u_group: Row of each label of u, [L_u].
        v_group: Column of each label of v, [L_v].
        table: Seconds, [A, B]; inf forbids a pair.
    """

    u: int
    v: int
    u_group: Ints
    v_group: Ints
    table: Floats


@dataclass(frozen=True)
class Problem:
    """Minimize node costs plus edge costs."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]


@dataclass(frozen=True)
class Solution:
    """A label for each node, what that costs and needs, and what is proved of all others.

    Attributes:
        labels: One label per node, [n].
        objective: Seconds of these labels, exactly as `evaluate` counts them.
        memory: Bytes of these labels.
        lower_bound: No labeling within the budget costs less, up to float rounding; -inf where nothing is proved.
        method: What closed the search, e.g. "elimination" or "time limit".
    """

    labels: Ints
    objective: float
    memory: float
    lower_bound: float = -np.inf
    method: str = ""

    @property
    def gap(self) -> float:
        """Relative distance between the objective and the lower bound."""
        return (self.objective - self.lower_bound) / max(self.objective, 1e-300)


Minimum = tuple[Ints | None, float, str]
"""The best labels found, None if there are none; a bound that no labeling falls below; and what proved it."""


def evaluate(problem: Problem, labels: Ints) -> tuple[float, float]:
    """Objective in seconds and memory in bytes of a labeling.

    Args:
        problem: The problem.
        labels: One label per node, [n].

    Returns:
        (objective, memory); the objective is inf if a forbidden label or pair is used.
    """
    chosen = [int(x) for x in labels]
    # In a fixed order, one float after the other: the same labels have the same objective, to the last bit.
    cost = sum(float(node.cost[x]) for node, x in zip(problem.nodes, chosen, strict=True))
    cost += sum(float(e.table[e.u_group[chosen[e.u]], e.v_group[chosen[e.v]]]) for e in problem.edges)
    return cost, sum(float(node.memory[x]) for node, x in zip(problem.nodes, chosen, strict=True))


def locate(problem: Problem, labels: Ints, lower_bound: float = -np.inf) -> Solution:
    """The labeling with its objective and memory."""
    return Solution(labels, *evaluate(problem, labels), lower_bound)
