"""What a plan is made for: devices, of one kind or in groups of several, and the links between them.

A `Cluster` is data: a few public figures per device and per link, from a preset or from a TOML file that
`autopar calibrate` or a person writes. Nothing here looks at the machine, so that a plan made on a laptop is the plan
that the cluster gets.
"""

from __future__ import annotations

import hashlib
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autopar.costs.arguments import PATH, a, require
from autopar.costs.device import FLOAT_DTYPES as FLOAT_DTYPES
from autopar.costs.device import Device as Device
from autopar.costs.device import Link as Link
from autopar.costs.device import check_name, shown, suggest
from autopar.costs.mixed.groups import Between as Between
from autopar.costs.mixed.groups import DeviceGroup as DeviceGroup
from autopar.costs.mixed.groups import merged
from autopar.costs.mixed.tables import (
    device_lines,
    device_of,
    link_lines,
    links_of,
    quote,
    refused,
    require_keys,
    tables,
    typed,
)
from autopar.costs.read_file import read_text

_FOLDER = Path(__file__).with_name("presets")

PRESETS: tuple[str, ...] = tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))
"""Names that `Cluster.preset` knows: public figures, the source beside each number, in the folder ``presets``."""

MOST_BYTES, MOST_IN_A_LINE = 2**18, 1000
"""Of a file, and characters of a line: presets have two thousand, and two hundred."""


