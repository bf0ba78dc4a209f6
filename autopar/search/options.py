"""`Search`, what users say of how to search, and `Job`, what is searched for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autopar.costs.arguments import FLAG, TEXT, Kind, a, number, optional, require, whole
from autopar.costs.cluster import Cluster
from autopar.costs.mixed.shares import Shares
from autopar.ir.quantized.axes import QuantizedAxis, read_quantized
from autopar.pipeline.custom_schedule import as_text, is_table
from autopar.pipeline.schedules import SCHEDULES
from autopar.search.budget.cutoff import NO_CUTOFF, Cutoff
from autopar.search.formulation.axis_roles import ROLES
from autopar.search.formulation.local_axes import Axes, check_inexact, exact_roles, worker_axes, worker_role
from autopar.search.formulation.pins import Restrictions, read_layout, read_placement
from autopar.search.formulation.recipes import GATHERS_ONCE, check_recipe, roles_of
from autopar.search.pipeline.shape import ScheduledStages

Progress = Callable[[str, float, float], None]
"""``(phase, incumbent, bound)``, in seconds."""

RECOMPUTE, OFFLOAD, OVERLAP, MICROBATCHES, SHARES, STAGES, SCHEDULE, VIRTUAL, STAGE_AXIS, STAGE_ORDER = (
    "recompute", "offload", "overlap", "microbatches", "shares", "stages", "schedule", "virtual", "stage_axis",
    "stage_order",
)  # fmt: skip
"""Pins that name no tensor."""

REGATHER, FORMER_REGATHER = "regather", ("gathers",)
"""The value of the pin ``recompute`` that re-gathers parameters only, and what it was called before."""

SECONDARY = "secondary"
"""The pin of axes along which copies of parameters for the backward pass stay split."""

NO_TENSORS = (
    SECONDARY,
    RECOMPUTE,
    OFFLOAD,
    OVERLAP,
    MICROBATCHES,
    SHARES,
    STAGES,
    SCHEDULE,
    VIRTUAL,
    STAGE_AXIS,
    STAGE_ORDER,
)


@dataclass(frozen=True)
class Search:
    """How to search.

    Attributes:
        time_limit: seconds of the solver. The search with padding and the one without have half of it each; each number
            of microbatches and each pipeline has its own, and after five such limits no more are tried. Where nothing
            fits, memory repair (`autopar.search.budget.repair`) may take as long again.
        gap: relative gap at which to stop.
        pins: what is decided by hand. A key names a layout: a parameter or a pattern of parameters, ``batch.0``,
            ``result.0``, or a module (for its output). Its value has one placement per mesh axis, as text (``("R",
            "S(0)")``), torch placements, or a dict by axis name. Other keys:

            ``recompute``: what the backward pass may recompute where memory is short. ``"search"`` decides tensor by
            tensor, ``"regather"`` (the default of recipes) re-gathers parameters only, ``"none"`` saves everything.
            Each overrides the model's own ``torch.utils.checkpoint``, which is followed without this pin.

            ``offload``: ``"search"`` decides which saved activations and optimizer state to offload to host memory,
            ``"none"`` (the default of recipes and pipelines) offloads nothing. Without the pin, offloading is searched
            where nothing fits otherwise and the device has a link to its host.

            ``overlap``: ``"none"`` waits for each collective where it is issued, which takes the least memory;
            ``"search"``, the default, lets collectives run beside kernels, products of their own rows included, unless
            that does not fit.

            ``secondary``: an axis, or a list of axes. The forward pass leaves copies of what it gathers of parameters,
            split along these axes alone, where memory allows: the backward pass gathers along them, and not along
            others, whose links are slower.

            ``microbatches``: how many microbatches a step accumulates gradients over; without it, as many as short
            memory asks for.

            ``shares``: shares of the batch by speed, along an axis of role ``data``: for
            ``{"node": [3, 1]}`` the devices of one node run three microbatches and those of the other one;
            ``{"node": "search"}`` decides by what a microbatch takes on each kind of devices. With it each rank is
            given the whole batch, and the model returns its loss alone.

            ``stages``: pipeline stages: the number of devices along the axis ``stage_axis`` (by default the outermost
            axis of that size), a list of the modules at which later stages begin, or ``"search"`` for whichever
            pipeline, or none, is fastest. Without it there is no pipeline. ``schedule`` is one of
            `autopar.pipeline.schedules.SCHEDULES`, or a custom one as rows of actions or a CSV file, see
            `autopar.pipeline.custom_schedule`; ``virtual`` is the number of stages per device. Without ``schedule``,
            ``virtual`` and ``microbatches``, these are searched, too. ``stage_order`` has the coordinates along the
            axis in the order of the pipeline; without it, kinds of devices are tried in every order.
        recipe: layouts by the name of a parallelism, see `autopar.search.formulation.recipes`; the search decides only
            what the recipe leaves open. ``"random"`` draws a feasible plan, for tests; it ignores budgets.
        roles: what each axis is for, by name: ``data``, ``optimizer``, ``shard``, ``tensor`` or ``sequence``, see
            `autopar.search.formulation.axis_roles`. Without a recipe, axes without a role are searched;
            ``"megatron"`` takes roles, too. ``local`` and ``compressed``, beside any recipe, are for the outermost
            axis: its indices are workers that train apart, see `autopar.LocalSteps`, or that exchange compressed
            gradients, see `autopar.CompressedGradients`; ``stale`` is for an axis of all devices, see
            `autopar.StaleGradients`.
        seed: of the random plan.
        tie_layers: repeated layers have the same layouts; False searches each layer on its own.
        padding: parameters whose dims an axis does not divide, such as a vocabulary of 50257, may be padded on the
            devices where that is faster; False: only where a pin splits them.
        check: verify the lower bound after the search, independently of it, see `Certificate.checked`. May take as long
            as ``time_limit`` again.
        cache: a plan that was found before for the same program, cluster and options is read, see
            `autopar.search.cache`.
        inexact: choices that change the numbers, and are refused unless they are named: the roles ``local``,
            ``compressed`` and ``stale``, ``quantized``, and ``fp8``, linear layers in float8 (``precision="fp8"``);
            ``float64`` allows compressed or few-bit messages of parameters in double precision, for comparisons.
        quantized: by axis, bits (8 or 4) of each number of ``weights`` that are gathered and of ``gradients`` that are
            reduced into shards along it, such as ``{"node": {"weights": 8, "gradients": 4}}``, where that makes the
            message smaller, see `autopar.ir.quantized`.
        imbalance: how many times as many tokens as in the mean the device gets whose experts get most, of those that
            split a mixture's experts; or how many tokens each expert got, as measured. Time and memory are those of
            that device. Default: all get equally many.
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
    inexact: tuple[str, ...] = ()
    quantized: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    imbalance: float | Sequence[float] = 1.0

    def __post_init__(self) -> None:
        """Refuse what is of the wrong type or out of range, and words that do not exist."""
        require(
            time_limit=(self.time_limit, number(0, infinite=True)),
            gap=(self.gap, number(0)),
            pins=(self.pins, _BY_NAME),
            recipe=(self.recipe, optional(TEXT)),
            roles=(self.roles, _BY_NAME),
            seed=(self.seed, whole(0)),
            tie_layers=(self.tie_layers, FLAG),
            padding=(self.padding, FLAG),
            check=(self.check, FLAG),
            cache=(self.cache, FLAG),
            inexact=(self.inexact, a((tuple, list), "a tuple of texts, such as ('local',)")),
            quantized=(self.quantized, _BY_NAME),
            imbalance=(self.imbalance, _imbalance),
        )
        read_quantized(self.quantized)
        check_inexact(tuple(self.inexact), self.roles, self.quantized)
        for axis, role in self.roles.items():
            if role not in ROLES:
                raise ValueError(f"roles= gives axis {axis!r} the role {role!r}; there are {', '.join(ROLES)}")
        for name, value in self.layouts.items():
            _require_placements(name, value)
        check_recipe(self.recipe, exact_roles(self.roles))
        if self.pins.get(RECOMPUTE, "search") not in ("search", REGATHER, "none", *FORMER_REGATHER):
            raise ValueError(f"pin {RECOMPUTE!r} must be 'search', 'regather' or 'none', got {self.pins[RECOMPUTE]!r}")
        for name in (OFFLOAD, OVERLAP):
            if self.pins.get(name, "search") not in ("search", "none"):
                raise ValueError(f"pin {name!r} must be 'search' or 'none', got {self.pins[name]!r}")
        count = self.pins.get(MICROBATCHES, "search")
        if count != "search" and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ValueError(f"pin {MICROBATCHES!r} must be a positive whole number or 'search', got {count!r}")

        _ = self.shares  # refuses what is none
        if SECONDARY in self.pins:
            named = [axis for axis in self.secondary if isinstance(axis, str) and axis]
            if not named or len(named) < len(self.secondary) or len(set(named)) < len(named):
                raise ValueError(
                    f"pin {SECONDARY!r} must be an axis or a list of axes, each once, got {self.pins[SECONDARY]!r}"
                )
            if self.pipelines:
                raise ValueError(f"pin {SECONDARY!r} is not for pipelines: leave it or {STAGES!r} out")
        for name in (STAGES, VIRTUAL):
            count = self.pins.get(name, 1)
            if name == STAGES and (isinstance(count, str) and count == "search"):
                continue
            if name == STAGES and isinstance(count, list | tuple):
                if not count or not all(isinstance(module, str) and module for module in count):
                    raise ValueError(f"pin {name!r} must name the modules at which later stages begin, got {count!r}")
                continue
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"pin {name!r} must be a positive whole number, got {count!r}")
        if not self.pipelines and any(name in self.pins for name in (SCHEDULE, VIRTUAL, STAGE_AXIS, STAGE_ORDER)):
            raise ValueError(
                f"pins {SCHEDULE!r}, {VIRTUAL!r}, {STAGE_AXIS!r} and {STAGE_ORDER!r} are for pipelines: pin "
                f"{STAGES!r}, too"
            )
        places = self.pins.get(STAGE_ORDER)
        if STAGE_ORDER in self.pins and not (
            isinstance(places, list | tuple) and places and all(type(n) is int for n in places)
            and sorted(places) == list(range(len(places)))
        ):  # fmt: skip
            raise ValueError(
                f"pin {STAGE_ORDER!r} must have the numbers of the devices along the axis of the stages, each once, "
                f"such as [1, 0], got {places!r}"
            )
        if STAGE_AXIS in self.pins:
            require(**{f"pin {STAGE_AXIS!r}": (self.pins[STAGE_AXIS], TEXT)})
        # A file is read when it is searched.
        schedule = self.pins.get(SCHEDULE)
        if SCHEDULE in self.pins and not (isinstance(schedule, str | Path) and str(schedule).endswith(".csv")):
            text = as_text(schedule)
            if not is_table(text) and text not in SCHEDULES:
                raise ValueError(f"pin {SCHEDULE!r}: unknown schedule {text!r}; one of {', '.join(SCHEDULES)}")

    def require_axes(self, axes: Mapping[str, int]) -> None:
        """Refuse roles and pins of axes that a mesh does not have.

        Raises:
            ValueError: names the axis and those that there are.
        """
        _, axes = worker_axes(self.roles, axes)
        for axis in self.secondary:
            if axis not in axes:
                raise ValueError(f"pin {SECONDARY!r} names axis {axis!r}; the mesh has {', '.join(axes)}")
        if self.shares is not None:
            axis, counts = self.shares
            if axis not in axes:
                raise ValueError(f"pin {SHARES!r} names axis {axis!r}; the mesh has {', '.join(axes)}")
            if axes[axis] < 2 or len(counts or range(axes[axis])) != axes[axis]:
                raise ValueError(
                    f"pin {SHARES!r} has {len(counts or ())} numbers for axis {axis!r}, which has {axes[axis]} "
                    "coordinates: give a number for each of two or more"
                )
        if self.secondary and not set(axes) - set(self.secondary):
            raise ValueError(
                f"pin {SECONDARY!r} names all axes of the mesh ({', '.join(axes)}): copies would be split as "
                "parameters are; leave an outer axis out"
            )
        for axis in self.quantized:
            if axis not in axes or axis == self.pins.get(STAGE_AXIS):
                inner = [a for a in axes if a != self.pins.get(STAGE_AXIS)]
                raise ValueError(
                    f"quantized= names axis {axis!r}, along which no parameter is gathered and no gradient reduced; "
                    f"there are {', '.join(inner) or 'none'}"
                )
        roles_of(self.recipe, axes, exact_roles(self.roles))
        # With stages, pins speak of the axes inside of one.
        for name, value in self.layouts.items() if not self.pipelines else ():
            read_layout(name, value, tuple(axes))

    @property
    def worker_role(self) -> str:
        """The role of the workers' axis: ``local`` unless another is given."""
        return worker_role(self.roles)

    def of_worker(self, axes: Mapping[str, int]) -> tuple[Axes, dict[str, int], Search]:
        """The axis of workers, none or one; a worker's own axes, and how to search on them.

        Raises:
            ValueError: the axis of workers is missing or not the outermost one.
        """
        workers, within = worker_axes(self.roles, axes)
        if not workers:
            return (), dict(axes), self
        return workers, within or {"device": 1}, replace(self, roles=exact_roles(self.roles))

    @property
    def load(self) -> tuple[float, ...]:
        """``imbalance`` as `autopar.ir.layout.imbalance_of` takes it."""
        if isinstance(self.imbalance, int | float):
            return () if self.imbalance == 1 else (float(self.imbalance),)
        return tuple(map(float, self.imbalance))

    @property
    def recompute(self) -> str:
        """What may be recomputed in the backward pass where memory is short: the pin ``recompute``.

        Recipes and roles say how the work is split: they re-gather parameters, and save everything else unless told
        otherwise. That ZeRO's first stages gather once is part of them.
        """
        default = "search"
        if self.recipe or self.roles:
            # ZeRO-1 and ZeRO-2 gather parameters once; ZeRO-3 and all others may re-gather them.
            default = "none" if self.recipe in GATHERS_ONCE else REGATHER
        pinned = str(self.pins.get(RECOMPUTE, default))
        return REGATHER if pinned in FORMER_REGATHER else pinned

    @property
    def offload(self) -> bool:
        """Whether saved activations and optimizer state may be offloaded where memory is short: the pin ``offload``."""
        return bool(self.pins.get(OFFLOAD) == "search")

    @property
    def offload_at_last(self) -> bool:
        """Whether they may where nothing fits otherwise; recipes and roles say what is done without it."""
        return OFFLOAD not in self.pins and not (self.recipe or self.roles or self.pipelines)

    @property
    def overlap(self) -> bool:
        """Whether collectives may run beside kernels: the pin ``overlap``."""
        return bool(self.pins.get(OVERLAP, "search") == "search")

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
    def secondary(self) -> tuple[str, ...]:
        """The pin ``secondary``: axes along which copies for the backward pass stay split; empty: there are none."""
        axes = self.pins.get(SECONDARY, ())
        return (axes,) if isinstance(axes, str) else tuple(axes) if isinstance(axes, list | tuple) else ()

    @property
    def shares(self) -> tuple[str, tuple[int, ...] | None] | None:
        """The pin ``shares``: an axis, and how many microbatches each coordinate runs; None for these: it is searched.

        Raises:
            ValueError: it is none.
        """
        if SHARES not in self.pins:
            return None
        pinned = self.pins[SHARES]
        if not isinstance(pinned, Mapping) or len(pinned) != 1 or not all(isinstance(axis, str) for axis in pinned):
            raise ValueError(f"pin {SHARES!r} must have one axis, as {{'node': [3, 1]}}, got {pinned!r}")
        if self.pipelines:
            raise ValueError(
                f"pin {SHARES!r} is not for pipelines, whose stages are as long on each kind of devices as that needs: "
                f"leave it or {STAGES!r} out"
            )
        ((axis, counts),) = pinned.items()
        if isinstance(counts, str) and counts == "search":
            return axis, None
        if not isinstance(counts, list | tuple):
            raise ValueError(f"pin {SHARES!r} must be 'search' or a number for each coordinate, got {counts!r}")
        shares = Shares(axis, tuple(counts))
        if self.microbatches not in (None, shares.microbatches):
            raise ValueError(
                f"pin {SHARES!r} has {shares}, which is {shares.microbatches} microbatches in the mean, and pin "
                f"{MICROBATCHES!r} {self.microbatches}: leave one out"
            )
        return axis, shares.counts

    @property
    def microbatches(self) -> int | None:
        """The pin ``microbatches``; None: it is searched."""
        count = self.pins.get(MICROBATCHES, "search")
        return None if count == "search" else int(count)


