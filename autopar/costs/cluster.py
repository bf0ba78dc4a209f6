"""What a plan is made for: one kind of device, and the links between devices.

A `Cluster` is data: a few public figures per device and per link, from a preset or from a TOML file that
`autopar calibrate` or a person writes. Nothing here looks at the machine, so that a plan made on a laptop is the plan
that the cluster gets.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T")

_FOLDER = Path(__file__).with_name("presets")

PRESETS: tuple[str, ...] = tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))
"""Names that `Cluster.preset` knows: public figures, the source beside each number, in the folder ``presets``."""

ALGORITHMS = ("ring", "tree", "pat")
"""How libraries may run collectives; `autopar.costs.collectives` says what each costs."""

_SHARES = ("efficiency", "streaming")
_OPTIONAL = ("efficiency", "units", "ramp", "streaming", "host", "host_bandwidth", "copies")
_FIGURES = ("memory", "bandwidth", "launch", *_OPTIONAL)

FLOAT_DTYPES = ("float64", "float32", "bfloat16", "float16")
"""The dtypes whose peak a device may state."""

# Work in other dtypes counts at the rate of one that is stated: integers and booleans run on the float32 units.
_RATED_AS = {"complex128": "float64", "complex64": "float32", "complex32": "float16"} | dict.fromkeys(
    ("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"), "float32"
)


@dataclass(frozen=True)
class Device:
    """One device, all of them being alike.

    Attributes:
        name: for people.
        flops: peak floating-point operations per second by dtype name, dense.
        memory: bytes.
        bandwidth: of its memory, in bytes per second.
        launch: seconds that every kernel costs however little it does.
        efficiency: share of the peak that large matrix products reach; 1 where ``flops`` was measured.
        units: processors that each work on one tile of a matrix product at a time; 1: sizes are not quantized.
        ramp: depth of a product, in elements, during which a tile could have been computed while it starts and ends.
        streaming: share of ``bandwidth`` that kernels which only move data reach; 1 where it was measured.
        host: seconds that the host needs to launch one kernel: devices that are faster wait for it.
        host_bandwidth: of the way to the host's memory, in bytes per second in one direction, of which copies reach the
            share ``streaming``; 0: nothing can be sent there.
        copies: of what a convolution takes and makes, the share that its library copies into another order of memory,
            see `autopar.costs.memory.convolution_copies`: 1 for oneDNN; 0 counts nothing.

    Raises:
        ValueError: a figure is not a positive number, or a dtype is unknown.
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    memory: float
    bandwidth: float
    launch: float
    efficiency: float = 1.0
    units: int = 1
    ramp: float = 0.0
    streaming: float = 1.0
    host: float = 0.0
    host_bandwidth: float = 0.0
    copies: float = 0.0

    def __post_init__(self) -> None:
        _check_name(self.name)
        if not isinstance(self.flops, Mapping) or not self.flops:
            raise ValueError(f"flops must give operations per second by dtype, e.g. float32 = 1e12, got {self.flops!r}")
        for dtype in self.flops:
            if dtype not in FLOAT_DTYPES:
                raise ValueError(f"flops.{dtype} is not a known dtype{_suggest(dtype, FLOAT_DTYPES)}")
        # A plain dict, in one order: a read-only proxy could not be pickled, and ranks exchange clusters.
        flops = {d: _positive(f"flops.{d}", self.flops[d]) for d in FLOAT_DTYPES if d in self.flops}
        object.__setattr__(self, "flops", flops)
        for key in ("memory", "bandwidth", "launch", *_SHARES):
            object.__setattr__(self, key, _positive(key, getattr(self, key)))
        for key in ("ramp", "host", "host_bandwidth", "copies"):
            object.__setattr__(self, key, _not_negative(key, getattr(self, key)))
        for key in _SHARES:
            if getattr(self, key) > 1:
                raise ValueError(f"{key} is a share of the peak, at most 1, got {getattr(self, key)!r}")
        if isinstance(self.units, bool) or not isinstance(self.units, int) or self.units < 1:
            raise ValueError(f"units must be a positive integer, got {self.units!r}")

    def peak(self, dtype: str) -> float:
        """Operations per second of this dtype; integers count at float32's rate, complex numbers at their parts'.

        Raises:
            ValueError: the device states no rate for it.
        """
        rated = _RATED_AS.get(dtype, dtype)
        if rated not in self.flops:
            known = ", ".join(self.flops)
            raise ValueError(f"device {self.name} states no peak for {dtype} (only {known}); add it to [device.flops]")
        return self.flops[rated]


