"""`find_plan`: the search, from a program and its dims to a plan with a certificate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopar.candidates import strategies
from autopar.cluster import Cluster
from autopar.cost.memory import optimizer_state_bytes
from autopar.dims import Dims
from autopar.errors import InfeasibleError
from autopar.layout import Layout, item_bytes
from autopar.plan import EVERY, INTERRUPTED, TIME_LIMIT, Certificate, Plan
from autopar.program import Program
from autopar.redistribute import Machine, Tables
from autopar.search.axes import bound_by_axes
from autopar.search.budget import Task, plan_by_axes, plan_within
from autopar.search.build import WHOLE, Built, Memory, Share, build
from autopar.search.certify import Claim
from autopar.search.duals import examine, require_cost
from autopar.search.frontier import Mix
from autopar.search.interrupt import requested
from autopar.search.minimise import Limits
from autopar.search.quotient import Quotient, quotient
from autopar.search.recipes import GATHERS_ONCE, check_recipe, roles_of
from autopar.search.restrict import Restrictions
from autopar.search.rival import NOBODY, Rival

Progress = Callable[[str, float, float], None]

RECOMPUTE, OFFLOAD, MICROBATCHES, STAGES, SCHEDULE, VIRTUAL, STAGE_AXIS = (
    "recompute", "offload", "microbatches", "stages", "schedule", "virtual", "stage_axis"
)  # fmt: skip
"""Pins that name no tensor."""

NO_TENSORS = (RECOMPUTE, OFFLOAD, MICROBATCHES, STAGES, SCHEDULE, VIRTUAL, STAGE_AXIS)

EXACT_AXES = 2
"""Meshes of up to this many axes are solved as one problem; larger ones axis by axis, with the gap stated."""


@dataclass(frozen=True)
class Search:
    """How to search.

    Attributes:
        time_limit: seconds for the solver; where it searches without padding and with it, each has half of them. Each
            number of microbatches has its own, and so has every pipeline; after five such limits no more are tried.
        gap: relative gap at which to stop.
        pins: layouts decided by hand: name or pattern of parameters, ``batch.0``, ``result.0`` or modules (for what
            they hand on) to one placement an axis, as text (``("R", "S(0)")``), torch placements or a dict by axis
            name. ``recompute`` is for short memory: ``"search"`` decides tensor by tensor what the backward pass makes
            again, ``"gathers"`` (of recipes the default) moves only parameters again, ``"none"`` keeps all that it
            takes. Each wins over the model's own ``torch.utils.checkpoint``, which is followed without this pin.
            ``offload`` is for short memory, too, where the device has a way to its host: ``"search"`` decides what lies
            in the host's memory until the backward pass, ``"none"`` (of recipes and pipelines the default) keeps all on
            the device; without it, that is searched where nothing fits otherwise. ``microbatches`` is how many parts of
            the batch a step computes one after the other, adding up gradients; without it, as many as short memory asks
            for.
            ``stages`` asks for a pipeline of so many devices along the axis ``stage_axis`` (by default the outermost
            of that size), with a list of modules for one whose later stages begin there, or with ``"search"`` for any
            pipeline or none, whichever is faster (without this pin, none). ``schedule`` is one of
            `autopar.pipeline.schedules.SCHEDULES`, or a table by hand, as rows of actions or a CSV file, see
            `autopar.pipeline.table`; ``virtual`` how many stages each device has; without them, and without
            ``microbatches``, these are searched, too.
        recipe: layouts by the name of a kind of parallelism, see `autopar.search.recipes`; the search decides only what
            the recipe leaves open. ``"random"`` draws a feasible plan, for tests (budgets are not looked at).
        roles: what axes are for, by name: ``data``, ``optimizer``, ``shard``, ``tensor`` or ``sequence``, see
            `autopar.search.roles`. Without a recipe, axes that are not named are searched; ``"megatron"`` takes roles,
            too.
        seed: of the random plan.
        tie_layers: repeated layers are laid out alike; False searches each on its own.
        padding: parameters whose dims an axis does not divide, such as a vocabulary of 50257, may be padded on the
            devices where that is faster; False: only where a pin splits them.
        check: the lower bound is verified afterwards, apart from the search, see `Certificate.checked`. May take as
            long as ``time_limit`` again.
        cache: a plan that was found before, for all the same, is read and not searched, see `autopar.cache`.
    """

    time_limit: float = 60.0
    gap: float = 1e-3
    pins: Mapping[str, Any] = field(default_factory=dict)
    recipe: str | None = None
    roles: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    tie_layers: bool = True
    padding: bool = True
    check: bool = False
    cache: bool = True

    def __post_init__(self) -> None:
        """Refuse recipes and words that do not exist."""
        check_recipe(self.recipe, self.roles)
        if self.pins.get(RECOMPUTE, "search") not in ("search", "gathers", "none"):
            raise ValueError(f"pin {RECOMPUTE!r} must be 'search', 'gathers' or 'none', got {self.pins[RECOMPUTE]!r}")
        if self.pins.get(OFFLOAD, "search") not in ("search", "none"):
            raise ValueError(f"pin {OFFLOAD!r} must be 'search' or 'none', got {self.pins[OFFLOAD]!r}")
        count = self.pins.get(MICROBATCHES, "search")
        if count != "search" and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ValueError(f"pin {MICROBATCHES!r} must be a positive whole number or 'search', got {count!r}")

        for name in (STAGES, VIRTUAL):
            number = self.pins.get(name, 1)
            if name == STAGES and (number == "search" or isinstance(number, list | tuple)):
                continue
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"pin {name!r} must be a positive whole number, got {number!r}")
        if not self.pipelines and any(name in self.pins for name in (SCHEDULE, VIRTUAL, STAGE_AXIS)):
            raise ValueError(
                f"pins {SCHEDULE!r}, {VIRTUAL!r} and {STAGE_AXIS!r} are for pipelines: pin {STAGES!r}, too"
            )

    @property
    def again(self) -> str:
        """What may be made again in the backward pass where memory is short: the pin ``recompute``.

        Recipes and roles say how the work is split: they gather parameters again, and keep the rest unless told
        otherwise. That ZeRO's first stages gather once is part of them.
        """
        if self.recipe in GATHERS_ONCE:
            return str(self.pins.get(RECOMPUTE, "none"))
        return str(self.pins.get(RECOMPUTE, "gathers" if self.recipe or self.roles else "search"))

    @property
    def offload(self) -> bool:
        """Whether what is kept may lie on the host where memory is short: the pin ``offload``."""
        return bool(self.pins.get(OFFLOAD) == "search")

    @property
    def offload_at_last(self) -> bool:
        """Whether it may where nothing fits otherwise; recipes and roles say what is done without it."""
        return OFFLOAD not in self.pins and not (self.recipe or self.roles or self.pipelines)

    @property
    def regions(self) -> bool:
        """Whether the model's own checkpointing is followed: the pin ``recompute`` wins over it."""
        return RECOMPUTE not in self.pins

    @property
    def layouts(self) -> dict[str, Any]:
        """The pins that are layouts."""
        return {name: value for name, value in self.pins.items() if name not in NO_TENSORS}

    @property
    def pipelines(self) -> bool:
        """Whether a plan may have stages."""
        return bool(self.pins.get(STAGES, 1) != 1)

    @property
    def stages_open(self) -> bool:
        """Whether it is searched if there are stages, and how many."""
        return bool(self.pins.get(STAGES) == "search")

    @property
    def stage_modules(self) -> tuple[str, ...]:
        """The modules at which later stages begin, where these are pinned."""
        found = self.pins.get(STAGES, 1)
        return tuple(found) if isinstance(found, list | tuple) else ()

    @property
    def microbatches(self) -> int | None:
        """The pin ``microbatches``; None: it is searched."""
        count = self.pins.get(MICROBATCHES, "search")
        return None if count == "search" else int(count)


