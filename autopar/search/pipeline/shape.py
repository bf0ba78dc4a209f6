"""`PipelineShape`, how stages lie on a mesh, and `ScheduledStages`, such stages under a schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autopar.costs.cluster import Link
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.pipeline.schedules import Order


@dataclass(frozen=True)
class PipelineShape:
    """How stages lie on a mesh, and the schedules that they may follow.

    Attributes:
        axes: name and size of each axis of the mesh.
        axis: along which the stages lie.
        devices: along the axis.
        virtual: stages on each.
        schedules: see `autopar.pipeline.schedules`.
        modules: at which the stages behind the first begin; empty: they are chosen.
    """

    axes: tuple[tuple[str, int], ...]
    axis: str
    devices: int
    virtual: int
    schedules: tuple[str, ...]
    modules: tuple[str, ...] = ()

    @property
    def stages(self) -> int:
        """On all devices."""
        return self.devices * self.virtual

    @property
    def inside(self) -> dict[str, int]:
        """The axes of the devices of a stage."""
        return {name: size for name, size in self.axes if name != self.axis}


@dataclass
class LightestPlan:
    """Of all plans of a program that were measured in stages, the one that needs the least.

    Attributes:
        program: not padded; plans of a padded one do not count.
        needed: its bytes on the device that holds the most.
        plan: for the devices of a stage; None: none was measured.
        schedule: under which it was measured.
    """

    program: Program
    needed: float = math.inf
    plan: Plan | None = None
    schedule: str = ""


@dataclass(frozen=True)
class ScheduledStages:
    """The pipeline whose devices a search within a budget is for: its peak is that of the stages under the schedule.

    Attributes:
        shape: how the stages lie on the mesh.
        schedule: its name.
        actions: what each device does under it.
        link: between stages.
        lightest: what is known of plans in this shape; grows as plans are measured.
    """

    shape: PipelineShape
    schedule: str
    actions: Order
    link: Link
    lightest: LightestPlan = field(compare=False, repr=False)
