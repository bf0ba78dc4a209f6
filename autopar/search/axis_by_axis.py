"""More axes than one problem takes: solve two at a time, never the full product, and bound the whole by blocks of axes.

With the others fixed, the layouts on two axes are a problem that is solved exactly; to solve these in turn until
nothing improves is block coordinate descent. The lower bound is a sum over blocks, of which each axis is in one: as
many axes as one problem takes, and each other axis by itself. The moves of a plan, projected on a block, are moves
along its axes, and no tensor is smaller than if it is split along all the others. Compute of ``T`` seconds on one
device that is split over some of the ``N`` devices' axes takes ``T / N * prod(n_a, a not split)``, which is at least
``T / N * (1 + sum(prod(n_a, a in the block and not split) - 1))``: a sum over blocks.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.ir.program import Program
from autopar.search.budget.lagrangian import solve
from autopar.search.budget.pareto import Frontier
from autopar.search.formulation.build import Formulation, build
from autopar.search.formulation.memory_model import MemoryModel
from autopar.search.formulation.pins import Restrictions
from autopar.search.formulation.variables.operators import timed_candidates
from autopar.search.overlap.weights import Weights
from autopar.search.solver.certify import Claim
from autopar.search.solver.minimize import Limits
from autopar.search.solver.problem import Node, Problem, Solution
from autopar.sharding.candidates import REPLICATE, Candidates, candidates, strategies
from autopar.sharding.dims import Dims
from autopar.sharding.layer_classes import LayerClasses
from autopar.sharding.operator_cost import operator_seconds
from autopar.sharding.redistribute import Tables
from autopar.sharding.redistribute.moves import Machine

WORTHWHILE = 2e-3
"""Share of all kernels' seconds above which each candidate of an operator is looked at for a bound, unless it is
lowered to several, which takes long: products take more than their part where they are small, and little else does."""

Make = Callable[[Restrictions], Formulation]
Progress = Callable[[str, float, float], None]


def descend(
    make: Make,
    restrictions: Restrictions,
    tables: Tables,
    memory: float | None,
    gap: float,
    time_limit: float,
    progress: Progress | None,
    start: Mapping[str, tuple[Any, ...]] | None = None,
) -> tuple[Formulation, Solution]:
    """Block coordinate descent over pairs of axes.

    Args:
        make: builds the problem.
        restrictions: what is decided already.
        tables: redistribution costs.
        memory: bytes; None: as much as it takes.
        gap: relative, of each pair.
        time_limit: seconds.
        progress: shown.
        start: `placements` to begin with; default: those of one axis after the other, from everything replicated.

    Raises:
        InfeasibleError: the last axis cannot bring memory under the budget.
    """
    limits = Limits(gap, time.monotonic() + time_limit)
    machine = tables.machine
    count = len(machine.sizes)
    fixed: Mapping[str, tuple[Any, ...]] = start or {}
    best: tuple[Formulation, Solution] | None = None
    # Fast links first: they carry the traffic that cannot be avoided.
    order = sorted(range(count), key=lambda a: (-machine.links[a].bandwidth, a))
    remaining = float(np.prod(machine.sizes))
    for axis in order if start is None else ():
        remaining /= machine.sizes[axis]
        # Later axes may split what is left, so that so many times the budget is allowed until then.
        budget = None if memory is None else memory * remaining
        best = _solve_block(make, replace(restrictions, fixed=fixed, free=(axis,)), budget, limits)
        fixed = placements(*best, tables)
    pairs = itertools.cycle(itertools.combinations(range(count), 2))
    stale, every = 0, count * (count - 1) // 2
    while stale < every and not limits.expired():  # until no pair improves, the others' layouts fixed
        block = next(pairs)
        found = _solve_block(make, replace(restrictions, fixed=fixed, free=block), memory, limits)
        stale += 1
        if best is None or found[1].objective < best[1].objective * (1 - gap):
            best, stale = found, 1
            fixed = placements(*best, tables)
        if progress:
            progress(f"axes {block}", best[1].objective, 0.0)
    assert best is not None
    return best


def _solve_block(
    make: Make, restrictions: Restrictions, budget: float | None, limits: Limits
) -> tuple[Formulation, Solution]:
    built = make(restrictions)
    seconds = max(1.0, limits.deadline - time.monotonic())
    if budget is None:
        return built, solve(built.problem, gap=limits.gap, time_limit=seconds)
    # A labeling on the convex hull, which the best one may be beside: axes are searched in turn anyway.
    frontier = Frontier(built.problem, replace(limits, deadline=time.monotonic() + seconds))
    return built, frontier.around(budget)[1]


def placements(built: Formulation, solution: Solution, tables: Tables) -> dict[str, tuple[Any, ...]]:
    """What every variable does on every axis: strategy names of operators, placements of tensors."""
    found: dict[str, tuple[Any, ...]] = {}
    for variable, label in zip(built.variables, solution.labels, strict=True):
        if variable.choices is not None:
            found[variable.key] = variable.choices.names(int(variable.candidate[label]))
        else:
            found[variable.key] = variable.layout(int(label), tables)
    return found


def blocks_of(sizes: Sequence[int], together: int) -> list[tuple[int, ...]]:
    """The largest axes together, inner ones of those as large, and each other one by itself."""
    axes = sorted(range(len(sizes)), key=lambda axis: (-sizes[axis], -axis))
    return [tuple(sorted(axes[:together])), *((axis,) for axis in axes[together:])]


def bound_by_axes(
    program: Program,
    dims: Dims,
    classes: LayerClasses,
    machine: Machine,
    restrictions: Restrictions,
    weights: Weights | None = None,
    *,
    together: int = 1,
    time_limit: float = np.inf,
) -> tuple[float, list[Claim]]:
    """Seconds that no plan on any of the axes can undercut; memory is not counted, so it holds for every budget.

    Args:
        program: canonical program.
        dims: its dimension analysis.
        classes: which nodes share a decision.
        machine: of all axes.
        restrictions: what is decided already.
        weights: prices of seconds; default: nothing overlaps.
        together: axes of the largest block.
        time_limit: seconds for each block.

    Returns:
        Seconds that no plan avoids, and a claim for each block; the bound is the sum of all.
    """
    blocks = blocks_of(machine.sizes, together)
    fixed, claims, devices = 0.0, list[Claim](), math.prod(machine.sizes)
    for block in blocks:
        names, sizes = tuple(machine.names[a] for a in block), tuple(machine.sizes[a] for a in block)
        others = devices // math.prod(sizes)
        # With every other axis splitting it, each tensor is `others` times smaller: the same as a faster machine.
        links = (machine.links[axis] for axis in block)
        fast = tuple(replace(link, bandwidth=link.bandwidth * others) for link in links)
        device = replace(machine.device, bandwidth=machine.device.bandwidth * others)
        quantized = tuple(q for q in machine.quantized if q.axis in names)
        part = Machine(names, sizes, fast, device, quantized)
        limits = Restrictions(
            layouts=_project(restrictions.layouts, block),
            data_axes_only=restrictions.data_axes_only,
            placements=_project(restrictions.placements, block),
            strategies=_project(restrictions.strategies, block),
        )
        own = weights and weights.of_axes(block)
        built = build(program, dims, classes, Tables(part), MemoryModel(defaultdict(float)), limits, own)
        kernels = _Kernels(program, dims, classes, machine, blocks, own)
        problem, fixed = kernels.share(built, sizes)  # the same for every block
        claims.append(Claim(problem, solve(problem, gap=1e-4, time_limit=time_limit).lower_bound))
    return fixed, claims


def _project(decided: Mapping[Any, Sequence[Any]], block: Sequence[int]) -> dict[Any, tuple[Any, ...]]:
    return {key: tuple(of_axes[axis] for axis in block) for key, of_axes in decided.items()}


@dataclass(frozen=True, eq=False)
class _Kernels:
    """Seconds of operators' kernels that no plan avoids, and what those take besides that an axis does not split."""

    program: Program
    dims: Dims
    classes: LayerClasses
    machine: Machine
    blocks: Sequence[Sequence[int]]
    weights: Weights | None

    def share(self, built: Formulation, sizes: Sequence[int]) -> tuple[Problem, float]:
        """The problem of a block with its part in place of the operators' costs, and what no plan avoids."""
        even = {v.key: self._even(v.key) for v in built.variables if v.choices is not None}
        nodes, least, worthwhile = [], 0.0, WORTHWHILE * sum(even.values())
        for variable, node in zip(built.variables, built.problem.nodes, strict=True):
            if variable.choices is None:
                nodes.append(node)
                continue
            seconds = even[node.name]
            lowered = self.dims.operators[self.classes.members[node.name][0]].rule.lower
            own, part = self._least(node.name, seconds, exact=seconds > worthwhile and not lowered)
            least += own
            again = np.where(_splits(variable.choices), 1, sizes).prod(1) - 1
            nodes.append(Node(node.name, part * seconds * again, node.memory))
        return Problem(tuple(nodes), built.problem.edges), least

    def _times(self, key: str) -> float:
        """How often a class's operator runs, at the price of its seconds."""
        node = self.classes.members[key][0]
        price = 1.0 if self.weights is None else self.weights.of_kernels(node)[0]
        # Of what all microbatches share, once is enough.
        runs = 1 if node in self.program.microbatch_invariant else self.program.runs(node)
        return price * self.classes.count[key] * runs

    def _even(self, key: str) -> float:
        """Seconds of a class's kernels, launches left out, if all devices did the same part of one device's."""
        operator = self.dims.operators[self.classes.members[key][0]]
        whole = candidates(operator, (1,), allowed=[[REPLICATE]])
        alone = Machine(("one",), (1,), self.machine.links[:1], replace(self.machine.device, launch=1e-30))
        seconds = float(operator_seconds(operator, whole, alone)[0])
        return self._times(key) * seconds / math.prod(self.machine.sizes)

    def _least(self, key: str, even: float, *, exact: bool) -> tuple[float, float]:
        """Seconds that no candidate avoids, and what part of its own those add of which an axis splits nothing.

        Args:
            key: of a class of operators.
            even: `_even` of it.
            exact: look at all candidates: smaller kernels take more than their part.
        """
        if not exact:
            return even + self._times(key) * self.machine.device.launch * (even > 0), 1.0
        operator = self.dims.operators[self.classes.members[key][0]]
        every = tuple(frozenset(s.name for s in strategies(operator)) for _ in self.machine.sizes)
        chosen, seconds = timed_candidates(operator, every, self.machine)
        seconds, splits, sizes = seconds * self._times(key), _splits(chosen), np.array(self.machine.sizes)
        left = np.where(splits, 1, sizes)
        again = sum(left[:, list(block)].prod(1) - 1 for block in self.blocks)
        least = float(seconds.min())
        share = np.divide(seconds - least, even * again, out=np.ones(len(seconds)), where=again > 0)
        return least, float(share.min().clip(0, 1))


def _splits(choices: Candidates) -> NDArray[np.bool_]:
    """``[candidates, axes]``: whether each axis splits the work."""
    found: NDArray[np.bool_] = np.array([s.splits for s in choices.strategies])[choices.choice]
    return found
