"""`PipelineShape`, how stages lie on a mesh, and `ScheduledStages`, such stages of a program under a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.pipeline.custom_schedule import is_table, parse
from autopar.pipeline.schedules import SCHEDULES, Order, in_two_parts
from autopar.pipeline.stage_graphs import FORWARD, WEIGHT
from autopar.search.pipeline.stage_devices import StageDevices

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
        places: see `autopar.ir.plan.Pipeline`; where devices differ, all schedules have each stage on the same device.
    """

    axes: tuple[tuple[str, int], ...]
    axis: str
    devices: int
    virtual: int = 1
    schedules: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    places: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        """On all devices."""
        return self.devices * self.virtual

    @property
    def coordinates(self) -> tuple[int, ...]:
        """Of each stage, along the axis."""
        name = self.schedules[0] if self.schedules else ""
        if is_table(name):
            known = {stage: row for row, actions in enumerate(parse(name)) for stage, _, _ in actions}
            rows = [known.get(stage, 0) for stage in range(self.stages)]
        else:
            back = name in SCHEDULES and SCHEDULES[name].two  # the second half goes back
            turns = (divmod(stage, self.devices) for stage in range(self.stages))
            rows = [self.devices - 1 - row if back and turn % 2 else row for turn, row in turns]
        return tuple(self.places[row] if self.places else row for row in rows)

    @property
    def inside(self) -> dict[str, int]:
        """The axes of the devices of a stage."""
        return {name: size for name, size in self.axes if name != self.axis}

    @property
    def mesh(self) -> MeshKey:
        """What it has in common with shapes of other numbers of stages on a device."""
        return self.axes, self.axis


Possible = Sequence[tuple[PipelineShape, tuple[str, ...]]]
"""Shapes on one mesh, each with the schedules that it may follow."""


@dataclass(frozen=True)
class ScheduledStages:
    """A program in stages under a schedule; of a search within a budget, the peak is that of these stages.

    Attributes:
        part: the program of one microbatch, not padded.
        shape: how the stages lie on the mesh.
        schedule: its name.
        actions: what each device does under it.
        devices: along the axis.
        speeds: of the devices at each coordinate, 1 on average.
        memory: bytes of the devices with the least, see `StageDevices.room`; None for no limit.
        measured: plans for ``part`` whose peak in stages of this shape is known, under any schedule; grows.
    """

    part: Program = field(compare=False, repr=False)
    shape: PipelineShape
    schedule: str
    actions: Order
    devices: StageDevices
    speeds: tuple[float, ...]
    memory: float | None
    measured: list[Measured] = field(compare=False, repr=False)

    @property
    def state_share(self) -> float:
        """The share of the model's parameters, optimizer states and gradients that a device holds.

        Stages take as long as each other; of devices that differ, the share is that of the one with the least left.
        """
        return max(self._shares) / len(self.actions)

    @property
    def _shares(self) -> tuple[float, ...]:
        """What the devices at each coordinate hold beside what they can, relative to others."""
        return tuple(speed / room for speed, room in zip(self.speeds, self.devices.room, strict=True))

    @cached_property
    def activation_share(self) -> float:
        """How often the device with the most microbatches in flight holds what one microbatch saves for backward.

        More than 1 where several microbatches of several stages are in flight.
        """
        most = 0.0
        for row, share in zip(self.actions, self._shares, strict=True):
            in_flight = 0
            split = in_two_parts((row,))
            for action in row:
                # A split backward pass frees a microbatch with its second part, the one for the weights.
                in_flight += 1 if action.kind == FORWARD else -1 if not split or action.kind == WEIGHT else 0
                most = max(most, in_flight * share)
        return most / self.shape.stages
