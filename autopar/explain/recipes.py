"""A plan and the recipes under the same costs: how much faster than a hand-made layout is it?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from autopar.capture import Batch, LossFunction
from autopar.compiler import default_memory, part_of_worker, program_to_plan, solve
from autopar.costs.arguments import AXES, FLAG, require
from autopar.costs.cluster import Cluster
from autopar.costs.memory import format_bytes
from autopar.errors import InfeasibleError
from autopar.ir.ops.routing import sort_by_expert
from autopar.ir.plan import INTERRUPTED, Plan
from autopar.ir.precision import Precision
from autopar.ir.program import Program
from autopar.ir.signature import binding
from autopar.ir.signature.outputs import Loss
from autopar.ir.signature.worker_rows import split_tensors
from autopar.search.arguments import check_float64, check_planning
from autopar.search.formulation.local_axes import require_rows
from autopar.search.formulation.recipes import RECIPES, TAKES_ROLES
from autopar.search.options import RECOMPUTE, Progress, Search
from autopar.search.solver.highs import requested, stoppable

Tick = Callable[[int, int, str], None]

SECONDS = 10.0
"""Time limit of the solver for a recipe, which leaves few choices open."""


@dataclass(frozen=True)
class Comparison:
    """The best plan of one recipe, or why there is none.

    Attributes:
        recipe: its name.
        plan: the best plan that is one of the recipe's; None if there is none.
        reason: why there is none.
        recomputing: whether it was searched with recomputation, since it does not fit without.
    """

    recipe: str
    plan: Plan | None
    reason: str = ""
    recomputing: bool = False

    @property
    def label(self) -> str:
        """What it is called in a table."""
        return f"{self.recipe}, recomputing" if self.recomputing else self.recipe


@dataclass(frozen=True)
class Found:
    """A plan, and what recipes are searched with beside it.

    Attributes:
        plan: the plan.
        program: that it is of.
        memory: budget per device.
        search: how it was searched.
    """

    plan: Plan
    program: Program
    memory: str | float
    search: Search


def find_plan(
    model: nn.Module,
    batch: Batch,
    *,
    cluster: Cluster | str | Path,
    axes: Mapping[str, int],
    loss_fn: LossFunction | None = None,
    loss: Loss = None,
    memory: str | float | None = None,
    optimizer: str = "adamw",
    precision: Precision | None = None,
    compile: bool = False,
    search: Search | None = None,
    progress: Progress | None = None,
) -> Found:
    """What `autopar.plan` finds, with its arguments. Ctrl-C ends the search with the best plan so far.

    Raises:
        KeyboardInterrupt: Ctrl-C came a second time, or before there was a plan that fits.
    """
    check_planning(model, batch, loss_fn, loss, memory, optimizer, search)
    check_float64(model, precision, search)
    require(axes=(axes, AXES), compile=(compile, FLAG))
    search, machine = search or Search(), Cluster.resolve(cluster)
    search.require_axes(axes)
    role = search.worker_role
    workers, axes, search = search.of_worker(axes)
    tensors = binding.flatten(model, batch)[0] if workers else []
    batch = part_of_worker(model, batch, workers)
    program = program_to_plan(
        model, batch, loss_fn=loss_fn, loss=loss, precision=precision, fused=compile, search=search, progress=progress
    )
    require_rows(program, split_tensors(tensors))
    # One capture and one budget for all: what differs is the recipe alone.
    budget = default_memory(machine, axes) if memory is None else memory

    def say() -> None:
        if progress:
            progress("stopping; Ctrl-C again ends at once", math.inf, 0.0)

    with stoppable(say):
        try:
            found = solve(program, axes, machine, memory=budget, optimizer=optimizer, search=search, progress=progress)
        except InfeasibleError as e:
            if requested():  # nothing found so far fits, but the search was not over: that proves nothing
                raise KeyboardInterrupt from e
            raise
    return Found(found.of_workers(workers, role), program, budget, search)


def compare_recipes(found: Found, tick: Tick | None = None) -> tuple[Comparison, ...]:
    """Every recipe on a plan's axes, cluster and optimizer; one that does not fit also with recomputation.

    Ctrl-C leaves out those that are not done, and a search that was ended so is compared with none.

    Args:
        found: the plan. Recipes are searched as it was, without its pins and its recipe.
        tick: called with ``(done, total, name of the next one)``.
    """
    if found.plan.certificate.method == INTERRUPTED:
        return ()
    rows: list[Comparison] = []
    names = compared_with(found)
    with stoppable(lambda: None):
        for name in names:
            if tick is not None:
                tick(len(rows), len(names), name)
            row = _compared(found, name)
            if requested():  # its search was cut short
                break
            rows.append(row)
    return tuple(rows)


def compared_with(found: Found) -> tuple[str, ...]:
    """Names of the recipes that a plan is compared with: that for experts only where the model sorts tokens by them."""
    mixture = any(n.target is sort_by_expert for n in found.program.graph.graph.nodes)
    return tuple(name for name in RECIPES if name != "expert" or mixture)


def _compared(found: Found, name: str) -> Comparison:
    search = found.search
    if name == search.recipe:
        return Comparison(name, found.plan)
    # The other recipes decide the roles of all axes, and refuse those of the user.
    roles = search.roles if name in TAKES_ROLES else {}
    own = replace(search, recipe=name, roles=roles, pins={}, time_limit=min(search.time_limit, SECONDS), check=False)
    try:
        return Comparison(name, _solve_like(found, own))
    except (InfeasibleError, ValueError) as e:
        # With a number of bytes the error is about memory, which recomputation may help; otherwise it cannot.
        if isinstance(e, InfeasibleError) and e.needed is not None:
            return _recomputing(found, own)
        return Comparison(name, None, reason_of(e))


def _recomputing(found: Found, search: Search) -> Comparison:
    """A recipe that does not fit without recomputation."""
    name = str(search.recipe)
    try:
        plan = _solve_like(found, replace(search, pins={RECOMPUTE: "search"}))
    except InfeasibleError as e:
        return Comparison(name, None, reason_of(e), recomputing=True)
    return Comparison(name, plan, recomputing=True)


def _solve_like(found: Found, search: Search) -> Plan:
    """The best plan of another search, for the mesh, cluster and optimizer of a plan."""
    plan = found.plan
    return solve(
        found.program, dict(plan.axes), plan.cluster, memory=found.memory, optimizer=plan.optimizer, search=search
    )


def reason_of(error: Exception) -> str:
    """Why there is no plan, in a few words if memory is too small."""
    if isinstance(error, InfeasibleError) and error.needed is not None and error.budget is not None:
        needed, missing, budget = map(format_bytes, (error.needed, error.needed - error.budget, error.budget))
        return f"needs {needed} per device, {missing} more than the budget of {budget}"
    return str(error)
