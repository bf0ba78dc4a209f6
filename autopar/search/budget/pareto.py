"""`Frontier`: the Pareto frontier of a step's seconds and memory, found one Lagrange multiplier at a time.

With a multiplier of so many seconds per byte there is no budget any more, and the problem is minimized exactly. Each
multiplier bounds the cost within every budget from below. The next multiplier is where the lines of the two labelings
around the budget cross (Kelley's cutting planes in one dimension), until no labeling lies below the line between them.

Only labelings on the convex hull are found in this way. Between one that exceeds the budget and one that has slack,
decisions are split over layers: some members of each class have the states of one labeling, the rest those of the other
("20 of 32 layers recompute"). Layouts are not split: for the layouts of a labeling, the frontier of its states is found
by the same method.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InfeasibleError
from autopar.search.budget.cutoff import NO_CUTOFF, Cutoff
from autopar.search.budget.lagrangian import NO_LABELING, fits, reprice, require_fit, settled
from autopar.search.solver.certify import Claim
from autopar.search.solver.eliminate import fold
from autopar.search.solver.layer_mix import LayerMix, mix_of, weights
from autopar.search.solver.minimize import LEVELS, WORK_PER_ENTRY, Limits, minimize
from autopar.search.solver.presolve import presolve
from autopar.search.solver.problem import Edge, Floats, Ints, Node, Problem, Solution, evaluate, locate
from autopar.search.solver.workspace import Workspace, build

Progress = Callable[[str, float, float], None]

Labels = Sequence[NDArray[np.bool_]]
"""Of each node, some of its labels."""

MAX_PRICES = 12
FLAT = 1e-3
"""A labeling so little below the line between two others, relatively, ends the search for more."""

EXACT_GAP = 1e-9

DOMINANT = 1e7
"""With a multiplier of so many times cost by memory, memory decides and cost only breaks ties."""

TINY = 1e-18
"""A multiplier so small that memory only breaks ties."""

STATES_SECONDS = 5.0
"""To choose states under given layouts is a small problem; it gets this long even if the time limit is reached."""


Priced = tuple[float, Solution]
"""A multiplier in seconds per byte, and the labeling of the least ``objective + multiplier * memory``.