@dataclass(frozen=True)
class Cluster:
    """Devices and the links between them, level by level.

    Attributes:
        name: for people.
        device: what each device is.
        links: one per level, from innermost (within a node) to outermost.
        group_sizes: devices within a group of each level but the outermost, which has no bound: ``(8,)`` for 8 per
            node; ``(8, 256)`` for 8 per node and 256 per pod, with three links.
        axis_links: the link of a mesh axis, by the axis's name, where its size does not tell.
        groups: of devices that are alike, in the order of the mesh's devices; empty: all are. Of a cluster with groups,
            see `of_groups`, ``device`` and ``links`` are as slow as the slowest.
        between: the links between groups.

    Raises:
        ValueError: levels and group sizes do not fit each other.
    """

    name: str
    device: Device
    links: tuple[Link, ...]
    group_sizes: tuple[int, ...] = ()
    axis_links: Mapping[str, Link] = field(default_factory=dict, hash=False)
    groups: tuple[DeviceGroup, ...] = ()
    between: tuple[Between, ...] = ()

    def __post_init__(self) -> None:
        check_name(self.name)
        if not isinstance(self.device, Device):
            raise ValueError(f"device must be a Device, got {self.device!r}")
        kinds = (("links", Link), ("group_sizes", int), ("groups", DeviceGroup), ("between", Between))
        for key, kind in kinds:
            value = getattr(self, key)
            if not isinstance(value, list | tuple) or not all(isinstance(v, kind) for v in value):
                raise ValueError(f"{key} must be a tuple of {kind.__name__}s, got {value!r}")
        if not isinstance(self.axis_links, Mapping) or not all(isinstance(v, Link) for v in self.axis_links.values()):
            raise ValueError(f"axis_links must give a Link for each name of an axis, got {self.axis_links!r}")
        for name in self.axis_links:
            check_name(name, "a name in axis_links")
        object.__setattr__(self, "links", tuple(self.links))
        for key in ("group_sizes", "groups", "between"):
            object.__setattr__(self, key, tuple(getattr(self, key)))
        object.__setattr__(self, "axis_links", {name: self.axis_links[name] for name in sorted(self.axis_links)})
        if not self.links:
            raise ValueError("links is empty: give at least one, between neighboring devices")
        if len(self.group_sizes) != len(self.links) - 1:
            raise ValueError(
                f"group_sizes has {len(self.group_sizes)} entries for {len(self.links)} links: give the devices in a "
                "group of each level but the outermost"
            )
        inner = 1
        for size in self.group_sizes:
            if isinstance(size, bool) or not inner <= size < 2**31 or size % inner:
                raise ValueError(
                    f"group_sizes {list(self.group_sizes)} must be positive integers, each a multiple of the one before"
                )
            inner = size
        if self.between and not self.groups:
            raise ValueError("between is for clusters of several kinds of devices: give groups, too")
        if self.groups and merged(self.groups, self.between) != (self.device, self.links, self.group_sizes):
            raise ValueError("device and links are not those of the groups: make the cluster with Cluster.of_groups")

    @staticmethod
    def of_groups(
        name: str,
        groups: Sequence[DeviceGroup],
        between: Sequence[Between] = (),
        axis_links: Mapping[str, Link] | None = None,
    ) -> Cluster:
        """A cluster of several kinds of devices; each group's devices are numbered after those of the groups before.

        Args:
            name: for people.
            groups: at least one.
            between: the links between groups; default: the slower of the two between their own nodes.
            axis_links: as in `Cluster`.

        Raises:
            ValueError: there is no group, two have one name, or two have no link between them.
        """
        for key, found, kind in (("groups", groups, DeviceGroup), ("between", between, Between)):
            if not isinstance(found, list | tuple) or not all(isinstance(value, kind) for value in found):
                raise ValueError(f"{key} must be a tuple of {kind.__name__}s, got {shown(found)}")
        if not groups:
            raise ValueError("groups is empty: give at least one")
        device, links, sizes = merged(groups, between)
        return Cluster(name, device, links, sizes, axis_links or {}, tuple(groups), tuple(between))

    @property
    def devices(self) -> int | None:
        """How many there are, of a cluster with groups; others have as many as they are asked for."""
        return sum(g.devices for g in self.groups) if self.groups else None

    def require_mesh(self, axes: Mapping[str, int]) -> None:
        """Refuse a mesh of more or fewer devices than the groups have.

        Raises:
            ValueError: says how many there are of each.
        """
        wanted = math.prod(axes.values())
        if self.devices not in (None, wanted):
            each = ", ".join(f"{g.devices} of {g.name!r}" for g in self.groups)
            raise ValueError(
                f"cluster {self.name!r} has {self.devices} devices ({each}), and the mesh {dict(axes)} has {wanted}: "
                "give a mesh of all of them, or other groups; workers that train apart (role local) need a cluster "
                "without groups"
            )

    def link_for(self, axis_sizes: Mapping[str, int]) -> tuple[Link, ...]:
        """The link that each axis of a mesh communicates over.

        Devices are numbered along the mesh row by row, so the last axis joins neighbors. An axis lies within a
        group if its size times all inner sizes fits into the group and divides it; it uses the innermost such level,
        or the outermost link if there is none. An entry in ``axis_links`` comes first. The bandwidth of the link
        between nodes is a device's own share of the network cards; an axis with several neighbors in each node has
        the shares of all of them, since a ring leaves a node only once, less what `Link.contention` says that groups
        lose to others.

        Args:
            axis_sizes: name and size of each mesh axis, outermost first: ``{"node": 32, "gpu": 8}``.

        Returns:
            One link per axis, in the same order.

        Raises:
            ValueError: a size is not a positive integer.

        Examples:
            >>> [link.name for link in Cluster.preset("h100").link_for({"node": 32, "gpu": 8})]
            ['InfiniBand NDR', 'NVLink 4']
        """
        require(axis_sizes=(axis_sizes, a(Mapping, "the size of each axis by its name, such as {'gpu': 8}")))
        for name, size in axis_sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"mesh axis {name!r} has size {size!r}: it must be a positive integer")
        chosen: list[Link] = []
        extent, devices = 1, math.prod(axis_sizes.values())
        for name, size in reversed(list(axis_sizes.items())):
            times = devices // (extent * size)
            chosen.append(self.axis_links.get(name) or self._link_between(extent, size, times))
            extent *= size
        return tuple(reversed(chosen))

    def _link_between(self, stride: int, size: int, times: int) -> Link:
        """The link of ``size`` devices that are ``stride`` apart, with the bandwidth that they have together.

        There are ``times`` sets of such groups, one outside the other: the stages of a pipeline each have theirs.

        A ring of them leaves each group of a level once, over the links of all its devices there, and is as fast as the
        slowest level that it crosses; the latencies of its steps are averaged. Parallel aggregated trees are for
        devices that have no neighbor in their node.
        """
        # The innermost level whose groups hold the whole axis; the outermost has no bound.
        within = (i for i, group in enumerate(self.group_sizes) if group % (stride * size) == 0)
        level = next(within, len(self.links) - 1)
        groups = self.group_sizes[:level]
        together = [1, *(math.gcd(size, g // stride) if g % stride == 0 else 1 for g in groups)]
        # The links of a level are used only if its groups hold more devices of the axis than those inside them.
        used = [i for i in range(level + 1) if i == level or together[i + 1] > together[i]]
        outer, node = self.links[level], together[1] if level else 1
        shared = groups[0] // node if node > 1 else 1
        # Groups of several devices a node share its network cards, and lose some of them to each other, and to those of
        # other nodes. One group that has all devices of its nodes does not, nor do groups with one device a node.
        lost = shared**outer.contention + (outer.contention * (times - 1) * node / shared if shared > 1 else 0.0)
        return replace(
            outer,
            bandwidth=min(together[i] * self.links[i].bandwidth / (lost if i else 1.0) for i in used),
            latency=sum(
                (1 / k - 1 / m) * near.latency for k, m, near in zip(together, together[1:], self.links, strict=False)
            )
            + outer.latency / together[level],
            algorithms=tuple(a for a in outer.algorithms if a != "pat" or node == 1),
            neighbors=node,
        )

    @staticmethod
    def preset(name: str) -> Cluster:
        """A cluster with public figures, by its name in `PRESETS`.

        Raises:
            ValueError: there is none of that name.
        """
        if name not in PRESETS:
            raise ValueError(f"no cluster preset {name!r}{suggest(str(name), PRESETS)}")
        return Cluster.load(_FOLDER / f"{name}.toml")

    @staticmethod
    def resolve(spec: str | Path | Cluster) -> Cluster:
        """A cluster from what a user says: a cluster, a preset's name or a TOML file.

        Raises:
            ValueError: it is none of them, or the file is not valid.
        """
        if isinstance(spec, Cluster):
            return spec
        require(cluster=(spec, PATH))
        if isinstance(spec, str) and spec in PRESETS:
            return Cluster.preset(spec)
        if _is_file(spec):
            return Cluster.load(spec)
        raise ValueError(f"cluster {shown(str(spec))} is neither a file nor a preset{suggest(str(spec), PRESETS)}")

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """Read a cluster from a TOML file, as `to_toml` writes it.

        Raises:
            ValueError: it is no such file, or a key is missing, unknown or has a wrong value; names file, key and
                remedy.
            OSError: the file does not exist or cannot be read.
        """
        require(path=(path, PATH))
        text = read_text(path, MOST_BYTES)
        try:
            return Cluster.from_toml(text)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @staticmethod
    def from_toml(text: str) -> Cluster:
        """Inverse of `to_toml`.

        Raises:
            ValueError: it is not valid TOML, or a key is missing, unknown or has a wrong value.
        """
        require(text=(text, a(str, "the text of a TOML file, as to_toml() gives it")))
        # Python's parser takes time that grows with the square of a dotted key's depth.
        longest = max(map(len, text.split("\n")))
        if len(text) > MOST_BYTES or longest > MOST_IN_A_LINE:
            raise ValueError(
                f"{len(text)} characters, {longest} in a line: at most {MOST_BYTES} and {MOST_IN_A_LINE} are read; "
                "Cluster.save shows the format"
            )
        try:
            document = tomllib.loads(text)
        except RecursionError as error:
            raise ValueError("not valid TOML: nested too deep; Cluster.save shows the format") from error
        except ValueError as error:
            raise ValueError(f"not valid TOML: {error}; Cluster.save shows the format") from error
        return _cluster_of(document)

    def save(self, path: str | Path) -> None:
        """Write a TOML file that `load` reads back as an equal cluster.

        Raises:
            ValueError: ``path`` is no path.
            OSError: the file cannot be written.
        """
        require(path=(path, PATH))
        Path(path).write_text(self.to_toml(), encoding="utf-8")

    def to_toml(self) -> str:
        """The cluster as TOML text; equal clusters give equal text."""
        lines = [f"name = {quote(self.name)}"]
        if self.groups:
            for group in self.groups:
                lines += ["", "[[groups]]", f"name = {quote(group.name)}"]
                lines += [f"{key} = {getattr(group, key)!r}" for key in ("nodes", "devices_per_node", "speed")]
                lines += [f"group_sizes = {list(group.group_sizes)}", *device_lines("groups.device", group.device)]
                lines += [line for link in group.links for line in link_lines("[[groups.links]]", link)]
            for entry in self.between:
                lines += ["", "[[between]]", f"groups = [{', '.join(map(quote, entry.groups))}]"]
                lines += link_lines("[between.link]", entry.link)
        else:
            lines += [f"group_sizes = {list(self.group_sizes)}", *device_lines("device", self.device)]
            lines += [line for link in self.links for line in link_lines("[[links]]", link)]
        for axis, link in self.axis_links.items():
            lines += link_lines(f"[axis_links.{quote(axis)}]", link)
        return "\n".join(lines) + "\n"

    def fingerprint(self) -> str:
        """16 hexadecimal digits, the same for equal clusters on every machine and Python."""
        return hashlib.sha256(self.to_toml().encode()).hexdigest()[:16]


def _is_file(path: str | Path) -> bool:
    try:
        return Path(path).is_file()
    except OSError:  # too long to be one
        return False


def _cluster_of(document: dict[str, Any]) -> Cluster:
    """A cluster from the tables of a file. Each part by itself, so that an error has its whole path."""
    if "groups" in document:
        return _cluster_of_groups(document)
    if "between" in document:
        raise ValueError("key between is for clusters of several kinds of devices: add [[groups]], or remove it")
    require_keys(document, Cluster, "")
    device = device_of(document["device"], "device")
    links = links_of(document["links"], "links")
    axis_links = tables(document.get("axis_links", {}), Link, "axis_links")
    sizes = tuple(typed(document.get("group_sizes", []), list[int], "group_sizes"))
    return Cluster(typed(document["name"], str, "name"), device, links, sizes, axis_links)


def _cluster_of_groups(document: dict[str, Any]) -> Cluster:
    """A cluster with ``[[groups]]``: what it is otherwise said to be follows from them."""
    for key in document:
        if key not in _OF_GROUPS:
            also = f"{key} is stated by each group: remove it" if key in ("device", "links", "group_sizes") else ""
            raise ValueError(also or f"unknown key {key}: remove it{suggest(key, _OF_GROUPS)}")
    groups = [
        _group_of(typed(table, dict[str, Any], f"groups[{i}]"), f"groups[{i}]")
        for i, table in enumerate(typed(document["groups"], list[Any], "groups"))
    ]
    between = [
        typed(table, Between, f"between[{i}]")
        for i, table in enumerate(typed(document.get("between", []), list[Any], "between"))
    ]
    if "name" not in document:
        raise ValueError("missing key name: add it")
    axis_links = tables(document.get("axis_links", {}), Link, "axis_links")
    return Cluster.of_groups(typed(document["name"], str, "name"), groups, between, axis_links)


_OF_GROUPS = ("name", "groups", "between", "axis_links")


def _group_of(table: dict[str, Any], where: str) -> DeviceGroup:
    """A group from its table; of one that names a preset, device and links are those of the preset.

    Raises:
        ValueError: a key is missing, unknown or has a wrong value; names its path.
    """
    table = dict(table)
    if "preset" in table:
        preset = typed(table.pop("preset"), str, f"{where}.preset")
        if stated := [key for key in ("device", "links", "group_sizes") if key in table]:
            raise ValueError(f"{where}.{stated[0]} is that of the preset: remove it, or {where}.preset")
        try:
            known = Cluster.preset(preset)
        except ValueError as error:
            raise ValueError(f"{where}.preset: {error}") from error
        memory = typed(table.pop("memory", known.device.memory), float, f"{where}.memory")
        device = refused(where, lambda: replace(known.device, memory=memory))
        links, sizes = known.links, known.group_sizes
        table.setdefault("name", known.name)
        if sizes:  # those within a node, of which the outermost is as large as the group says
            table.setdefault("devices_per_node", sizes[-1])
        links = links if sizes else (*links, *links)
        filled: dict[str, Any] = {"device": device, "links": links, "group_sizes": sizes[:-1]}
    else:
        missing = next((key for key in ("device", "links") if key not in table), None)
        if missing is not None:
            raise ValueError(f"missing key {where}.{missing}: add it, or a preset (known: {', '.join(PRESETS)})")
        sizes = tuple(typed(table.get("group_sizes", []), list[int], f"{where}.group_sizes"))
        filled = {
            "device": device_of(table["device"], f"{where}.device"),
            "links": links_of(table["links"], f"{where}.links"),
            "group_sizes": sizes,
        }
    require_keys({**table, **filled}, DeviceGroup, f"{where}.")
    plain: dict[str, Any] = {
        key: typed(table[key], kind, f"{where}.{key}")
        for key, kind in (("name", str), ("nodes", int), ("devices_per_node", int), ("speed", float))
        if key in table
    }
    return refused(where, lambda: DeviceGroup(**{**plain, **filled}))