@dataclass(frozen=True)
class Link:
    """A way from each device to others.

    Attributes:
        name: for people.
        bandwidth: bytes per second that one device sends, while it receives as much.
        latency: seconds per message.
        algorithms: of `ALGORITHMS`, those that the communication library has on this link; the fastest is taken.
        copies: bytes that the library holds besides while it runs, for each byte of what an all-gather makes or a
            reduce-scatter takes: Gloo has a copy of it, NCCL works in place.
        contention: how much groups get in each other's way that share the network cards of a node and have several
            devices in it: of ``g`` such groups each has its share of the cards over ``g ** contention``. 0: they share
            without loss. Groups with one device a node have a card each.
        neighbors: how many devices of the group are in each node; what `Cluster.link_for` finds out, not stated.

    Raises:
        ValueError: a figure is not a positive number, or an algorithm is unknown.
    """

    name: str
    bandwidth: float
    latency: float
    algorithms: tuple[str, ...] = ("ring",)
    copies: float = 0.0
    contention: float = 0.0
    neighbors: int = 1

    def __post_init__(self) -> None:
        _check_name(self.name)
        if not isinstance(self.algorithms, list | tuple) or not self.algorithms:
            raise ValueError(f"algorithms must be a list of {', '.join(ALGORITHMS)}, got {self.algorithms!r}")
        for name in self.algorithms:
            if name not in ALGORITHMS:
                raise ValueError(f"algorithms has {name!r}{_suggest(str(name), ALGORITHMS)}")
        object.__setattr__(self, "algorithms", tuple(n for n in ALGORITHMS if n in self.algorithms))
        for key in ("bandwidth", "latency"):
            object.__setattr__(self, key, _positive(key, getattr(self, key)))
        for key in ("copies", "contention"):
            object.__setattr__(self, key, _not_negative(key, getattr(self, key)))


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
        _check_name(self.name)
        object.__setattr__(self, "links", tuple(self.links))
        object.__setattr__(self, "group_sizes", tuple(self.group_sizes))
        object.__setattr__(self, "axis_links", {name: self.axis_links[name] for name in sorted(self.axis_links)})
        for name in self.axis_links:
            _check_name(name)
        if not self.links:
            raise ValueError("links is empty: give at least one, between neighboring devices")
        if len(self.group_sizes) != len(self.links) - 1:
            raise ValueError(
                f"group_sizes has {len(self.group_sizes)} entries for {len(self.links)} links: give the devices in a "
                "group of each level but the outermost"
            )
        inner = 1
        for size in self.group_sizes:
            if isinstance(size, bool) or not isinstance(size, int) or size < inner or size % inner:
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
        the shares of all of them, since a ring leaves a node only once.

        Args:
            axis_sizes: name and size of each mesh axis, outermost first: ``{"node": 32, "gpu": 8}``.

        Returns:
            One link per axis, in the same order.

        Raises:
            ValueError: a size is not a positive integer.

        >>> [link.name for link in Cluster.preset("h100").link_for({"node": 32, "gpu": 8})]
        ['InfiniBand NDR', 'NVLink 4']
        """
        chosen: list[Link] = []
        extent = 1
        for name, size in reversed(list(axis_sizes.items())):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"mesh axis {name!r} has size {size!r}: it must be a positive integer")
            chosen.append(self.axis_links.get(name) or self._link_between(extent, size))
            extent *= size
        return tuple(reversed(chosen))

    def _link_between(self, stride: int, size: int) -> Link:
        """The link of ``size`` devices that are ``stride`` apart, with the bandwidth that they have together.

        A ring of them leaves each group of a level once, over the links of all its devices there, and is as fast as the
        slowest level that it crosses; the latencies of its steps are averaged. Parallel aggregated trees are for
        devices that have no neighbor in their node.
        """
        within = (i for i, group in enumerate(self.group_sizes) if group % (stride * size) == 0)
        level = next(within, len(self.links) - 1)
        groups = self.group_sizes[:level]
        together = [1, *(math.gcd(size, g // stride) if g % stride == 0 else 1 for g in groups)]
        used = [i for i in range(level + 1) if i == level or together[i + 1] > together[i]]
        outer, node = self.links[level], together[1] if level else 1
        lost = (groups[0] // node) ** outer.contention if node > 1 else 1.0
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
            raise ValueError(f"no cluster preset {name!r}{_suggest(name, PRESETS)}")
        return Cluster.load(_FOLDER / f"{name}.toml")

    @staticmethod
    def resolve(spec: str | Path | Cluster) -> Cluster:
        """A cluster from what a user says: a cluster, a preset's name or a TOML file.

        Raises:
            ValueError: it is none of them, or the file is not valid.
        """
        if isinstance(spec, Cluster):
            return spec
        if isinstance(spec, str) and spec in PRESETS:
            return Cluster.preset(spec)
        if Path(spec).is_file():
            return Cluster.load(spec)
        raise ValueError(f"cluster {str(spec)!r} is neither a file nor a preset{_suggest(str(spec), PRESETS)}")

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """Read a cluster from a TOML file, as `to_toml` writes it.

        Raises:
            ValueError: a key is missing, unknown or has a wrong value; the message names file, key and remedy.
            OSError: the file cannot be read.
        """
        try:
            return _parse_cluster(tomllib.loads(Path(path).read_text(encoding="utf-8")))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not a text file in UTF-8; write it with Cluster.save") from error
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path}: not valid TOML: {error}; Cluster.save shows the format") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @staticmethod
    def from_toml(text: str) -> Cluster:
        """Inverse of `to_toml`.

        Raises:
            ValueError: a key is missing, unknown or has a wrong value.
        """
        return _parse_cluster(tomllib.loads(text))

    def save(self, path: str | Path) -> None:
        """Write a TOML file that `load` reads back as an equal cluster."""
        Path(path).write_text(self.to_toml(), encoding="utf-8")

    def to_toml(self) -> str:
        """The cluster as TOML text; equal clusters give equal text."""
        device = self.device
        lines = [f"name = {_quote(self.name)}", f"group_sizes = {list(self.group_sizes)}", "", "[device]"]
        lines += [f"name = {_quote(device.name)}"]
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


def _positive(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{key} must be a positive number, got {value!r}")
    return float(value)


def _not_negative(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{key} must be a number that is not negative, got {value!r}")
    return float(value)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ValueError(f"name must be a line of text, got {name!r}")


def _suggest(word: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return (f": did you mean {close[0]!r}?" if close else "") + f" (known: {', '.join(known)})"


def _quote(text: str) -> str:
    # TOML's basic strings escape like JSON's as long as every character is printable, which names are.
    return json.dumps(text, ensure_ascii=False)


def _table(value: object, where: str, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where.rstrip('.')} must be a table of {', '.join(required)}, got {value!r}")
    for key in value:
        if key not in required + optional:
            raise ValueError(f"unknown key {where}{key}: remove it{_suggest(key, required + optional)}")
    for key in required:
        if key not in value:
            raise ValueError(f"missing key {where}{key}: add it{_REMEDY.get(key, '')}")
    return value


_REMEDY = {
    "bandwidth": ", in bytes per second",
    "latency": ", in seconds per message",
    "launch": ", in seconds per kernel",
    "memory": ", in bytes",
    "flops": ", operations per second by dtype",
    "links": ", one [[links]] table per level, innermost first",
    "device": ", a table [device]",
}


def _parse_link(value: object, where: str) -> Link:
    table = _table(value, where, ("name", "bandwidth", "latency"), ("algorithms", "copies", "contention"))
    return _named(where, Link, table)


def _named(where: str, build: type[_T], table: dict[str, Any]) -> _T:
    try:
        return build(**table)
    except ValueError as error:
        raise ValueError(f"{where}{error}") from error


def _parse_cluster(document: dict[str, Any]) -> Cluster:
    table = _table(document, "", ("name", "device", "links"), ("group_sizes", "axis_links"))
    keys = ("name", "flops", "memory", "bandwidth", "launch")
    device = _named("device.", Device, _table(table["device"], "device.", keys, _OPTIONAL))
    if not isinstance(table["links"], list):
        raise ValueError("links must be [[links]] tables, one per level, innermost first")
    links = tuple(_parse_link(link, f"links[{i}].") for i, link in enumerate(table["links"]))
    overrides = table.get("axis_links", {})
    if not isinstance(overrides, dict):
        raise ValueError(f"axis_links must be [axis_links.NAME] tables, got {overrides!r}")
    axis_links = {axis: _parse_link(link, f"axis_links.{axis}.") for axis, link in overrides.items()}
    group_sizes = table.get("group_sizes", [])
    if not isinstance(group_sizes, list):
        raise ValueError(f"group_sizes must be a list of integers, got {group_sizes!r}")
    return Cluster(table["name"], device, links, tuple(group_sizes), axis_links)
