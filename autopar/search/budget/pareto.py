"""`Frontier`: what a step costs against what it needs of memory, found price by price.

With memory priced at so many seconds a byte there is no budget any more, and the problem is minimized exactly. Each
price bounds every budget from below (Lagrange); the next is where the lines of the two points around the budget meet
(Kelley's method in one dimension), until no point lies below the line between them. What is left between a point that
exceeds the budget and one that has room to spare is closed by blocks: of the members of each class, some are in the
state of the one and the rest in that of the other, "20 of 32 layers". States are mixed, layouts are not: of a point's
layouts, the frontier of its states is found in the same way.
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
from autopar.search.budget.lagrangian import Point, fits, locate, reprice, require_fit, settled
from autopar.search.solver.certify import Claim
from autopar.search.solver.eliminate import fold
from autopar.search.solver.layer_mix import LayerMix, mix_of, weights
from autopar.search.solver.minimize import LEVELS, WORK_PER_ENTRY, Limits, minimize
from autopar.search.solver.presolve import presolve
from autopar.search.solver.problem import Edge, Floats, Ints, Node, Problem, evaluate
from autopar.search.solver.workspace import Graph, build

Progress = Callable[[str, float, float], None]

MAX_PRICES = 12
FLAT = 1e-3
"""A point so little below the line between two others, relatively, ends the search for more."""

EXACT_GAP = 1e-9

DOMINANT = 1e7
"""A price at which so small a share of the memory is worth all of the cost."""

NO_LABELLING = "no choice of labels avoids every forbidden label and pair; allow more candidates"

TINY = 1e-18
"""Seconds a byte so few that they only break ties."""

STATES_SECONDS = 5.0
"""States under given layouts are a small problem, and searched for so long even if the time is up."""


@dataclass(frozen=True)
class Priced:
    """A point that is the cheapest at a price.

    Attributes:
        price: seconds a byte.
        point: the labeling.
        bound: no labeling has less cost plus price times memory.
    """

    price: float
    point: Point
    bound: float


@dataclass
class Frontier:
    """Points of a problem, by price.

    Attributes:
        problem: what is minimized.
        limits: relative gap and deadline.
        known: what has been found.
        states: the frontiers of states under given layouts, by the labels that have these.
        useless: bytes and a rival: where nothing within so many bytes is faster, no more is searched; its price is
            tried first.
        small: labelings of little memory, not known to be of the least.
    """

    problem: Problem
    limits: Limits
    known: list[Priced] = field(default_factory=list)
    states: dict[bytes, Frontier] = field(default_factory=dict)
    useless: tuple[float, Cutoff] = (0.0, NO_CUTOFF)
    small: list[Point] = field(default_factory=list)

    def among(self, chosen: Sequence[NDArray[np.bool_]]) -> Frontier:
        """The frontier of some labels of each node only."""
        key = np.concatenate([np.packbits(c) for c in chosen]).tobytes()
        if key not in self.states:
            deadline = max(self.limits.deadline, time.monotonic() + STATES_SECONDS)
            self.states[key] = Frontier(restricted(self.problem, chosen), Limits(EXACT_GAP, deadline))
        return self.states[key]

    def bound(self, budget: float) -> float:
        """No labeling within the budget costs less."""
        return self.claim(budget).bound

    def claim(self, budget: float) -> Claim:
        """The price that bounds the labelings within the budget best."""
        claims = [Claim(self.problem, p.bound - p.price * budget, p.price, budget) for p in self.known]
        return max(claims, key=lambda claim: claim.bound, default=Claim(self.problem, -np.inf))

    def take_over(self, other: Frontier) -> None:
        """Start with what is known of a problem that differs in the labels' memory alone.

        What its cheapest labeling proves of costs alone holds here, too.
        """
        free = next(p for p in other.known if p.price == TINY)
        most = sum(float(n.memory.max()) for n in other.problem.nodes)
        self.known.append(Priced(TINY, locate(self.problem, free.point.labels), free.bound - TINY * most))
        self.small.append(locate(self.problem, other.little().labels))

    def start(self, chosen: Sequence[NDArray[np.bool_]], bound: float) -> None:
        """Start with the labels that look like the cheapest of all, of which those of the least memory.

        Args:
            chosen: of each node, labels among which the cheapest are.
            bound: seconds that no labeling falls below.
        """
        found = self.among(chosen).free().labels
        labels = [int(np.flatnonzero(c)[x]) for c, x in zip(chosen, found, strict=True)]
        self.known.append(Priced(TINY, locate(self.problem, np.array(labels, dtype=np.int64)), bound))

    def bound_at(self, price: float, budget: float) -> float:
        """No labeling within the budget costs less, by this price and those before."""
        self._at(price, self.limits.gap)
        return self.bound(budget)

    def reaches(self, budget: float) -> bool:
        """Whether a labeling fits."""
        return any(fits(p.memory, budget) for p in self.small) or fits(self.least().memory, budget)

    def least(self) -> Point:
        """The labeling of least memory, and of these the cheapest.

        Raises:
            InfeasibleError: there is no labeling at all.
        """
        free = self.free()
        price = DOMINANT * (abs(free.cost) or 1.0) / (abs(free.memory) or 1.0)  # cost only breaks ties
        return self._at(price, EXACT_GAP).point

    def little(self) -> Point:
        """A labeling of about the least memory, which takes less time."""
        free = self.free()
        found = self._at(DOMINANT / 10 * (abs(free.cost) or 1.0) / (abs(free.memory) or 1.0), self.limits.gap).point
        self.small.append(found)
        return found

    def free(self) -> Point:
        """The cheapest labeling, and of these about the one of least memory."""
        return self._at(TINY, self.limits.gap).point

    def around(self, budget: float, prices: int = MAX_PRICES) -> tuple[Point, Point]:
        """The two points next to a budget, of which one exceeds it; twice the same if the cheapest fits.

        Raises:
            InfeasibleError: nothing fits; says how much the least is.
        """
        over = self.free()
        if fits(over.memory, budget):
            return over, over
        under = next((p for p in self.small if fits(p.memory, budget)), None) or self.least()
        require_fit(under, budget)
        if self.useless[1].price:
            self._at(self.useless[1].price, self.limits.gap)
        for p in self.known:
            over, under = _closer(over, under, p.point, budget)
        for _ in range(prices):
            self.useless[1].require_less(self.bound(self.useless[0]))
            if under.cost <= over.cost or self.limits.expired():
                break
            price = _slope(over, under)
            found = self._at(price, self.limits.gap).point
            line = over.cost + price * over.memory
            if found.cost + price * found.memory > line - FLAT * abs(line):
                break
            over, under = _closer(over, under, found, budget)
        return over, under

    def _at(self, price: float, gap: float) -> Priced:
        """The cheapest labeling at a price, which may be known."""
        for p in self.known:
            if p.price == price:
                return p

        def value_of(labels: Ints) -> float:
            cost, memory = evaluate(self.problem, labels)
            return cost + price * memory

        priced = reprice(self._folded, price)
        priced.constant += price * settled(priced)
        for i, twins in self._twins.items():
            priced.cost[i] = _least_of_each(priced.cost[i], twins)
        start = min((p.point for p in self.known), key=lambda p: p.cost + price * p.memory, default=None)
        found = minimize(priced, value_of, replace(self.limits, gap=gap), None if start is None else start.labels)
        if found.labels is None:
            raise InfeasibleError(NO_LABELLING)
        self.known.append(Priced(price, locate(self.problem, found.labels), found.bound))
        return self.known[-1]

    @cached_property
    def _folded(self) -> Graph:
        """The problem without the nodes that carry no memory: these are the same for each price."""
        graph = build(self.problem, True)
        degree, entries = LEVELS[1]
        if not presolve(graph) or not fold(graph, degree, entries, entries * WORK_PER_ENTRY):
            raise InfeasibleError(NO_LABELLING)
        return graph

    @cached_property
    def _twins(self) -> dict[int, Ints]:
        """Of nodes that are left and have labels which look alike to all neighbors, the number of each label's look.

        What is kept on the device and what is kept on the host are such: at a price the cheaper of the two is known.
        """
        looks: dict[int, list[Ints]] = defaultdict(list)
        for factor in self._folded.factors.values():
            for node, group in zip(factor.nodes, factor.groups, strict=True):
                looks[node].append(group)
        found = {}
        for i, groups in looks.items():
            kinds, number = np.unique(np.stack(groups), axis=1, return_inverse=True)
            if kinds.shape[1] < number.size:
                found[i] = number.reshape(-1).astype(np.int64)
        return found


def _least_of_each(cost: Floats, twins: Ints) -> Floats:
    """The costs, infinite but for the cheapest label of each look."""
    order = np.lexsort((cost, twins))
    first = np.ones(len(cost), dtype=bool)
    first[1:] = twins[order][1:] != twins[order][:-1]
    kept: Floats = np.full(len(cost), np.inf)
    kept[order[first]] = cost[order[first]]
    return kept


def _closer(over: Point, under: Point, new: Point, budget: float) -> tuple[Point, Point]:
    """The two points around a budget, with a new one that may replace one of them."""
    if fits(new.memory, budget):
        better = new.cost < under.cost or (new.cost == under.cost and new.memory > under.memory)
        return over, new if better else under
    return (new if new.memory < over.memory and new.cost >= over.cost else over), under


def mixed(over: Point, under: Point, counts: NDArray[np.int64], problem: Problem, budget: float) -> LayerMix:
    """As many members as have to be in the state of ``under``, the first of each class.

    Args:
        over: exceeds the budget.
        under: fits.
        counts: members of each node's class.
        problem: whose labels these are.
        budget: bytes.
    """
    blocks = int(counts.max(initial=1))
    labelings = under.labels, over.labels
    sizes = np.array([[n.memory[x] for n, x in zip(problem.nodes, labels, strict=True)] for labels in labelings])
    for members in range(blocks + 1):
        ends = (members / blocks, 1.0)
        if fits(float((weights(ends, counts) * sizes).sum()), budget):
            break
    return mix_of(problem, labelings, ends, counts, _slope(over, under))


def _slope(over: Point, under: Point) -> float:
    """Seconds that a byte saves between two points."""
    return (under.cost - over.cost) / (over.memory - under.memory) if over.memory > under.memory else 0.0


def within(
    frontier: Frontier,
    budget: float,
    counts: NDArray[np.int64],
    alike: Callable[[Ints], list[NDArray[np.bool_]]],
    progress: Progress,
    prices: int = MAX_PRICES,
) -> LayerMix:
    """The cheapest mix within a budget, of those with the layouts of a point next to it.

    Args:
        frontier: of the whole problem.
        budget: bytes.
        counts: members of each node's class.
        alike: for each node the labels that differ in their state only from a labeling's.
        progress: called with phase, incumbent and bound.
        prices: that may be tried.

    Raises:
        InfeasibleError: nothing fits.
    """
    over, under = frontier.around(budget, prices)
    progress("Lagrangian", under.cost, frontier.bound(budget))
    if over is under:
        return LayerMix.of(under)
    best = LayerMix.of(under, _slope(over, under))
    for point in (over, under):
        chosen = alike(point.labels)
        states = frontier.among(chosen)
        try:
            pair = states.around(budget)
        except InfeasibleError:
            continue
        found = mixed(*pair, counts, states.problem, budget)
        if found.cost < best.cost and fits(found.memory, budget):
            numbers = [np.flatnonzero(c) for c in chosen]
            labels = tuple(
                np.array([int(where[x]) for where, x in zip(numbers, of, strict=True)], dtype=np.int64)
                for of in found.labelings
            )
            # Where these layouts have room for all that they could keep, others would take more.
            best = replace(found, labelings=labels, price=found.price or _slope(over, under))
    progress("blocks", best.cost, frontier.bound(budget))
    return best


def restricted(problem: Problem, chosen: Sequence[NDArray[np.bool_]]) -> Problem:
    """The problem with some labels of each node only."""
    nodes = tuple(Node(n.name, n.cost[c], n.memory[c]) for n, c in zip(problem.nodes, chosen, strict=True))
    edges = tuple(_restricted(e, chosen[e.u], chosen[e.v]) for e in problem.edges)
    return Problem(nodes, edges)


def _restricted(edge: Edge, u: NDArray[np.bool_], v: NDArray[np.bool_]) -> Edge:
    rows, u_group = np.unique(edge.u_group[u], return_inverse=True)
    columns, v_group = np.unique(edge.v_group[v], return_inverse=True)
    table: Floats = np.ascontiguousarray(edge.table[np.ix_(rows, columns)])
    return Edge(edge.u, edge.v, u_group.astype(np.int64), v_group.astype(np.int64), table)