The labeling's lower bound is of that sum: no labeling has less.
"""


@dataclass
class Frontier:
    """The labelings of a problem that are on the lower convex hull of memory and cost, found as they are needed.

    Attributes:
        problem: what is minimized.
        limits: relative gap and deadline.
        known: what has been found, in that order.
        states: the frontiers of states under given layouts, by the labels that have these layouts.
        useless: bytes and a cutoff: where nothing within so many bytes is below the cutoff, the search ends. The
            cutoff's multiplier is tried first.
        small: labelings of little memory, of which none need be the least.
    """

    problem: Problem
    limits: Limits
    known: list[Priced] = field(default_factory=list)
    states: dict[bytes, Frontier] = field(default_factory=dict)
    useless: tuple[float, Cutoff] = (0.0, NO_CUTOFF)
    small: list[Solution] = field(default_factory=list)

    def among(self, chosen: Labels) -> Frontier:
        """The frontier of some labels of each node only."""
        # Masks of labels as bits: the same layouts come up again for other multipliers.
        key = np.concatenate([np.packbits(c) for c in chosen]).tobytes()
        if key not in self.states:
            # Although the time is up: without states there would be no plan for these layouts at all.
            deadline = max(self.limits.deadline, time.monotonic() + STATES_SECONDS)
            self.states[key] = Frontier(restricted(self.problem, chosen), Limits(EXACT_GAP, deadline))
        return self.states[key]

    def bound(self, budget: float) -> float:
        """No labeling within the budget costs less."""
        return self.claim(budget).bound

    def claim(self, budget: float) -> Claim:
        """The best bound on labelings within the budget, with its multiplier."""
        claims = [Claim(self.problem, p.lower_bound - price * budget, price, budget) for price, p in self.known]
        return max(claims, key=lambda claim: claim.bound, default=Claim(self.problem, -np.inf))

    def take_over(self, other: Frontier) -> None:
        """Start with what is known of a problem that differs in the labels' memory alone.

        A bound on cost alone holds here, too: the memory that `TINY` adds is subtracted, at most all there is.
        """
        free = next(p for price, p in other.known if price == TINY)
        most = sum(float(n.memory.max()) for n in other.problem.nodes)
        self.known.append((TINY, locate(self.problem, free.labels, free.lower_bound - TINY * most)))
        self.small.append(locate(self.problem, other.little().labels))

    def start(self, chosen: Labels, bound: float) -> None:
        """Start with the cheapest labels that are known, and among these with the ones of least memory.

        Args:
            chosen: of each node, labels among which the cheapest are.
            bound: seconds that no labeling falls below.
        """
        found = self.among(chosen).free().labels
        labels = [int(np.flatnonzero(c)[x]) for c, x in zip(chosen, found, strict=True)]
        self.known.append((TINY, locate(self.problem, np.array(labels, dtype=np.int64), bound)))

    def bound_at(self, price: float, budget: float) -> float:
        """No labeling within the budget costs less, by this multiplier and those before."""
        self.cheapest(price)
        return self.bound(budget)

    def cheapest(self, price: float) -> Solution:
        """The labeling of the least ``objective + price * memory``."""
        return self._at(price, self.limits.gap)

    def next_to(self, budget: float) -> list[Solution]:
        """Of the labelings that are known, the largest that fits and the smallest that does not; any may be missing."""
        sizes = sorted({p.memory: p for _, p in self.known}.items())
        below, above = ([p for m, p in sizes if fits(m, budget) == inside] for inside in (True, False))
        return [*below[-1:], *above[:1]]

    def reaches(self, budget: float) -> bool:
        """Whether a labeling fits."""
        return any(fits(p.memory, budget) for p in self.small) or fits(self.least().memory, budget)

    def least(self) -> Solution:
        """The labeling of least memory, and of these the cheapest.

        Raises:
            InfeasibleError: there is no labeling at all.
        """
        free = self.free()
        price = DOMINANT * (abs(free.objective) or 1.0) / (abs(free.memory) or 1.0)  # cost only breaks ties
        return self._at(price, EXACT_GAP)

    def little(self) -> Solution:
        """A labeling of about the least memory, which is found faster than `least`."""
        free = self.free()
        # A smaller multiplier, and the search's gap instead of an exact minimum.
        found = self._at(DOMINANT / 10 * (abs(free.objective) or 1.0) / (abs(free.memory) or 1.0), self.limits.gap)
        self.small.append(found)
        return found

    def free(self) -> Solution:
        """The cheapest labeling, and of these about the one of least memory."""
        return self._at(TINY, self.limits.gap)

    def around(self, budget: float, prices: int = MAX_PRICES) -> tuple[Solution, Solution]:
        """The labelings next to a budget: one that exceeds it and one that fits; twice the cheapest if that fits.

        Args:
            budget: bytes.
            prices: the most multipliers to try.

        Raises:
            InfeasibleError: nothing fits; says how much the least is.
        """
        over = self.free()
        if fits(over.memory, budget):
            return over, over
        under = next((p for p in self.small if fits(p.memory, budget)), None) or self.least()
        require_fit(under, budget)
        # Similar problems have similar multipliers: that of the plan to beat often ends the search at once.
        if self.useless[1].price:
            self._at(self.useless[1].price, self.limits.gap)
        for _, p in self.known:
            over, under = _closer(over, under, p, budget)
        for _ in range(prices):
            self.useless[1].require_less(self.bound(self.useless[0]))
            if under.objective <= over.objective or self.limits.expired():
                break
            price = _slope(over, under)
            found = self._at(price, self.limits.gap)
            line = over.objective + price * over.memory
            if found.objective + price * found.memory > line - FLAT * abs(line):
                break
            over, under = _closer(over, under, found, budget)
        return over, under

    def _at(self, price: float, gap: float) -> Solution:
        """The minimum for a multiplier, which may be known."""
        for multiplier, p in self.known:
            if multiplier == price:
                return p

        def value_of(labels: Ints) -> float:
            cost, memory = evaluate(self.problem, labels)
            return cost + price * memory

        priced = reprice(self._folded, price)
        # Eliminated nodes have lost their labels, and with them their memory: what it costs is the same for all.
        priced.constant += price * settled(priced)
        for i, equal_labels in self._equal_labels.items():
            priced.cost[i] = _least_of_each(priced.cost[i], equal_labels)
        # Labelings of other multipliers are good incumbents: the minimum changes little from one to the next.
        start = min((p for _, p in self.known), key=lambda p: p.objective + price * p.memory, default=None)
        incumbent = None if start is None else start.labels
        labels, bound, _ = minimize(priced, value_of, replace(self.limits, gap=gap), incumbent)
        if labels is None:
            raise InfeasibleError(NO_LABELING)
        found = locate(self.problem, labels, bound)
        self.known.append((price, found))
        return found

    @cached_property
    def _folded(self) -> Workspace:
        """The problem after the elimination of nodes without memory, which is the same for every multiplier."""
        graph = build(self.problem, True)
        degree, entries = LEVELS[1]
        if not presolve(graph) or not fold(graph, degree, entries, entries * WORK_PER_ENTRY):
            raise InfeasibleError(NO_LABELING)
        return graph

    @cached_property
    def _equal_labels(self) -> dict[int, Ints]:
        """Nodes with labels that no neighbor can tell apart, and the number of the class of such labels of each label.

        A value that is saved on the device and the same value offloaded are such labels: given a multiplier, the
        cheaper of the two is known, and the others are left out.
        """
        groups_of: dict[int, list[Ints]] = defaultdict(list)
        for factor in self._folded.factors.values():
            for node, group in zip(factor.nodes, factor.groups, strict=True):
                groups_of[node].append(group)
        found = {}
        for i, groups in groups_of.items():
            kinds, number = np.unique(np.stack(groups), axis=1, return_inverse=True)
            if kinds.shape[1] < number.size:
                found[i] = number.reshape(-1).astype(np.int64)
        return found


def _least_of_each(cost: Floats, equal_labels: Ints) -> Floats:
    """The costs, infinite for all but the cheapest label of each class of equal_labels."""
    order = np.lexsort((cost, equal_labels))
    first = np.ones(len(cost), dtype=bool)
    first[1:] = equal_labels[order][1:] != equal_labels[order][:-1]
    # Sorted by class and then by cost: the first of each class is its cheapest.
    found: Floats = np.full(len(cost), np.inf)
    found[order[first]] = cost[order[first]]
    return found


def _closer(over: Solution, under: Solution, new: Solution, budget: float) -> tuple[Solution, Solution]:
    """The two labelings around a budget, with a new one that may replace one of them."""
    if fits(new.memory, budget):
        better = new.objective < under.objective or (new.objective == under.objective and new.memory > under.memory)
        return over, new if better else under
    return (new if new.memory < over.memory and new.objective >= over.objective else over), under


def split_over_layers(
    over: Solution, under: Solution, counts: NDArray[np.int64], problem: Problem, budget: float
) -> LayerMix:
    """The least number of layers in the states of ``under``, the first of each class, so that the whole fits.

    Args:
        over: exceeds the budget.
        under: fits.
        counts: members of each node's class.
        problem: whose labels these are.
        budget: bytes.
    """
    layers = int(counts.max(initial=1))
    labelings = under.labels, over.labels
    sizes = np.array([[n.memory[x] for n, x in zip(problem.nodes, labels, strict=True)] for labels in labelings])
    # In steps of a layer: memory is not exactly linear, as classes have different numbers of members.
    for members in range(layers + 1):
        ends = (members / layers, 1.0)
        if fits(float((weights(ends, counts) * sizes).sum()), budget):
            break
    return mix_of(problem, labelings, ends, counts, _slope(over, under))


def _slope(over: Solution, under: Solution) -> float:
    """The multiplier at which two labelings are equally good: seconds that each byte saves between them."""
    return (under.objective - over.objective) / (over.memory - under.memory) if over.memory > under.memory else 0.0


def within(
    frontier: Frontier,
    budget: float,
    counts: NDArray[np.int64],
    alike: Callable[[Ints], list[NDArray[np.bool_]]],
    progress: Progress,
    prices: int = MAX_PRICES,
) -> LayerMix:
    """The cheapest plan within a budget that has the layouts of a labeling next to it, split over layers or not.

    Args:
        frontier: of the whole problem.
        budget: bytes.
        counts: members of each node's class.
        alike: for each node the labels that differ from a labeling's in their state only.
        progress: called with phase, incumbent and bound.
        prices: the most multipliers to try.

    Raises:
        InfeasibleError: nothing fits.
    """
    over, under = frontier.around(budget, prices)
    progress("Lagrangian", under.objective, frontier.bound(budget))
    if over is under:
        return LayerMix.of(under)
    best = LayerMix.of(under, _slope(over, under))
    # The layouts of either may lead to the better mix.
    for point in (over, under):
        found = states_within(frontier, alike(point.labels), budget, counts)
        if found is not None and found.cost < best.cost and fits(found.memory, budget):
            # Where the budget does not bind for these layouts, it still does for the whole problem.
            best = replace(found, price=found.price or _slope(over, under))
    progress("blocks", best.cost, frontier.bound(budget))
    return best


def states_within(frontier: Frontier, chosen: Labels, budget: float, counts: NDArray[np.int64]) -> LayerMix | None:
    """The cheapest states within a budget under given layouts, split over layers or not; None where none fit.

    Args:
        frontier: of the whole problem.
        chosen: of each node the labels that have these layouts.
        budget: bytes.
        counts: members of each node's class.
    """
    states = frontier.among(chosen)
    try:
        pair = states.around(budget)
    except InfeasibleError:
        return None
    found = split_over_layers(*pair, counts, states.problem, budget)
    numbers = [np.flatnonzero(c) for c in chosen]
    labels = tuple(
        np.array([int(where[x]) for where, x in zip(numbers, of, strict=True)], dtype=np.int64)
        for of in found.labelings
    )
    return replace(found, labelings=labels)


def restricted(problem: Problem, chosen: Labels) -> Problem:
    """The problem with some labels of each node only."""
    nodes = tuple(Node(n.name, n.cost[c], n.memory[c]) for n, c in zip(problem.nodes, chosen, strict=True))
    edges = tuple(_restricted(e, chosen[e.u], chosen[e.v]) for e in problem.edges)
    return Problem(nodes, edges)


def _restricted(edge: Edge, u: NDArray[np.bool_], v: NDArray[np.bool_]) -> Edge:
    rows, u_group = np.unique(edge.u_group[u], return_inverse=True)
    columns, v_group = np.unique(edge.v_group[v], return_inverse=True)
    table: Floats = np.ascontiguousarray(edge.table[np.ix_(rows, columns)])
    return Edge(edge.u, edge.v, u_group.astype(np.int64), v_group.astype(np.int64), table)
