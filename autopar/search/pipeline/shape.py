"""`PipelineShape`, how stages lie on a mesh, and `ScheduledStages`, such stages of a program under a schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from autopar.costs.cluster import Link
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.pipeline.schedules import Order
from autopar.pipeline.stage_graphs import FORWARD, INPUT, WEIGHT

MeshKey = tuple[tuple[tuple[str, int], ...], str]
"""Axes of a mesh, and the one along which stages lie."""

Measured = tuple[float, str, Plan]
"""Bytes on the device that holds the most, the schedule under which that is so, and a plan for a stage's devices."""


@dataclass(frozen=True)
class PipelineShape:
    """How stages lie on a mesh, and the schedules that they may follow.

    Attributes:
        axes: name and size of each axis of the mesh.
        axis: along which the stages lie.
        devices: along the axis.
        virtual: stages on each.
        schedules: see `autopar.pipeline.schedules`.
        modules: at which the stages after the first begin; empty: they are chosen.
    """

    axes: tuple[tuple[str, int], ...]
    axis: str
    devices: int
    virtual: int = 1
    schedules: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()

    @property
    def stages(self) -> int:
        """On all devices."""
        return self.devices * self.virtual

    @property
    def inside(self) -> dict[str, int]:
        """The axes of the devices of a stage."""
        return {name: size for name, size in self.axes if name != self.axis}

    @property
    def mesh(self) -> MeshKey:
        """What it has in common with shapes of other numbers of stages on a device."""
        return self.axes, self.axis


@dataclass(frozen=True)
class ScheduledStages:
    """A program in stages under a schedule; of a search within a budget, the peak is that of these stages.

    Attributes:
        part: the program of one microbatch, not padded.
        shape: how the stages lie on the mesh.
        schedule: its name.
        actions: what each device does under it.
        link: between stages.
        measured: plans for ``part`` whose peak in stages of this shape is known, under any schedule; grows.
    """

    part: Program = field(compare=False, repr=False)
    shape: PipelineShape
    schedule: str
    actions: Order
    link: Link
    measured: list[Measured] = field(compare=False, repr=False)

    @property
    def state_share(self) -> float:
        """The share of the model's parameters, optimizer states and gradients that a device holds: stages are alike."""
        return 1 / len(self.actions)

    @cached_property
    def activation_share(self) -> float:
        """How often the device with the most microbatches in flight holds what one microbatch saves for backward.

        More than 1 where several microbatches of several stages are in flight.
        """
        most = 0
        for row in self.actions:
            in_flight = 0
            split = any(a.kind == INPUT for a in row)
            for action in row:
                # A split backward pass frees a microbatch with its second part, the one for the weights.
                in_flight += 1 if action.kind == FORWARD else -1 if not split or action.kind == WEIGHT else 0
                most = max(most, in_flight)
        return most / self.shape.stages