Peak = Callable[[Plan], Mapping[str, float]]
"""Bytes by category at the moment when a device holds the most under a plan."""


def find_plan(
    program: Program,
    dims: Dims,
    axes: Mapping[str, int],
    cluster: Cluster,
    *,
    memory: float | None = None,
    peak: Peak | None = None,
    optimizer: str = "adamw",
    search: Search | None = None,
    restrictions: Restrictions | None = None,
    classes: Quotient | None = None,
    progress: Progress | None = None,
    rival: Rival = NOBODY,
    share: Share = WHOLE,
) -> Plan:
    """The fastest plan that fits.

    Args:
        program: canonical program.
        dims: its dimension analysis.
        axes: name and size of each mesh axis, outermost first.
        cluster: devices and links.
        memory: bytes per device; None for no limit.
        peak: what a plan needs, measured on the graph that is rewritten for it.
        optimizer: whose state is counted.
        search: limits of the search.
        restrictions: layouts decided already.
        classes: which nodes share a decision; default: as ``search.tie_layers`` says.
        progress: called with ``(phase, incumbent, bound)``.
        rival: what the plan has to beat.
        share: of what it would hold for the whole model that a device holds.

    Raises:
        InfeasibleError: nothing fits; says how much is missing.
        CertificateError: the check refutes what the search claims.
    """
    search, restrictions = search or Search(), restrictions or Restrictions()
    machine = Machine(tuple(axes), tuple(axes.values()), cluster.link_for(dict(axes)), cluster.device)
    classes = classes or quotient(program, dims, tie=search.tie_layers)
    tables = Tables(machine)
    # Roles of all axes leave so little open that any number of them is one problem.
    decided = all(roles_of(search.recipe, axes, search.roles)) and bool(restrictions.strategies)
    exact = decided or len(axes) <= EXACT_AXES
    limits = Limits(search.gap, time.monotonic() + search.time_limit)

    away = search.offload and machine.device.host_bandwidth > 0

    def make(restrictions: Restrictions, memory: Memory) -> Built:
        return build(program, dims, classes, tables, memory, restrictions)

    def read(built: Built, mix: Mix, bound: float, method: str) -> Plan:
        if search.check:
            require_cost(built.problem, mix, [v.count for v in built.variables])
        bound = min(max(bound, 0.0), mix.cost)
        certificate = Certificate(mix.cost, bound, _space(search, cluster, regions, away), method, mix.price)
        plan = plan_of(program, dims, classes, built, mix, certificate, axes, cluster, optimizer, tables)
        return replace(plan, held=restrictions.held)

    def state(gradients: bool) -> dict[str, float]:
        return state_bytes(program, optimizer, gradients=gradients)

    claims: list[Claim] = []
    report, regions = progress or _silent, search.regions and bool(program.pins)
    rest = optimizer_bytes(program, optimizer) if away else {}

    task = Task(
        make, read, state, restrictions, limits, memory, peak, search.again, report, regions, away, rest, claims.append,
        rival, share,
    )  # fmt: skip
    if exact:
        plan, fixed = plan_within(task), 0.0
        claims = [max(claims, key=lambda claim: claim.bound)]  # each is about all plans
    else:
        fixed, claims = bound_by_axes(program, dims, classes, machine, restrictions)
        plan = plan_by_axes(task, tables, fixed + sum(claim.bound for claim in claims))
    if limits.expired():
        plan = replace(plan, certificate=replace(plan.certificate, method=INTERRUPTED if requested() else TIME_LIMIT))
    if not search.check or requested():
        return plan
    report("checking the bound", plan.certificate.objective, plan.certificate.lower_bound)
    checked = fixed + sum(examine(claim, search.time_limit / len(claims)) for claim in claims)
    return replace(plan, certificate=replace(plan.certificate, checked=max(checked, 0.0)))


