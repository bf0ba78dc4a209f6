"""`StageDevices`: what devices lie along the axis of a pipeline, of one kind or of several."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.costs.cluster import Cluster, Link
from autopar.costs.mixed.figures import pooled_device, pooled_link, slowest_device
from autopar.costs.mixed.groups import link_between
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes import as_planned
from autopar.search.predict import predict
from autopar.sharding.dims import analyze


@dataclass(frozen=True)
class StageDevices:
    """The devices along the axis of the stages, coordinate by coordinate.

    Attributes:
        axis: of the stages.
        whole: all devices, with a link for each axis: layouts and the ways between them are those of the whole mesh.
        machines: the devices at each coordinate as a cluster of one kind, with a link for each axis; of several kinds
            they are as slow as the slowest.
        groups: of the cluster that they are in, by coordinate; nothing where the cluster has none.
    """

    axis: str
    whole: Cluster
    machines: tuple[Cluster, ...]
    groups: tuple[tuple[int, ...], ...]

    @property
    def alike(self) -> bool:
        """Whether it makes no difference which stage is where."""
        return len(set(self.groups)) <= 1

    @property
    def room(self) -> tuple[float, ...]:
        """How much memory the devices at each coordinate have, as a multiple of the least of the cluster."""
        return tuple(m.device.memory / self.whole.device.memory for m in self.machines)

    def kind(self, coordinate: int) -> str:
        """Names of the groups at a coordinate; empty where the cluster has none."""
        return " + ".join(self.whole.groups[g].name for g in self.groups[coordinate]) if self.groups else ""

    @property
    def slowest_link(self) -> Link:
        """A link as slow as any between two coordinates."""
        return self.whole.axis_links[self.axis]

    def link(self, a: int, b: int) -> Link:
        """The link between two coordinates."""
        if self.alike:
            return self.slowest_link
        own, other = self.groups[a], self.groups[b]
        if len(own) > 1 or len(other) > 1:
            return self.slowest_link
        if own == other:
            return self.machines[a].axis_links[self.axis]
        return link_between(self.whole.groups, self.whole.between, own[0], other[0])

    def only(self, machine: Cluster) -> StageDevices:
        """As if there were devices of one kind only; links between stages are the slowest."""
        return replace(self, machines=(machine,), groups=())

    def links(self, places: Sequence[int]) -> list[Link]:
        """The link between each stage and the next.

        Args:
            places: the coordinate of each stage.
        """
        return [self.link(a, b) for a, b in itertools.pairwise(places)]

    def pooled(self, speeds: Sequence[float]) -> Cluster:
        """Devices that bound a pipeline from below: see `autopar.costs.mixed.figures.pooled_device`.

        Args:
            speeds: of each coordinate, 1 on average.
        """
        if self.alike:
            return self.machines[0] if self.groups else self.whole
        device = pooled_device([m.device for m in self.machines], speeds)
        names = self.machines[0].axis_links
        links = {name: pooled_link([m.axis_links[name] for m in self.machines], speeds) for name in names}
        return Cluster(device.name, device, (links[self.axis],), axis_links=links)


def devices_along(cluster: Cluster, axes: Mapping[str, int], axis: str) -> StageDevices:
    """What lies along an axis of a mesh on a cluster; devices are numbered along the mesh row by row.

    Args:
        cluster: with or without groups.
        axes: name and size of each axis of the mesh, outermost first.
        axis: that of the stages.
    """
    whole = replace(cluster, axis_links=dict(zip(axes, cluster.link_for(axes), strict=True)))
    if not cluster.groups:
        return StageDevices(axis, whole, (whole,) * axes[axis], ())
    numbers = np.repeat(np.arange(len(cluster.groups)), [g.devices for g in cluster.groups])
    rows = np.moveaxis(numbers.reshape(tuple(axes.values())), list(axes).index(axis), 0).reshape(axes[axis], -1)
    groups = tuple(tuple(map(int, np.unique(row))) for row in rows)
    known = {own: _machine(whole, axes, axis, own) for own in dict.fromkeys(groups)}
    return StageDevices(axis, whole, tuple(known[own] for own in groups), groups)


def _machine(whole: Cluster, axes: Mapping[str, int], axis: str, own: tuple[int, ...]) -> Cluster:
    """The devices of some groups as a cluster of one kind; those of one group have its own links."""
    groups = [whole.groups[g] for g in own]
    device = slowest_device([g.own_device for g in groups])
    if len(own) > 1:
        return Cluster(device.name, device, whole.links, whole.group_sizes, whole.axis_links)
    links, sizes = groups[0].levels
    alone = Cluster(groups[0].name, device, links, sizes)
    inside = math.prod(axes.values()) // axes[axis]
    # As many coordinates as are in this group: with them a link between its nodes is shared.
    part = {name: max(1, groups[0].devices // inside) if name == axis else size for name, size in axes.items()}
    return replace(alone, axis_links=dict(zip(axes, alone.link_for(part), strict=True)))


def predicted_alone(part: Program, plan: Plan, devices: StageDevices) -> Plan:
    """A plan for the devices of a stage with its prediction and table, if these had the whole model.

    On several kinds of devices the seconds are such that all are busy as long: the harmonic mean of what each takes.

    Args:
        part: of one microbatch, not padded.
        plan: for the devices of a stage.
        devices: along the axis of the stages.
    """
    padded = as_planned(part, plan)
    dims, plan = analyze(padded), replace(plan, cluster=devices.whole, stages=Plan.stages)
    alone = predict(padded, dims, plan)
    if devices.alike and not devices.groups:
        return alone
    own = {m: predict(padded, dims, replace(plan, cluster=m)).predicted for m in dict.fromkeys(devices.machines)}
    mean = {
        name: len(devices.machines) / sum(1 / max(getattr(own[m], name), 1e-300) for m in devices.machines)
        for name in ("compute_seconds", "communication_seconds")
    }
    return replace(alone, predicted=replace(alone.predicted, **mean))
