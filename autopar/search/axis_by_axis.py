"""More axes than one problem takes: solve axis by axis, never the full product, and bound the whole by its axes.

With the others fixed, the layouts on two axes are a problem that is solved exactly; to solve these in turn until
nothing improves is block coordinate descent. The lower bound is a sum over axes. The moves of a plan, projected on one
axis, are moves along that axis, and no tensor is smaller than if it is split along all the others. Compute of ``T``
seconds on one device that is split over some of the ``N`` devices' axes takes ``T / N * prod(n_a, a not split)``, which
is at least ``T / N * (1 + sum(n_a - 1, a not split))``: a sum over axes.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autopar.ir.program import Program
from autopar.search.budget.lagrangian import solve
from autopar.search.budget.pareto import Frontier
from autopar.search.formulation.build import Formulation, build
from autopar.search.formulation.memory_model import MemoryModel
from autopar.search.formulation.pins import Restrictions
from autopar.search.overlap.weights import Weights
from autopar.search.solver.certify import Claim
from autopar.search.solver.minimize import Limits
from autopar.search.solver.problem import Node, Problem, Solution
from autopar.sharding.candidates import candidates
from autopar.sharding.dims import Dims
from autopar.sharding.layer_classes import LayerClasses
from autopar.sharding.operator_cost import operator_seconds
from autopar.sharding.redistribute import Tables
from autopar.sharding.redistribute.moves import Machine

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
) -> tuple[Formulation, Solution]:
    """Block coordinate descent over axes, from everything replicated.

    Raises:
        InfeasibleError: the last axis cannot bring memory under the budget.
    """
    limits = Limits(gap, time.monotonic() + time_limit)
    machine = tables.machine
    count = len(machine.sizes)
    fixed: dict[str, tuple[Any, ...]] = {}
    best: tuple[Formulation, Solution] | None = None
    # Fast links first: they carry the traffic that cannot be avoided.
    order = sorted(range(count), key=lambda a: (-machine.links[a].bandwidth, a))
    remaining = float(np.prod(machine.sizes))
    for axis in order:
        remaining /= machine.sizes[axis]
        # Later axes may split what is left, so that so many times the budget is allowed until then.
        budget = None if memory is None else memory * remaining
        best = _solve_block(make, replace(restrictions, fixed=fixed, free=(axis,)), budget, limits)
        fixed = placements(*best, tables)
    assert best is not None
    pairs = itertools.cycle(itertools.combinations(range(count), 2))
    stale, every = 0, count * (count - 1) // 2
    while stale < every and not limits.expired():  # until no pair improves, the others' layouts fixed
        block = next(pairs)
        found = _solve_block(make, replace(restrictions, fixed=fixed, free=block), memory, limits)
        stale += 1
        if found[1].objective < best[1].objective * (1 - gap):
            best, stale = found, 1
            fixed = placements(*best, tables)
        if progress:
            progress(f"axes {block}", best[1].objective, 0.0)
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


def bound_by_axes(
    program: Program,
    dims: Dims,
    classes: LayerClasses,
    machine: Machine,
    restrictions: Restrictions,
    weights: Weights | None = None,
    blocks: Sequence[Sequence[int]] | None = None,
) -> tuple[float, list[Claim]]:
    """Seconds that no plan on any of the axes can undercut; memory is not counted, so it holds for every budget.

    Returns:
        Seconds that no plan avoids, and a claim for each block of axes; the bound is the sum of all.
    """
    fixed, claims, devices = 0.0, list[Claim](), math.prod(machine.sizes)
    for block in blocks or [(axis,) for axis in range(len(machine.sizes))]:
        names, sizes, links = ([of[axis] for axis in block] for of in (machine.names, machine.sizes, machine.links))
        others = devices // math.prod(sizes)
        # With every other axis splitting it, each tensor is `others` times smaller: the same as a faster machine.
        fast = tuple(replace(link, bandwidth=link.bandwidth * others) for link in links)
        device = replace(machine.device, bandwidth=machine.device.bandwidth * others)
        quantized = tuple(q for q in machine.quantized if q.axis in names)
        part = Machine(tuple(names), tuple(sizes), fast, device, quantized)
        limits = Restrictions(
            layouts=_project(restrictions.layouts, block),
            data_axes_only=restrictions.data_axes_only,
            placements=_project(restrictions.placements, block),
            strategies=_project(restrictions.strategies, block),
        )
        own = weights and weights.of_axes(block)
        built = build(program, dims, classes, Tables(part), MemoryModel(defaultdict(float)), limits, own)
        problem, fixed = _share(built, dims, classes, machine, sizes, own)  # the same for every block
        claims.append(Claim(problem, solve(problem, gap=1e-4).lower_bound))
    return fixed, claims


def _project(decided: Mapping[Any, Sequence[Any]], block: Sequence[int]) -> dict[Any, tuple[Any, ...]]:
    return {key: tuple(of_axes[axis] for axis in block) for key, of_axes in decided.items()}


def _share(
    built: Formulation,
    dims: Dims,
    classes: LayerClasses,
    machine: Machine,
    sizes: Sequence[int],
    weights: Weights | None,
) -> tuple[Problem, float]:
    """The block's part of the compute bound in place of the operators' costs, and the part that no plan avoids."""
    nodes = []
    devices = math.prod(machine.sizes)
    base = 0.0
    for variable, node in zip(built.variables, built.problem.nodes, strict=True):
        if variable.choices is None:
            nodes.append(node)
            continue
        operator = dims.operators[classes.members[variable.key][0]]
        whole = candidates(operator, (1,), allowed=[["R"]])
        alone = Machine(("one",), (1,), machine.links[:1], replace(machine.device, launch=1e-30))
        price = 1.0 if weights is None else weights.of_kernels(classes.members[variable.key][0])[0]
        ideal = price * variable.count * float(operator_seconds(operator, whole, alone)[0]) / devices
        launch = price * variable.count * machine.device.launch if ideal > 0 else 0.0
        base += ideal + launch
        splits = np.array([s.splits for s in variable.choices.strategies])[variable.choices.choice]
        again = np.where(splits, 1, sizes).prod(1) - 1
        nodes.append(Node(node.name, ideal * again, node.memory))
    return Problem(tuple(nodes), built.problem.edges), base
