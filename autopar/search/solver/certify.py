"""A second opinion on a lower bound, which needs nothing of the search but the problem.

The search eliminates nodes, drops labels and branches; a mistake in any of these would make its bound wrong. For any
messages along the edges, and any multiplier of memory, a labeling within a budget costs at least

    sum over nodes of min (cost + price * memory - messages)
    + sum over edges of min (table + messages of both ends) - price * budget

since messages cancel, and the multiplier only subtracts where memory is below the budget (Lagrange; Wainwright and
Jordan, "Graphical Models, Exponential Families, and Variational Inference", 2008, section 8). This is evaluated here
with every sum rounded down, so that the number holds wherever the messages come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from autopar.search.solver.problem import Floats, Ints, Problem

Messages = Sequence[tuple[Floats, Floats]]
"""Of each edge, seconds for every row and every column of its table."""


@dataclass(frozen=True)
class Claim:
    """What the search says: ``cost + price * (memory - budget)`` of no labeling is below ``bound``.

    So no labeling within the budget costs less.

    Attributes:
        problem: of which labelings.
        bound: seconds.
        price: the multiplier of memory, in seconds per byte.
        budget: bytes.
    """

    problem: Problem
    bound: float
    price: float = 0.0
    budget: float = 0.0


def verified_bound(problem: Problem, messages: Messages, price: float = 0.0, budget: float = 0.0) -> float:
    """Seconds that no labeling within the budget undercuts, proved by these messages.

    Args:
        problem: taken as exact.
        messages: one pair for each edge; those of self loops are not looked at.
        price: seconds a byte, not negative.
        budget: bytes.

    Raises:
        ValueError: the price or a message is no number that can be reckoned with.
    """
    if not 0 <= price < math.inf or not all(np.isfinite(part).all() for pair in messages for part in pair):
        raise ValueError(f"price {price} must be finite and not negative, and messages finite: they prove nothing else")
    # Each sum and product is rounded to the nearest float and then one float down: never above its true value.
    own = [_down(n.cost + _down(price * n.memory)) for n in problem.nodes]
    least = []
    for edge, (at_u, at_v) in zip(problem.edges, messages, strict=True):
        if edge.u == edge.v:
            own[edge.u] = _down(own[edge.u] + edge.table[edge.u_group, edge.v_group])
            continue
        own[edge.u] = _down(own[edge.u] - at_u[edge.u_group])
        own[edge.v] = _down(own[edge.v] - at_v[edge.v_group])
        least.append(_down(_down(edge.table + at_u[:, None]) + at_v[None, :]).min(initial=math.inf))
    least += [cost.min(initial=math.inf) for cost in own]
    # fsum rounds once, for all of its terms.
    total = math.nextafter(math.fsum(least), -math.inf)
    return math.nextafter(total - math.nextafter(price * budget, math.inf), -math.inf)


def _down(rounded: Floats) -> Floats:
    """Not above what was rounded to the nearest; infinity stays."""
    return np.nextafter(rounded, -np.inf, out=rounded.copy(), where=np.isfinite(rounded))


def recount(problem: Problem, labelings: Sequence[Ints], shares: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Seconds and bytes, from exact sums, of members of which shares have different labels.

    Args:
        problem: taken as exact.
        labelings: each one label for each node.
        shares: of each labeling, for each node; edges go by that of their second node.

    Returns:
        (seconds, bytes); seconds are inf if a forbidden label or pair is used.
    """
    cost = memory = Fraction(0)
    for labels, share in zip(labelings, shares, strict=True):
        # Floats are fractions: what follows has no rounding at all, until the end.
        weights = [Fraction(w) for w in share]
        used = [(w, float(n.cost[x])) for w, n, x in zip(weights, problem.nodes, labels, strict=True)]
        for e in problem.edges:
            used.append((weights[e.v], float(e.table[e.u_group[labels[e.u]], e.v_group[labels[e.v]]])))
        if any(w and not math.isfinite(seconds) for w, seconds in used):
            return math.inf, math.inf
        cost += sum((w * Fraction(seconds) for w, seconds in used if w), Fraction(0))
        sizes = zip(weights, problem.nodes, labels, strict=True)
        memory += sum((w * Fraction(float(n.memory[x])) for w, n, x in sizes), Fraction(0))
    return float(cost), float(memory)
