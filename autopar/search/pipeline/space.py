"""Which pipelines a search may choose from, by its pins."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.costs.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.ir.layout import Replicate
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.pipeline.custom_schedule import as_text, is_table
from autopar.pipeline.schedules import SCHEDULES, Schedule, any_count, splits
from autopar.search.formulation.pins import Restrictions, read_placement
from autopar.search.options import MICROBATCHES, SCHEDULE, SHARES, STAGE_AXIS, STAGE_ORDER, STAGES, VIRTUAL, Search
from autopar.search.pipeline.shape import PipelineShape
from autopar.search.pipeline.stage_devices import devices_along

_PINS = (STAGES, SCHEDULE, VIRTUAL, STAGE_AXIS, STAGE_ORDER)

MOST_ORDERS = 24
"""Orders of kinds of devices along a pipeline that are tried: all of four kinds."""

FACTOR = "_stages"
"""Ends the name of an axis that is a factor of another."""

MOST_DEVICES = 64
"""Longer pipelines are not tried."""

MOST_VISITS = 2**15
"""Microbatches times stages beyond which no more are tried: simulation takes minutes, and the bubble is small."""

STAGES_A_DEVICE = (1, 2, 4)
"""How many stages a device may have where that is searched."""


def pipeline_shapes(
    search: Search, axes: Mapping[str, int], training: bool, factored: bool = False
) -> list[PipelineShape]:
    """All that the pins of a search leave open, those with the fewest stages on a device first.

    Args:
        search: whose pins.
        axes: of the mesh.
        training: whether there is a backward pass.
        factored: whether stages may take a factor of an axis, which becomes an axis of its own.

    Raises:
        InfeasibleError: no axis of the mesh has as many devices, or no schedule as many stages on each.
    """
    modules, places = search.stage_modules, _pinned_axis(search, axes, factored)
    if not search.stages_open:
        devices = _pinned_devices(search)
        places = [p for p in places if p.devices == devices][:1]
        if not places:
            raise InfeasibleError(
                f"no axis of the mesh {dict(axes)} has {devices} devices for as many stages; ask for the number of "
                f"stages that an axis has (pin {VIRTUAL!r} for several on each device), or make another mesh"
            )
    pinned = search.pins.get(SCHEDULE)
    names = tuple(SCHEDULES) if pinned is None else (as_text(pinned),)
    by_hand = is_table(names[0])
    each = (int(search.pins.get(VIRTUAL, 1)),) if VIRTUAL in search.pins or by_hand or modules else STAGES_A_DEVICE
    if pinned is not None and (VIRTUAL in search.pins or by_hand):
        ways = dict.fromkeys(each, names)  # where the two do not go together, that is said with what would
    else:
        ways = {n: tuple(s for s in names if _suits(SCHEDULES[s], n, training and pinned is None)) for n in each}
    if ways.get(1) and not search.stages_open:
        ways = {1: ways[1]}  # as many stages as are asked for
    return [
        replace(p, virtual=n, schedules=found, modules=modules) for n, found in ways.items() if found for p in places
    ]


def in_every_order(shape: PipelineShape, cluster: Cluster, search: Search) -> list[PipelineShape]:
    """A shape with each order of the kinds of devices along its axis; devices of a kind stay together.

    Raises:
        InfeasibleError: the pin of the order is none of the axis's devices.
    """
    pinned = search.pins.get(STAGE_ORDER)
    if pinned is not None:
        if sorted(pinned) != list(range(shape.devices)):
            raise InfeasibleError(
                f"pin {STAGE_ORDER!r} is {list(pinned)}, and axis {shape.axis!r} has {shape.devices} devices: give 0 "
                f"to {shape.devices - 1}, each once"
            )
        orders = [tuple(pinned)]
    else:
        kinds = devices_along(cluster, dict(shape.axes), shape.axis).groups
        where: dict[tuple[int, ...], list[int]] = {}
        for coordinate, kind in enumerate(kinds):
            where.setdefault(kind, []).append(coordinate)
        ways = itertools.islice(itertools.permutations(where.values()), MOST_ORDERS)
        orders = [tuple(itertools.chain(*own)) for own in ways]
    if len(orders) == 1 and orders[0] in ((), tuple(range(shape.devices))):
        return [shape]
    if any(is_table(name) for name in shape.schedules):
        return [shape]  # its rows say which stage is where
    # In a V the stages of a device are others.
    ways_back = [tuple(n for n in shape.schedules if SCHEDULES[n].two == two) for two in (False, True)]
    return [replace(shape, places=own, schedules=names) for names in ways_back if names for own in orders]


def split_for_stages(search: Search, axes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """The axes of a mesh; if the stages that a search asks for take a factor of one, that is an axis of its own.

    Raises:
        InfeasibleError: the mesh has no such axis, or stages do not go with their number on each device.
    """
    found = tuple(axes.items())
    if not search.pipelines or search.stages_open:
        return found
    devices = _pinned_devices(search)
    return next((p.axes for p in _pinned_axis(search, axes, factored=True) if p.devices == devices), found)


def is_split_for_stages(finer: tuple[tuple[str, int], ...], axes: Mapping[str, int]) -> bool:
    """Whether axes are those of a mesh, but for a factor of one that is an axis of its own, for stages."""
    return any(p.axes == finer for p in _places(axes, factored=True))


def _pinned_devices(search: Search) -> int:
    """The devices along the axis of the stages, as pinned.

    Raises:
        InfeasibleError: the stages that modules begin are no multiple of those on each device.
    """
    modules, virtual = search.stage_modules, int(search.pins.get(VIRTUAL, 1))
    if modules and (len(modules) + 1) % virtual:
        raise InfeasibleError(
            f"pin 'stages' names {len(modules)} modules, so {len(modules) + 1} stages, and pin {VIRTUAL!r} puts "
            f"{virtual} on each device, which does not divide them; name more or fewer"
        )
    return (len(modules) + 1) // virtual if modules else int(search.pins[STAGES])


def _pinned_axis(search: Search, axes: Mapping[str, int], factored: bool) -> list[PipelineShape]:
    """Where stages may lie by the pin of their axis.

    Raises:
        InfeasibleError: the mesh has no such axis.
    """
    wanted = search.pins.get(STAGE_AXIS)
    if wanted is not None and wanted not in axes:
        raise InfeasibleError(f"pin {STAGE_AXIS!r}: the mesh has no axis {wanted!r}; it has {dict(axes)}")
    return [p for p in _places(axes, factored) if wanted in (None, p.axis, p.axis.removesuffix(FACTOR))]


def _places(axes: Mapping[str, int], factored: bool) -> list[PipelineShape]:
    """Whole axes, and then the factors of each, the smallest first; with a stage on each device, and no schedules."""
    given = tuple(axes.items())
    found = [PipelineShape(given, name, n) for name, n in given if n > 1]
    for i, (name, n) in enumerate(given if factored else ()):
        for factor in range(2, min(n, MOST_DEVICES + 1)):
            if n % factor == 0:
                # The factor is the outer one, so that the devices of a stage are neighbors.
                split = (*given[:i], (f"{name}{FACTOR}", factor), (name, n // factor), *given[i + 1 :])
                found.append(PipelineShape(split, f"{name}{FACTOR}", factor))
    return [p for p in found if p.devices <= MOST_DEVICES]


def _suits(schedule: Schedule, virtual: int, training: bool) -> bool:
    """Whether a schedule is for so many stages on a device; those for any number of microbatches are not to train."""
    if schedule.two and virtual != 2:
        return False
    return schedule.interleaved == (virtual > 1) and not (training and schedule.stage_by_stage)


def counts(program: Program, search: Search, shape: PipelineShape) -> list[int]:
    """Numbers of microbatches to try: as pinned, or, from the number of devices on, one for about twice as many."""
    if not program.training:
        return [1]
    if search.microbatches:
        return [search.microbatches]
    of_batch, inside = samples(program), math.prod(shape.inside.values())
    most = max(shape.devices, MOST_VISITS // shape.stages)
    divisors = [n for n in range(2, min(of_batch, most) + 1) if of_batch % n == 0]
    best: dict[int, int] = {}
    for n in (d for d in divisors if d >= shape.devices):
        # The devices of a stage share the samples of a microbatch: a number that leaves each as many is faster.
        best.setdefault(octave := (n // shape.devices).bit_length(), n)
        best[octave] = max(best[octave], n, key=lambda m: math.gcd(of_batch // m, inside))
    return list(best.values()) or divisors[-1:] or [1]


def samples(program: Program) -> int:
    """Of the batch."""
    described = zip(program.placeholders, program.inputs, strict=True)
    sizes = [n.meta["val"].shape[0] for n, i in described if i.kind == "batch" and n.meta["val"].ndim]
    return Counter(sizes).most_common(1)[0][0] if sizes else 1


def without_pipeline(search: Search) -> Search:
    """The search without the pins of pipelines."""
    return replace(search, pins={name: value for name, value in search.pins.items() if name not in _PINS})


def inside_stage(search: Search, shape: PipelineShape) -> Search:
    """The search for the devices of one stage.

    Raises:
        InfeasibleError: a pin splits a tensor along the axis of the stages.
    """
    layouts = {name: _inside(name, value, shape) for name, value in search.layouts.items()}
    search = without_pipeline(search)
    return replace(search, pins={**search.pins, **layouts})


def _inside(name: str, value: Any, shape: PipelineShape) -> Any:
    """A pin on the whole mesh as one on the devices of a stage; one that speaks of these alone is so already."""
    names = [axis for axis, _ in shape.axes]
    if isinstance(value, Mapping):
        across = value.get(shape.axis)
        inside: Any = {axis: placement for axis, placement in value.items() if axis != shape.axis}
    elif isinstance(value, list | tuple) and len(value) == len(names):
        across = value[names.index(shape.axis)]
        inside = tuple(p for axis, p in zip(names, value, strict=True) if axis != shape.axis)
    else:
        return value
    if across is not None and not isinstance(read_placement(name, across), Replicate):
        raise InfeasibleError(f"pin {name!r} splits a tensor along axis {shape.axis!r}, where the stages lie")
    return inside


def along_with(plan: Plan) -> dict[str, Any]:
    """Pins that ask for the same stages."""
    if plan.pipeline is None:
        shares = {} if plan.shares is None else {SHARES: {plan.shares.axis: list(plan.shares.counts)}}
        return {STAGES: 1, MICROBATCHES: plan.microbatches, **shares}
    devices, places = dict(plan.axes)[plan.pipeline.axis], plan.pipeline.places
    return {
        **({STAGE_ORDER: list(places)} if places else {}),
        STAGES: [stage.modules[0] for stage in plan.stages[1:]],
        VIRTUAL: len(plan.stages) // devices,
        STAGE_AXIS: plan.pipeline.axis,
        SCHEDULE: plan.pipeline.schedule,
        MICROBATCHES: plan.microbatches,
    }


def with_count(pins: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The pins of `along_with` for another number of microbatches."""
    if pins.get(STAGES, 1) == 1:
        shares = {SHARES: pins[SHARES]} if SHARES in pins and pins.get(MICROBATCHES) == count else {}
        return {MICROBATCHES: count, **shares}
    found = {name: value for name, value in pins.items() if name in _PINS}
    virtual = found[VIRTUAL]
    found[SCHEDULE] = any_count(found[SCHEDULE], (len(found[STAGES]) + 1) // virtual, count, virtual)
    return {**found, MICROBATCHES: count}


def restrictions_inside(restrictions: Restrictions, axes: Mapping[str, int], axis: str) -> Restrictions:
    """Layouts on the whole mesh as such on the devices of a stage."""
    # Restrictions with layouts come from a module whose mesh is decided.
    if not restrictions.layouts:  # the axis may be a factor of one of these
        return restrictions
    index = list(axes).index(axis)
    layouts = {key: (*row[:index], *row[index + 1 :]) for key, row in restrictions.layouts.items()}
    return replace(restrictions, layouts=layouts)


def idle_factor(a: PipelineShape, count: int, speeds: Sequence[float], alone: float) -> float:
    """How much longer than its work such a pipeline takes at least, by the speeds of the devices along its axis.

    Args:
        a: the shape.
        count: of microbatches.
        speeds: of the devices in the order of the pipeline, 1 on average.
        alone: how many times as fast a device is while the others idle.
    """
    split = a.virtual > 1 or any(splits(name) for name in a.schedules)
    if split or (any(is_table(name) for name in a.schedules) and len(set(speeds)) > 1):
        return 1.0
    return max(1.0, least_idle_factor([speeds[c] for c in a.coordinates], count) / alone)


def bubble(a: PipelineShape, schedule: str, count: int, alone: float = 1.0) -> float:
    """About what idling adds to the work, where stages are alike and a backward pass takes twice its forward.

    Two thirds of the idle time are waits for backward passes; where these are split, their parts for the weights, half
    of them, and those of earlier microbatches fill the time. What shares its cores with those that idle is up to
    ``alone`` times as fast meanwhile.
    """
    idle = (a.devices - 1) / (a.virtual * count) / (3 if splits(schedule) else 1)
    return max(0.0, (1 + idle) / alone - 1)


def room_for_saved(a: PipelineShape, count: int) -> float:
    """The share of a device's memory that holds what a microbatch saves of the whole model, in any schedule.

    Devices hold, at some moment, what each of their stages saves of at least ``1, 2, ...`` microbatches, in some order.
    So of what one saves there is at most the whole, half, a third ... of the memory on each. Beside that, each has its
    part of parameters and their states, of which so at least one ``a.devices``-th counts.
    """
    if any(is_table(name) for name in a.schedules):
        return float(a.devices)  # which may hold a single one each
    return sum(1 / min(k, count) for k in range(1, a.devices + 1))


def least_idle_factor(speeds: Sequence[float], count: int) -> float:
    """How much longer than its work a device of a pipeline takes at least, whose devices have a stage each.

    The devices of later stages wait for those before, at both ends of a step. If stages take ``t[0], t[1], ...`` for a
    microbatch, device ``d`` works or idles for ``count * t[d] + sum(t[:d])``, and the step for no less than any mean of
    that, with weights ``v``. Weights in which each ``t[d]`` counts at least ``speeds[d]`` times make the mean one of
    all work: on devices that are alike they are those where all ``t[d + 1] = t[d] * (1 - 1 / count)``.

    Args:
        speeds: of the devices in the order of the pipeline, 1 on average.
        count: of microbatches.

    >>> [round(least_idle_factor([1.0] * 4, count), 3) for count in (1, 8, 800)]
    [4.0, 1.208, 1.002]
    >>> round(least_idle_factor([0.5, 1.5], 2), 3), round(least_idle_factor([1.5, 0.5], 2), 3)
    (1.333, 1.143)
    """
    total = 0.0
    for speed in reversed(speeds):  # the weights of all later devices count once, and those of this one ``count`` times
        total += max(0.0, (speed - total) / count)
    return len(speeds) / (count * total)