def _require_placements(name: str, value: Any) -> None:
    """Refuse what is no layout on any mesh."""
    each = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else (value,)
    for placement in each:
        if placement is not None:
            read_placement(name, placement)


def _by_name(value: Any) -> str | None:
    fine = isinstance(value, Mapping) and all(isinstance(name, str) and name for name in value)
    return None if fine else "a dict by name"


_BY_NAME: Kind = _by_name


def _imbalance(value: Any) -> str | None:
    if isinstance(value, int | float):
        fine = not isinstance(value, bool) and 1 <= value < math.inf
    else:
        fine = isinstance(value, list | tuple) and len(value) > 1
        fine = fine and all(type(n) in (int, float) and 0 <= n < math.inf for n in value) and sum(value) > 0
    return (
        None if fine else "a number of at least 1, such as 1.3, or how many tokens each expert got, as [310, 202, ...]"
    )


def silent(phase: str, incumbent: float, bound: float) -> None:
    """Say nothing."""


@dataclass(frozen=True)
class Job:
    """What a plan is searched for.

    Attributes:
        axes: name and size of each mesh axis, outermost first.
        cluster: devices and links.
        memory: bytes per device; None for no limit.
        optimizer: whose state is counted.
        search: limits and pins.
        restrictions: what is decided already.
        progress: called with ``(phase, incumbent, bound)``.
        cutoff: what the plan must be faster than.
        all_points: whether the budget is for every program point of a step; False: for what is saved when the backward
            pass begins, whatever is live besides.
        stages: the pipeline whose devices the plan is for; None: the devices have the whole model.
        deterministic: random numbers are those of one device.
        overlap: whether collectives may run beside kernels, so that what these hide costs nothing.
        graphs: so many graphs of stages the model is cut into, each of which begins with a gather that nothing hides.
        rough: a bound and about what the best plan takes are enough: one search, as if all were hidden that can be.
    """

    axes: Mapping[str, int]
    cluster: Cluster
    memory: float | None = None
    optimizer: str = "adamw"
    search: Search = field(default_factory=Search)
    restrictions: Restrictions = field(default_factory=Restrictions)
    progress: Progress = silent
    cutoff: Cutoff = NO_CUTOFF
    all_points: bool = True
    stages: ScheduledStages | None = None
    deterministic: bool = False
    overlap: bool = True
    graphs: int = 1
    rough: bool = False

    @property
    def quantized(self) -> tuple[QuantizedAxis, ...]:
        """Which messages are in few bits: not along the axis of a pipeline's stages, nor along that of microbatches."""
        return tuple(q for q in read_quantized(self.search.quantized) if q.axis in self.axes)

    @property
    def overlaps(self) -> bool:
        """Whether there is something to overlap."""
        sends = any(size > 1 for size in self.axes.values())
        return self.overlap and self.search.overlap and self.all_points and sends

    @property
    def state_share(self) -> float:
        """The share of parameters, their states and gradients that a device holds: of a pipeline, that of a stage."""
        return 1.0 if self.stages is None else self.stages.state_share

    @property
    def activation_share(self) -> float:
        """What a device saves for backward, as a multiple of what a microbatch of the whole model saves."""
        return 1.0 if self.stages is None else self.stages.activation_share
