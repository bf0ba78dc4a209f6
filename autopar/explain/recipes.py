"""`plan_and_compare`: a plan and the recipes under the same costs: how much faster than a hand-made layout is it?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from autopar.capture import Batch, LossFunction
from autopar.compiler import default_memory, program_to_plan, solve
from autopar.costs.cluster import Cluster
from autopar.costs.memory import format_bytes
from autopar.errors import InfeasibleError
from autopar.ir.plan import INTERRUPTED, Plan
from autopar.ir.precision import Precision
from autopar.ir.program import Program
from autopar.ir.signature.outputs import Loss
from autopar.search.formulation.recipes import RECIPES, TAKES_ROLES
from autopar.search.options import RECOMPUTE, Progress, Search
from autopar.search.solver.highs import requested, stoppable

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


def plan_and_compare(
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
    search: Search | None = None,
    progress: Progress | None = None,
) -> tuple[Plan, tuple[Comparison, ...]]:
    """What `autopar.plan` finds, with its arguments, and a comparison with every recipe; the model is captured once.

    Ctrl-C ends the search with the best plan so far, which is not compared with the recipes.

    Raises:
        KeyboardInterrupt: Ctrl-C came a second time, or before there was a plan that fits.
    """
    search, machine = search or Search(), Cluster.resolve(cluster)
    program = program_to_plan(
        model, batch, loss_fn=loss_fn, loss=loss, precision=precision, search=search, progress=progress
    )
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
    if found.certificate.method == INTERRUPTED:
        return found, ()
    return found, compare_recipes(program, found, memory=budget, search=search)


def compare_recipes(
    program: Program, found: Plan, *, memory: str | float | None = None, search: Search | None = None
) -> tuple[Comparison, ...]:
    """Every recipe on a plan's axes, cluster and optimizer; one that does not fit also with recomputation.

    Args:
        program: canonical program that the plan is of.
        found: the plan.
        memory: budget per device.
        search: how the plan was searched; pins and recipe are left out.
    """
    search = search or Search()
    rows = []
    for name in RECIPES:
        if name == search.recipe:
            rows.append(Comparison(name, found))
            continue
        # The other recipes decide the roles of all axes, and refuse those of the user.
        roles = search.roles if name in TAKES_ROLES else {}
        own = replace(
            search, recipe=name, roles=roles, pins={}, time_limit=min(search.time_limit, SECONDS), check=False
        )
        try:
            row = Comparison(name, _solve_like(program, found, own, memory))
        except (InfeasibleError, ValueError) as e:
            row = Comparison(name, None, reason_of(e))
            # With a number of bytes the error is about memory, which recomputation may help; otherwise it cannot.
            if isinstance(e, InfeasibleError) and e.needed is not None:
                row = _recomputing(program, found, own, memory)
        rows.append(row)
    return tuple(rows)


def _recomputing(program: Program, found: Plan, search: Search, memory: str | float | None) -> Comparison:
    """A recipe that does not fit without recomputation."""
    name = str(search.recipe)
    try:
        plan = _solve_like(program, found, replace(search, pins={RECOMPUTE: "search"}), memory)
    except InfeasibleError as e:
        return Comparison(name, None, reason_of(e), recomputing=True)
    return Comparison(name, plan, recomputing=True)


def _solve_like(program: Program, found: Plan, search: Search, memory: str | float | None) -> Plan:
    """The best plan of another search, for the mesh, cluster and optimizer of a plan."""
    return solve(program, dict(found.axes), found.cluster, memory=memory, optimizer=found.optimizer, search=search)


def reason_of(error: Exception) -> str:
    """Why there is no plan, in a few words if memory is too small."""
    if isinstance(error, InfeasibleError) and error.needed is not None and error.budget is not None:
        needed, missing, budget = map(format_bytes, (error.needed, error.needed - error.budget, error.budget))
        return f"needs {needed} per device, {missing} more than the budget of {budget}"
    return str(error)
