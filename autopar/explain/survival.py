"""What it costs that a run goes on when nodes are lost: `survival`, for a plan, and `survival_table` beside recipes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from autopar.costs.cluster import Cluster
from autopar.costs.collectives import COLLECTIVES
from autopar.costs.host_copies import copy_seconds
from autopar.costs.memory import format_bytes
from autopar.ir.layout import Layout, Replicate
from autopar.ir.plan import Plan
from autopar.ir.plan_table import format_seconds, render
from autopar.runtime.launch.agent import COME_AND_GO

KEPT = 3
"""Snapshots of each rank for which there is room: the last two, and one that is being written."""

STATE = ("parameters", "optimizer", "buffers")
"""Of the memory of a plan, what a snapshot has."""


@dataclass(frozen=True)
class Survival:
    """What it costs that some nodes may be lost at once, of a run under ``autopar run --elastic``.

    Attributes:
        unit: what is lost: a ``"node"``, or a ``"device"`` where one node has them all.
        lost: how many of them.
        devices: that each has.
        units: of which there are so many.
        copies: of `autopar.elastic`, that the state survives it: 0 where each part is on more units anyway.
        snapshot_bytes: of each device.
        host_bytes: in memory of each node's host, or where devices are units, for each device.
        step_seconds: of each step besides, if after each a snapshot is written and sent (``every=1``).
        meet_seconds: the most until it is noticed that they are gone, and the others have met.
        restore_seconds: the most until those that are left have the state, with the shards of their new plan.
    """

    unit: str
    lost: int
    devices: int
    units: int
    copies: int
    snapshot_bytes: float
    host_bytes: float
    step_seconds: float
    meet_seconds: float
    restore_seconds: float

    @property
    def recovery_seconds(self) -> float:
        """The most until the run goes on, but for the start of the script and its capture."""
        return self.meet_seconds + self.restore_seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "recovery_seconds": self.recovery_seconds}


def units_of(cluster: Cluster, axes: Mapping[str, int], lost: int) -> tuple[str, int, int]:
    """What may be lost of a mesh, how many devices each has, and how many there are.

    Raises:
        ValueError: none would be left, or nodes are not full.

    >>> units_of(Cluster.preset("h100"), {"node": 4, "gpu": 8}, 1), units_of(Cluster.preset("h100"), {"gpu": 4}, 1)
    (('node', 8, 4), ('device', 1, 4))
    """
    world = math.prod(axes.values())
    node = cluster.group_sizes[0] if cluster.group_sizes else world
    unit, devices = ("node", node) if node < world else ("device", 1)
    if world % devices:
        raise ValueError(
            f"--survive {lost}: {world} devices are no whole number of nodes of {devices}; give a mesh of whole nodes"
        )
    units = world // devices
    if lost >= units:
        raise ValueError(
            f"--survive {lost}: the mesh has {units} {unit}{'s' if units > 1 else ''}, and one must be left; "
            + (f"survive at most {units - 1}" if units > 1 else "leave it out")
        )
    return unit, devices, units


def survival(plan: Plan, lost: int) -> Survival:
    """What it costs that ``lost`` nodes may be gone at once; where one node has all devices, as many devices.

    Args:
        plan: without stages, and without workers that train apart.
        lost: at least 1.

    Raises:
        ValueError: as `units_of`.
    """
    unit, devices, units = units_of(plan.cluster, dict(plan.axes), lost)
    sizes = tuple(n for _, n in plan.axes)
    copies = copies_for(plan.parameters.values(), sizes, devices, lost)
    size = sum(plan.predicted.memory_bytes.get(kind, 0.0) for kind in STATE)
    (link, _) = plan.cluster.link_for({"node": units, "device": devices})
    sent = float(COLLECTIVES["send"](size, 2, link))
    device = plan.cluster.device
    # The memory of a CPU is the host's.
    written = size / device.bandwidth if device.kind == "cpu" else float(copy_seconds(size, device))
    # Those that are left have larger shards, of which in the worst case each comes from another node.
    share = size * units / (units - lost)
    taken = float(COLLECTIVES["send"](share, 2, link)) + written * units / (units - lost)
    silent = COME_AND_GO["keep_alive_interval"] * COME_AND_GO["keep_alive_max_attempt"]
    return Survival(
        unit, lost, devices, units, copies, size, KEPT * devices * (1 + copies) * size, written + copies * sent,
        silent + COME_AND_GO["last_call_timeout"], taken,
    )  # fmt: skip


def copies_for(layouts: Iterable[Layout], sizes: Sequence[int], devices: int, lost: int) -> int:
    """How many copies each snapshot needs, that each part of each tensor is on more nodes than are lost.

    Args:
        layouts: of the tensors.
        sizes: of the axes; devices are numbered along them, row by row.
        devices: of each node; the next nodes have its copies, see `autopar.runtime.checkpoint.snapshot_neighbors`.
        lost: nodes; fewer than there are.
    """
    units = math.prod(sizes) // devices
    holders = [nodes for layout in set(layouts) for nodes in _nodes_of_parts(layout, sizes, devices)]

    def survives(copies: int) -> bool:
        return all(len({(n + k) % units for n in nodes for k in range(copies + 1)}) > lost for nodes in holders)

    return next(copies for copies in range(lost + 1) if survives(copies))


def _nodes_of_parts(layout: Layout, sizes: Sequence[int], devices: int) -> set[frozenset[int]]:
    """Which nodes have the same part of a tensor."""
    split = [i for i, placement in enumerate(layout) if not isinstance(placement, Replicate)]
    found: dict[tuple[int, ...], set[int]] = {}
    for device, place in enumerate(itertools.product(*map(range, sizes))):
        found.setdefault(tuple(place[i] for i in split), set()).add(device // devices)
    return {frozenset(nodes) for nodes in found.values()}


def survival_table(rows: Sequence[tuple[str, Plan]], lost: int, width: int = 100) -> str:
    """What it costs each plan, by its name."""
    each = [(name, plan, survival(plan, lost)) for name, plan in rows]
    first = each[0][2]
    what = f"{lost} {first.unit}{'s' if lost > 1 else ''} of {first.units}"
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column(f"survives {what}", no_wrap=True)
    for column in ("copies", "step", "besides", f"host memory per {first.unit}", "goes on within"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, plan, found in each:
        cells = (
            name, str(found.copies), format_seconds(plan.predicted.step_seconds), format_seconds(found.step_seconds),
            format_bytes(found.host_bytes), format_seconds(found.recovery_seconds),
        )  # fmt: skip
        table.add_row(*map(Text, cells))
    note = (
        "copies is that of autopar.elastic(); besides are the snapshot after each step (every=1), and sending its "
        f"copies. Of the time to go on, {format_seconds(first.meet_seconds)} are torch's rendezvous, at most; the "
        "start of the script and its capture come on top, and the step in flight is done anew."
    )
    return render([table, Text(note)], width)
