"""What pipeline a search asks for, by its pins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import InfeasibleError
from autopar.pipeline.schedules import any_count
from autopar.plan import Plan
from autopar.search.find import MICROBATCHES, SCHEDULE, STAGE_AXIS, STAGES, VIRTUAL, Search
from autopar.search.restrict import Restrictions

_PINS = (STAGES, SCHEDULE, VIRTUAL, STAGE_AXIS)


@dataclass(frozen=True)
class Asked:
    """A pipeline that is asked for.

    Attributes:
        axis: of the mesh, along which the stages lie.
        devices: along the axis.
        virtual: stages on each.
        schedule: see `autopar.pipeline.schedules`.
        modules: at which the stages behind the first begin; empty: they are chosen.
    """

    axis: str
    devices: int
    virtual: int
    schedule: str
    modules: tuple[str, ...]

    @property
    def stages(self) -> int:
        """On all devices."""
        return self.devices * self.virtual

    def inside(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """What belongs to axes, without the axis of the stages."""
        return {name: value for name, value in row.items() if name != self.axis}


def asked(search: Search, axes: Mapping[str, int]) -> Asked | None:
    """The pipeline that the pins of a search describe; None: none.

    Raises:
        InfeasibleError: no axis of the mesh has as many devices.
    """
    if search.stages == 1:
        return None
    virtual, wanted = int(search.pins.get(VIRTUAL, 1)), search.pins.get(STAGE_AXIS)
    modules = () if isinstance(search.stages, int) else search.stages
    devices = search.stages if isinstance(search.stages, int) else (len(modules) + 1) // virtual
    if wanted is not None and wanted not in axes:
        raise InfeasibleError(f"pin {STAGE_AXIS!r}: the mesh has no axis {wanted!r}; it has {dict(axes)}")
    fitting = [name for name, n in axes.items() if n == devices and wanted in (None, name)]
    if not fitting:
        raise InfeasibleError(
            f"no axis of the mesh {dict(axes)} has {devices} devices for as many stages; ask for the number of stages "
            f"that an axis has (pin {VIRTUAL!r} for several on each device), or make another mesh"
        )
    schedule = str(search.pins.get(SCHEDULE, "1f1b" if virtual == 1 else "interleaved"))
    return Asked(fitting[0], devices, virtual, schedule, modules)


def count_of(search: Search) -> int:
    """Microbatches: as pinned; in a pipeline otherwise twice as many as it has stages."""
    if search.microbatches or search.stages == 1:
        return search.microbatches or 1
    if not isinstance(search.stages, int):
        return 2 * (len(search.stages) + 1)
    return 2 * search.stages * int(search.pins.get(VIRTUAL, 1))


def without_pipeline(search: Search) -> Search:
    """The search for the devices of one stage."""
    return replace(search, pins={name: value for name, value in search.pins.items() if name not in _PINS})


def along_with(plan: Plan) -> dict[str, Any]:
    """Pins that ask for the same stages."""
    if plan.pipeline is None:
        return {MICROBATCHES: plan.microbatches}
    devices = dict(plan.axes)[plan.pipeline.axis]
    return {
        STAGES: [stage.modules[0] for stage in plan.stages[1:]],
        VIRTUAL: len(plan.stages) // devices,
        STAGE_AXIS: plan.pipeline.axis,
        SCHEDULE: plan.pipeline.schedule,
        MICROBATCHES: plan.microbatches,
    }


def with_count(pins: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The pins of `along_with` for another number of microbatches."""
    kept = {name: value for name, value in pins.items() if name in _PINS}
    if kept:
        virtual = kept[VIRTUAL]
        kept[SCHEDULE] = any_count(kept[SCHEDULE], (len(kept[STAGES]) + 1) // virtual, count, virtual)
    return {**kept, MICROBATCHES: count}


def restrictions_inside(restrictions: Restrictions | None, axes: Mapping[str, int], axis: str) -> Restrictions | None:
    """Layouts on the whole mesh as such on the devices of a stage."""
    if restrictions is None:
        return None
    index = list(axes).index(axis)
    layouts = {key: (*row[:index], *row[index + 1 :]) for key, row in restrictions.layouts.items()}
    return replace(restrictions, layouts=layouts)
