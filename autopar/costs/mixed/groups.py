"""`DeviceGroup`, devices of a cluster that are alike, and `Between`, the link between two groups."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.costs.device import Device, Link, check_name, shown, suggest
from autopar.costs.mixed.figures import slower, slowest_device, slowest_link

MOST_DEVICES = 2**20


@dataclass(frozen=True)
class DeviceGroup:
    """Devices that are alike, in nodes that are alike.

    Attributes:
        name: of the group.
        device: what each of them is.
        nodes: how many.
        devices_per_node: in each.
        links: of the levels within a node, from innermost on, and then between nodes; that one may be missing where
            there is one node.
        group_sizes: devices within a group of each level inside of a node, see `Cluster.group_sizes`: ``(2,)`` for
            pairs with a bridge.
        speed: of its kernels, as a share of what ``device`` says: 0.8 for a node that is throttled.

    Raises:
        ValueError: a number is not positive, or links and levels do not fit each other.
    """

    name: str
    device: Device
    nodes: int
    devices_per_node: int
    links: tuple[Link, ...]
    group_sizes: tuple[int, ...] = ()
    speed: float = 1.0

    def __post_init__(self) -> None:
        check_name(self.name)
        for key in ("nodes", "devices_per_node"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MOST_DEVICES:
                raise ValueError(f"{key} must be a positive integer, at most {MOST_DEVICES}, got {shown(value)}")
        if isinstance(self.speed, bool) or not isinstance(self.speed, int | float) or not 0 < self.speed <= 100:
            raise ValueError(
                f"speed must be a positive number, 1 for the figures of the device, got {shown(self.speed)}"
            )
        if not isinstance(self.device, Device):
            raise ValueError(f"device must be a Device, got {shown(self.device)}")
        for key, kind in (("links", Link), ("group_sizes", int)):
            value = getattr(self, key)
            if not isinstance(value, list | tuple) or not all(isinstance(v, kind) for v in value):
                raise ValueError(f"{key} must be a tuple of {kind.__name__}s, got {shown(value)}")
            object.__setattr__(self, key, tuple(value))
        object.__setattr__(self, "speed", float(self.speed))
        for inner, outer in itertools.pairwise((1, *self.group_sizes, self.devices_per_node)):
            if isinstance(inner, bool) or inner < 1 or outer % inner:
                raise ValueError(
                    f"group_sizes {list(self.group_sizes)} and devices_per_node {self.devices_per_node} must each be a "
                    "multiple of the one before"
                )
        levels = len(self.group_sizes) + 1
        if len(self.links) != levels + 1 and (self.nodes > 1 or len(self.links) != levels):
            raise ValueError(
                f"links has {len(self.links)} entries for {levels} level{'s' if levels > 1 else ''} within a node and "
                f"{self.nodes} node{'s' if self.nodes > 1 else ''}: give one for each level, and one between nodes"
            )

    @property
    def devices(self) -> int:
        """How many there are."""
        return self.nodes * self.devices_per_node

    @property
    def own_device(self) -> Device:
        """A device, at the group's speed."""
        return slower(self.device, self.speed)

    @property
    def inside(self) -> tuple[Link, ...]:
        """The links of the levels within a node."""
        return self.links[: len(self.group_sizes) + 1]

    @property
    def network(self) -> tuple[Link, ...]:
        """The link between nodes, if there is one."""
        return self.links[len(self.group_sizes) + 1 :]

    @property
    def levels(self) -> tuple[tuple[Link, ...], tuple[int, ...]]:
        """Links and sizes of the groups of each level, as those of a cluster that is this group alone."""
        sizes = (*self.group_sizes, self.devices_per_node)
        return (*self.inside, *(self.network or self.inside[-1:])), sizes


@dataclass(frozen=True)
class Between:
    """The link between devices of two groups.

    Attributes:
        link: whose bandwidth is that of a device, as it is between nodes.
        groups: names of the two; empty: of any two that no other entry names.
    """

    link: Link
    groups: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.link, Link):
            raise ValueError(f"link must be a Link, got {shown(self.link)}")
        if not isinstance(self.groups, list | tuple) or not all(isinstance(name, str) for name in self.groups):
            raise ValueError(f"groups must be names of two groups, got {shown(self.groups)}")
        object.__setattr__(self, "groups", tuple(self.groups))
        if self.groups and (len(self.groups) != 2 or len(set(self.groups)) != 2):
            raise ValueError(f"groups must name two groups, or be left out for any two, got {list(self.groups)}")


Merged = tuple[Device, tuple[Link, ...], tuple[int, ...]]
"""A device, the links of the levels, and the sizes of the groups of all levels but the outermost."""


def merged(groups: Sequence[DeviceGroup], between: Sequence[Between]) -> Merged:
    """Groups as a cluster of one kind of devices, as slow as the slowest of each level.

    Plans that give all devices the same work take as long as that says: who is done waits for the slowest.

    Raises:
        ValueError: two groups have the same name, have no link between them, or have devices that run other programs.
    """
    names = [g.name for g in groups]
    if double := [n for n in names if names.count(n) > 1]:
        raise ValueError(f"two groups have the name {double[0]!r}: give each its own")
    if len({g.device.draws_dropout for g in groups}) > 1:
        raise ValueError("a model runs other kernels on GPUs than on CPUs: groups must be of one or the other")
    known = set(names)
    for entry in between:
        for name in entry.groups:
            if name not in known:
                raise ValueError(f"between.groups has {name!r}{suggest(name, tuple(names))}")
    device = slowest_device([g.own_device for g in groups])
    links = [slowest_link([link for g in groups for link in g.inside])]
    sizes = [math.gcd(*(g.devices_per_node for g in groups))]
    if network := [link for g in groups for link in g.network]:
        links.append(slowest_link(network))
        sizes.append(math.gcd(*(g.devices for g in groups)))
    if pairs := [link_between(groups, between, a, b) for a, b in itertools.combinations(range(len(groups)), 2)]:
        links.append(slowest_link(pairs))
    else:  # one group: its outermost link has no bound
        sizes = sizes[: len(links) - 1]
    return device, tuple(links), tuple(sizes)


def link_between(groups: Sequence[DeviceGroup], between: Sequence[Between], a: int, b: int) -> Link:
    """The link between two groups: the one that is given, or else the slower of those between their nodes.

    Raises:
        ValueError: none is given, and one of the groups has none between its nodes.
    """
    names = {groups[a].name, groups[b].name}
    for entry in sorted(between, key=lambda e: not e.groups):
        if not entry.groups or set(entry.groups) == names:
            return entry.link
    if not (groups[a].network and groups[b].network):
        raise ValueError(
            f"no link between groups {groups[a].name!r} and {groups[b].name!r}: add a table [[between]] with its link"
        )
    return slowest_link([*groups[a].network, *groups[b].network])
