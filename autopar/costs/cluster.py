"""What a plan is made for: one kind of device, and the links between devices.

A `Cluster` is data: a few public figures per device and per link, from a preset or from a TOML file that
`autopar calibrate` or a person writes. Nothing here looks at the machine, so that a plan made on a laptop is the plan
that the cluster gets.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from autopar.costs.arguments import PATH, a, require
from autopar.costs.device import FLOAT_DTYPES as FLOAT_DTYPES
from autopar.costs.device import Device as Device
from autopar.costs.device import Link as Link
from autopar.costs.device import check_name, shown, suggest
from autopar.costs.read_file import read_text

_T = TypeVar("_T")

_FOLDER = Path(__file__).with_name("presets")

PRESETS: tuple[str, ...] = tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))
"""Names that `Cluster.preset` knows: public figures, the source beside each number, in the folder ``presets``."""

MOST_BYTES, MOST_IN_A_LINE = 2**18, 1000
"""Of a file, and characters of a line: presets have two thousand, and two hundred."""

_OPTIONAL = ("efficiency", "fused", "units", "ramp", "streaming", "host", "host_bandwidth", "copies")
_FIGURES = ("memory", "bandwidth", "launch", *_OPTIONAL)


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

    Raises:
        ValueError: levels and group sizes do not fit each other.
    """

    name: str
    device: Device
    links: tuple[Link, ...]
    group_sizes: tuple[int, ...] = ()
    axis_links: Mapping[str, Link] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_name(self.name)
        if not isinstance(self.device, Device):
            raise ValueError(f"device must be a Device, got {self.device!r}")
        for key, kind in (("links", Link), ("group_sizes", int)):
            value = getattr(self, key)
            if not isinstance(value, list | tuple) or not all(isinstance(v, kind) for v in value):
                raise ValueError(f"{key} must be a tuple of {kind.__name__}s, got {value!r}")
        if not isinstance(self.axis_links, Mapping) or not all(isinstance(v, Link) for v in self.axis_links.values()):
            raise ValueError(f"axis_links must give a Link for each name of an axis, got {self.axis_links!r}")
        for name in self.axis_links:
            check_name(name, "a name in axis_links")
        object.__setattr__(self, "links", tuple(self.links))
        object.__setattr__(self, "group_sizes", tuple(self.group_sizes))
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
        device = self.device
        lines = [f"name = {_quote(self.name)}", f"group_sizes = {list(self.group_sizes)}", "", "[device]"]
        lines += [f"name = {_quote(device.name)}", f"kind = {_quote(device.kind)}"]
        lines += [f"{key} = {getattr(device, key)!r}" for key in _FIGURES]
        lines += ["", "[device.flops]", *(f"{dtype} = {rate!r}" for dtype, rate in device.flops.items())]
        tables = [("[[links]]", link) for link in self.links]
        tables += [(f"[axis_links.{_quote(axis)}]", link) for axis, link in self.axis_links.items()]
        for header, link in tables:
            lines += ["", header, f"name = {_quote(link.name)}"]
            lines += [f"bandwidth = {link.bandwidth!r}", f"latency = {link.latency!r}"]
            lines += [f"algorithms = [{', '.join(map(_quote, link.algorithms))}]"]
            lines += [f"{key} = {getattr(link, key)!r}" for key in ("copies", "contention") if getattr(link, key)]
        return "\n".join(lines) + "\n"

    def fingerprint(self) -> str:
        """16 hexadecimal digits, the same for equal clusters on every machine and Python."""
        return hashlib.sha256(self.to_toml().encode()).hexdigest()[:16]


def _is_file(path: str | Path) -> bool:
    try:
        return Path(path).is_file()
    except OSError:  # too long to be one
        return False


def _quote(text: str) -> str:
    # TOML's basic strings escape like JSON's as long as every character is printable, which names are.
    return json.dumps(text, ensure_ascii=False)


_REMEDY = {
    "bandwidth": ", in bytes per second",
    "latency": ", in seconds per message",
    "launch": ", in seconds per kernel",
    "memory": ", in bytes",
    "flops": ", operations per second by dtype",
    "links": ", one [[links]] table per level, innermost first",
    "device": ", a table [device]",
    "axis_links": ", an [axis_links.NAME] table for each axis",
    "group_sizes": " of integers",
}

_IN_WORDS = {"float": "a number", "int": "an integer", "str": "text", "array": "a list", "object": "a table"}

_NOT_STATED = {"neighbors"}
"""Fields that `Cluster.link_for` finds out."""


def _cluster_of(document: dict[str, Any]) -> Cluster:
    """A cluster from the tables of a file. Each part by itself, so that an error has its whole path."""
    _require_keys(document, Cluster, "")
    table = _typed(document["device"], dict[str, Any], "device")
    _require_keys(table, Device, "device.")
    flops = _tables(table["flops"], float, "device.flops")
    links = _typed(document["links"], list[Any], "links")
    axis_links = _tables(document.get("axis_links", {}), Link, "axis_links")
    return Cluster(
        _typed(document["name"], str, "name"),
        _typed({**table, "flops": flops}, Device, "device"),
        tuple(_typed(link, Link, f"links[{i}]") for i, link in enumerate(links)),
        tuple(_typed(document.get("group_sizes", []), list[int], "group_sizes")),
        axis_links,
    )


def _tables(value: object, kind: type[_T], where: str) -> dict[str, _T]:
    """A table whose keys are names, and whose values are of one kind."""
    return {key: _typed(inner, kind, f"{where}.{key}") for key, inner in _typed(value, dict[str, Any], where).items()}


def _typed(value: object, kind: type[_T], where: str) -> _T:
    """The value in this type, strictly: no text is a number, and no bool.

    Raises:
        ValueError: it is of another type, or the type's own checks refuse it; names the path of the key.
    """
    if is_dataclass(kind) and isinstance(value, dict):
        _require_keys(value, kind, f"{where}.")
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        # "Expected `float`, got `str` - at `$.memory`", or what the class itself says of its own keys.
        reason, _, place = str(error).partition(" - at `$")
        if (named := re.fullmatch(r"Expected `(\w+)`, got `(\w+)`", reason)) is None:
            raise ValueError(f"{where}{place.rstrip('`')}.{reason}") from error
        wanted, got = (_IN_WORDS.get(word, word) for word in named.groups())
        path = where + place.rstrip("`")
        remedy = _REMEDY.get(re.split(r"[.\[]", path)[-1] or path, "")
        raise ValueError(f"{path} must be {wanted}{remedy}, and is {got}") from error


def _require_keys(table: dict[str, Any], kind: type, where: str) -> None:
    """Refuse keys that the class does not have, and the lack of those without a default."""
    stated = [f for f in fields(kind) if f.name not in _NOT_STATED]
    known = tuple(f.name for f in stated)
    for key in table:
        if key not in known:
            raise ValueError(f"unknown key {where}{key}: remove it{suggest(key, known)}")
    for f in stated:
        if f.name not in table and f.default is MISSING and f.default_factory is MISSING:
            raise ValueError(f"missing key {where}{f.name}: add it{_REMEDY.get(f.name, '')}")