def _silent(phase: str, incumbent: float, bound: float) -> None:
    """Say nothing."""


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


def _space(search: Search, cluster: Cluster, regions: bool, away: bool) -> str:
    tied = ", repeated layers alike in layout" if search.tie_layers else ""
    recipe = f"what recipe {search.recipe} leaves open; " if search.recipe else ""
    roles = ", ".join(f"{axis} for {role}" for axis, role in search.roles.items())
    recipe += f"axes as told ({roles}); " if roles else ""
    words = {
        "search": "any tensor kept, made or moved again (what repeated layers hand on is kept)",
        "gathers": "parameters gathered once or twice",
    }
    kept = words.get(search.again, "no recomputation")
    kept += ", but checkpointed regions as the model has them" if regions else ""
    kept += ", or on the host where that takes less time than making it again, as optimizer state may" if away else ""
    return (
        f"{recipe}one layout per tensor on every axis{tied}; a value has one layout besides its own for all its users; "
        f"no pipelines, {kept}; costs: kernels by tiles and traffic, collectives by ring or tree, "
        f"on {cluster.name}"
    )


def state_bytes(program: Program, optimizer: str, *, gradients: bool = True) -> dict[str, float]:
    """Bytes of each parameter, and of all that it stands for, with optimizer state and gradient, on one device."""
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
                size += (size if gradients else 0.0) + optimizer_state_bytes(optimizer, value.numel(), item)
            found[spec.name] = size * (len(program.repeat.names(spec.name)) if program.repeat else 1)
    return found


def optimizer_bytes(program: Program, optimizer: str) -> dict[str, float]:
    """Bytes of optimizer state of each parameter that has some, and of all that it stands for, on one device."""
    found, gone = state_bytes(program, optimizer), state_bytes(program, "sgd")
    return {name: size - gone[name] for name, size in found.items() if size > gone[name]}


def plan_of(
    program: Program, dims: Dims, classes: Quotient, built: Built, mix: Mix, certificate: Certificate,
    axes: Mapping[str, int], cluster: Cluster, optimizer: str, tables: Tables,
) -> Plan:  # fmt: skip
    """A plan from the labels of every variable, and from the states of its first members and of the rest."""
    layouts: dict[str, Layout] = {}
    choices: dict[str, tuple[str, ...]] = {}
    relays: dict[str, Layout] = {}
    recompute: dict[str, tuple[tuple[int, int], ...]] = {}
    offload: dict[str, tuple[tuple[int, int], ...]] = {}
    for variable, label, first in zip(built.variables, mix.over, mix.under, strict=True):
        if variable.state is not None:
            split = math.ceil(mix.share * variable.count - 1e-9)
            for table, marked in ((recompute, variable.marked), (offload, variable.away)):
                ranges = [(0, split)] * int(marked[first]) + [(split, EVERY[0][1])] * int(marked[label])
                if joined := _joined(ranges):
                    table[variable.key] = joined
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
        torch=str(torch.__version__), certificate=certificate, recompute=recompute,
        offload=offload,
    )  # fmt: skip


def _joined(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ranges that are not empty, neighbours made one."""
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if start < stop:
            found = [*found[:-1], (found[-1][0], stop)] if found and found[-1][1] == start else [*found, (start, stop)]
    return tuple(found)
