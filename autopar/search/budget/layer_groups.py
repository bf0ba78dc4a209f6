"""`in_groups`: what each of several groups of layers saves within a budget, under given layouts.

Two labelings around a budget, split over whole layers, leave up to the difference of one layer unused, and what belongs
to no layer in the states of one of the two. Here the layers form a few groups, down to a single layer, and each group
has variables of its own: so many numbers of layers can have the same states, and some layers third states. What is in
no layer has its variables once. With a label for each state under the given layouts only, that is a small ILP at any
depth, and its linear program is nearly integral.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.search.budget.lagrangian import fits, settled
from autopar.search.budget.pareto import STATES_SECONDS, restricted
from autopar.search.solver.eliminate import fold, unfold
from autopar.search.solver.ilp import solve_ilp
from autopar.search.solver.layer_mix import LayerMix, mix_of, weights
from autopar.search.solver.minimize import LEVELS, WORK_PER_ENTRY
from autopar.search.solver.presolve import presolve
from autopar.search.solver.problem import Edge, Floats, Ints, Node, Problem
from autopar.search.solver.workspace import build

Chosen = Sequence[NDArray[np.bool_]]
"""Of each node, some of its labels."""

EQUAL = 1e-9
"""Mixes whose costs differ by so little, relatively, are equally good."""

MOST = 6000
"""Labels of all groups together; a larger problem is not tried."""


def in_groups(
    problem: Problem, chosen: Chosen, counts: NDArray[np.int64], budget: float, mix: LayerMix, gap: float
) -> LayerMix:
    """The best states of groups of layers within a budget, or the known mix, if that costs no more.

    Args:
        problem: the whole one.
        chosen: of each node the labels with the mix's layouts.
        counts: members of each node's class.
        budget: bytes.
        mix: found before.
        gap: relative gap at which to stop.
    """
    states = restricted(problem, chosen)
    sizes = group_sizes(_layers(states, counts))
    grouped, copies = _grouped(states, counts, sizes)
    if sum(len(n.cost) for n in grouped.nodes if len(n.cost) > 1) > MOST:
        return mix
    found = _solved(grouped, budget, abs(mix.cost), gap)
    if found is None:
        return mix
    labelings = [_of_all(found[copy], chosen) for copy in copies]
    best = mix
    # The layers that recompute the most come first: when the backward pass reaches them, the layers after them have
    # freed what they saved.
    order = sorted(range(len(sizes)), key=lambda g: (_saved(problem, labelings[g]), g))
    for groups in (order, range(len(sizes))):
        ends = np.cumsum([sizes[g] for g in groups]) / sum(sizes)
        ordered = _joined(mix_of(problem, [labelings[g] for g in groups], [*ends.tolist()], counts, mix.price))
        if ordered.cost < (1 - EQUAL) * best.cost and fits(ordered.memory, budget):
            best = ordered
    return best


def group_sizes(layers: int) -> list[int]:
    """At most four groups of layers: about a half, a third, a sixth, and a single one.

    More groups would not cost the ILP much; but each is a part of the plan that is measured.
    """
    rest = layers - -(-layers // 2)  # half of them, rounded down
    middle = max(rest - 1, 0)
    found = [layers - rest, -(-2 * middle // 3), middle - -(-2 * middle // 3), rest - middle]
    return [size for size in found if size]


def _layers(states: Problem, counts: NDArray[np.int64]) -> int:
    """How many layers there are: as many members as most classes have that there is a choice for, if several."""
    several = Counter(int(c) for n, c in zip(states.nodes, counts, strict=True) if len(n.cost) > 1 and c > 1)
    return max(several, key=lambda c: (several[c], c), default=1)


def _grouped(states: Problem, counts: NDArray[np.int64], sizes: Sequence[int]) -> tuple[Problem, Ints]:
    """The problem with a node for each class in each group that has members of it.

    Returns:
        The problem, and the number of the node of each class in each group, [groups, classes].
    """
    # Shares of members, as in `LayerMix`: an edge has the share of its second node.
    share = weights([*itertools.accumulate(size / sum(sizes) for size in sizes)], counts)
    copy = np.zeros((len(sizes), len(counts)), dtype=np.int64)
    nodes: list[Node] = []
    for v, node in enumerate(states.nodes):
        single = len(node.cost) == 1
        for g in range(len(sizes)):
            if g and (single or not share[g, v]):  # nothing to decide here: the node before stands for it
                copy[g, v] = copy[g - 1, v]
                continue
            copy[g, v] = len(nodes)
            weight = 1.0 if single else share[g, v]
            nodes.append(Node(node.name, node.cost * weight, node.memory * weight))
    edges = []
    for e in states.edges:
        between: dict[tuple[int, int], float] = defaultdict(float)
        for g in range(len(sizes)):
            between[int(copy[g, e.u]), int(copy[g, e.v])] += share[g, e.v]
        edges += [Edge(u, v, e.u_group, e.v_group, _weighted(e.table, w)) for (u, v), w in between.items()]
    return Problem(tuple(nodes), tuple(edges)), copy


def _weighted(table: Floats, weight: float) -> Floats:
    """The table times a weight, without 0 * inf: what is forbidden is forbidden in every group."""
    found: Floats = np.where(np.isfinite(table), table, 0.0) * weight
    found[~np.isfinite(table)] = np.inf
    return found


def _solved(problem: Problem, budget: float, scale: float, gap: float) -> Ints | None:
    graph = build(problem, True)
    degree, entries = LEVELS[1]
    if not presolve(graph) or not fold(graph, degree, entries, entries * WORK_PER_ENTRY):
        return None
    if not graph.live_nodes():
        return unfold(graph, np.zeros(len(graph.cost), dtype=np.int64))
    labels, _, _ = solve_ilp(graph, scale, gap * scale, STATES_SECONDS, budget - settled(graph))
    return None if labels is None else unfold(graph, labels)


def _of_all(labels: Ints, chosen: Chosen) -> Ints:
    """Labels of the problem of states as labels of the whole problem."""
    return np.array([np.flatnonzero(c)[x] for c, x in zip(chosen, labels, strict=True)], dtype=np.int64)


def _saved(problem: Problem, labels: Ints) -> float:
    return sum(float(n.memory[x]) for n, x in zip(problem.nodes, labels, strict=True))


def _joined(mix: LayerMix) -> LayerMix:
    """The mix with neighboring parts of the same labeling joined."""
    parts: list[tuple[Ints, float]] = []
    for labels, end in zip(mix.labelings, mix.ends, strict=True):
        if parts and np.array_equal(parts[-1][0], labels):
            parts.pop()
        parts.append((labels, end))
    return LayerMix(tuple(p[0] for p in parts), tuple(p[1] for p in parts), mix.cost, mix.memory, mix.price)
