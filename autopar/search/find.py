"""`find_plan`: the search, from a program and its dims to a plan with a certificate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopar.candidates import strategies
from autopar.cluster import Cluster
from autopar.cost.memory import format_bytes, optimizer_state_bytes
from autopar.dims import Dims
from autopar.errors import InfeasibleError
from autopar.layout import Layout, item_bytes
from autopar.plan import Certificate, Plan
from autopar.program import Program
from autopar.redistribute import Machine, Tables
from autopar.search.axes import bound_by_axes, descend
from autopar.search.build import Built, Memory, build
from autopar.search.problem import Solution
from autopar.search.quotient import Quotient, quotient
from autopar.search.recipes import check_recipe, roles_of
from autopar.search.restrict import Restrictions
from autopar.search.solve import solve

Progress = Callable[[str, float, float], None]

EXACT_AXES = 2
"""Meshes of up to this many axes are solved as one problem; larger ones axis by axis, with the gap stated."""


@dataclass(frozen=True)
class Search:
    """How to search.

    Attributes:
        time_limit: seconds for the solver; where it searches without padding and with it, each has half of them.
        gap: relative gap at which to stop.
        pins: layouts decided by hand: name of a parameter or ``batch.0`` to one placement an axis, as text
            (``("R", "S(0)")``), torch placements or a dict by axis name.
        recipe: layouts by the name of a kind of parallelism, see `autopar.search.recipes`; the search decides only what
            the recipe leaves open. ``"random"`` draws a feasible plan, for tests (budgets are not looked at).
        roles: what axes are for, by name: ``data``, ``shard``, ``tensor`` or ``sequence``, see `autopar.search.roles`.
            Without a recipe, axes that are not named are searched; ``"megatron"`` takes roles, too.
        seed: of the random plan.
        tie_layers: repeated layers are laid out alike; False searches each on its own.
        padding: parameters whose dims an axis does not divide, such as a vocabulary of 50257, may be padded on the
            devices where that is faster; False: only where a pin splits them.
    """

    time_limit: float = 60.0
    gap: float = 1e-3
    pins: Mapping[str, Any] = field(default_factory=dict)
    recipe: str | None = None
    roles: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    tie_layers: bool = True
    padding: bool = True

    def __post_init__(self) -> None:
        """Refuse recipes that do not exist."""
        check_recipe(self.recipe, self.roles)


def find_plan(
    program: Program,
    dims: Dims,
    axes: Mapping[str, int],
    cluster: Cluster,
    *,
    memory: float | None = None,
    optimizer: str = "adamw",
    search: Search | None = None,
    restrictions: Restrictions | None = None,
    classes: Quotient | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The fastest plan that fits.

    Args:
        program: canonical program.
        dims: its dimension analysis.
        axes: name and size of each mesh axis, outermost first.
        cluster: devices and links.
        memory: bytes of parameters, gradients and optimizer state per device; None for no limit.
        optimizer: whose state is counted.
        search: limits of the search.
        restrictions: layouts decided already.
        classes: which nodes share a decision; default: as ``search.tie_layers`` says.
        progress: called with ``(phase, incumbent, bound)``.

    Raises:
        InfeasibleError: nothing fits; says how much is missing.
    """
    search, restrictions = search or Search(), restrictions or Restrictions()
    machine = Machine(tuple(axes), tuple(axes.values()), cluster.link_for(dict(axes)), cluster.device)
    classes = classes or quotient(program, dims, tie=search.tie_layers)
    state = state_bytes(program, optimizer)
    tables = Tables(machine)

    def make(limits: Restrictions) -> Built:
        return build(program, dims, classes, tables, Memory(state), limits)

    try:
        # Roles of all axes leave so little open that any number of them is one problem.
        decided = all(roles_of(search.recipe, axes, search.roles)) and bool(restrictions.strategies)
        if decided or len(axes) <= EXACT_AXES:
            built = make(restrictions)
            solution = solve(
                built.problem, budget=memory, gap=search.gap, time_limit=search.time_limit, progress=progress
            )
        else:
            built, solution = descend(make, restrictions, tables, memory, search.gap, search.time_limit, progress)
            bound = bound_by_axes(program, dims, classes, machine, restrictions)
            solution = replace(solution, lower_bound=max(bound, 0.0), method="axis by axis")
    except InfeasibleError as e:
        raise _explain(e, state, axes, memory) from e
    certificate = Certificate(
        solution.objective,
        min(solution.lower_bound, solution.objective),
        _space(search, cluster),
        solution.method,
    )
    return _read(program, dims, classes, built, solution, certificate, axes, cluster, optimizer, tables)


def require_splits(dims: Dims, axes: Mapping[str, int]) -> None:
    """Refuse a mesh axis that no operator can share its work along.

    Raises:
        InfeasibleError: names the axis, the sizes that there are and the remedy.
    """
    operators = dict.fromkeys(dims.operators.values())
    factors = [(o, s.factor) for o in operators for s in strategies(o) if s.factor is not None]
    sizes = sorted({o.letters[letter].factors[j].size for o, (letter, j) in factors}, reverse=True)
    for axis, n in axes.items():
        if n > 1 and not any(size % n == 0 for size in sizes):
            raise InfeasibleError(
                f"no operator can be split along axis {axis!r} of size {n}: it divides no factor of the model's "
                f"dims ({', '.join(map(str, sizes[:12]))}); choose an axis size that divides the batch or the weights"
            )


def _space(search: Search, cluster: Cluster) -> str:
    tied = ", repeated layers alike" if search.tie_layers else ""
    recipe = f"what recipe {search.recipe} leaves open; " if search.recipe else ""
    roles = ", ".join(f"{axis} for {role}" for axis, role in search.roles.items())
    recipe += f"axes as told ({roles}); " if roles else ""
    return (
        f"{recipe}one layout per tensor on every axis{tied}; a value has one layout besides its own for all its users; "
        "no pipelines, no recomputation; costs: kernels by tiles and traffic, collectives by ring or tree, "
        f"on {cluster.name}"
    )


def state_bytes(program: Program, optimizer: str) -> dict[str, float]:
    """Bytes of each parameter, and of all that it stands for, with gradient and optimizer state, on one device."""
    trained = {
        o.name for o, v in zip(program.outputs, program.output_values, strict=True) if o.kind == "gradient" and v
    }
    found = {}
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        if spec.kind == "parameter":
            value = node.meta["val"]
            item = item_bytes(str(value.dtype).removeprefix("torch."))
            size = float(value.numel() * item)
            if spec.name in trained:
                size = 2 * size + optimizer_state_bytes(optimizer, value.numel(), item)
            found[spec.name] = size * (len(program.repeat.names(spec.name)) if program.repeat else 1)
    return found


def _explain(
    error: InfeasibleError, state: Mapping[str, float], axes: Mapping[str, int], memory: float | None
) -> InfeasibleError:
    """Add what is missing and the smallest change that would do."""
    if memory is None or error.needed is None:
        return error
    devices = math.prod(axes.values())
    total = sum(state.values())
    more = max(devices + 1, math.ceil(total / memory))
    return InfeasibleError(
        f"parameters, gradients and optimizer state need at least {format_bytes(error.needed)} a device on axes "
        f"{dict(axes)}, and the budget is {format_bytes(memory)}: {format_bytes(error.needed - memory)} are missing. "
        f"Raise memory= to {format_bytes(error.needed)}, or use a mesh of about {more} devices",
        needed=error.needed,
        budget=memory,
    )


def _read(
    program: Program, dims: Dims, classes: Quotient, built: Built, solution: Solution, certificate: Certificate,
    axes: Mapping[str, int], cluster: Cluster, optimizer: str, tables: Tables,
) -> Plan:  # fmt: skip
    """A plan from the labels of every variable."""
    layouts: dict[str, Layout] = {}
    choices: dict[str, tuple[str, ...]] = {}
    relays: dict[str, Layout] = {}
    for variable, label in zip(built.variables, solution.labels, strict=True):
        if variable.choices is not None:
            choices[variable.key] = variable.choices.names(int(variable.candidate[label]))
            continue
        layout = variable.layout(int(label), tables)
        if variable.key.startswith("relay "):
            relays[variable.key.removeprefix("relay ")] = layout
        else:
            layouts[variable.key] = layout
    parameters, batch = {}, {}
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        if spec.kind == "parameter":
            parameters[spec.name] = layouts[classes.key[node]]
        if spec.kind == "batch":
            batch[spec.name] = layouts[classes.key[node]]
    results = {o.name: layouts[f"result {o.name}"] for o in program.outputs if o.kind == "result"}
    return Plan(
        axes=tuple(axes.items()), cluster=cluster, parameters=parameters, batch=batch, results=results,
        choices=choices, relays=relays, optimizer=optimizer, fingerprint=program.fingerprint,
        torch=str(torch.__version__), certificate=certificate,
    )  # fmt: skip
