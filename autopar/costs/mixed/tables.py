"""Tables of a cluster's TOML file: the values in them, strictly typed, and the text of devices and links."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

import msgspec

from autopar.costs.device import Device, Link, suggest

_T = TypeVar("_T")

_OPTIONAL = ("efficiency", "fused", "units", "ramp", "streaming", "host", "host_bandwidth", "copies", "alone")
FIGURES = ("memory", "bandwidth", "launch", *_OPTIONAL)
"""Of a device, besides its rates."""

LINK_OPTIONAL = ("copies", "contention", "wait", "occupies")
"""Figures of a link that are zero where they are not stated."""


def device_lines(table: str, device: Device) -> list[str]:
    """The lines of a table of a device."""
    lines = ["", f"[{table}]", f"name = {quote(device.name)}", f"kind = {quote(device.kind)}"]
    lines += [f"{key} = {getattr(device, key)!r}" for key in FIGURES]
    return [*lines, "", f"[{table}.flops]", *(f"{dtype} = {rate!r}" for dtype, rate in device.flops.items())]


def link_lines(header: str, link: Link) -> list[str]:
    """The lines of a table of a link."""
    lines = ["", header, f"name = {quote(link.name)}"]
    lines += [f"bandwidth = {link.bandwidth!r}", f"latency = {link.latency!r}"]
    lines += [f"algorithms = [{', '.join(map(quote, link.algorithms))}]"]
    lines += [f"{key} = {getattr(link, key)!r}" for key in LINK_OPTIONAL if getattr(link, key)]
    factors = ", ".join(f"{kind} = {factor!r}" for kind, factor in link.factors.items())
    return [*lines, *([f"factors = {{ {factors} }}"] if factors else [])]


def quote(text: str) -> str:
    """A text in quotes."""
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
    "nodes": ", how many there are",
    "devices_per_node": ", how many are in each node",
    "speed": ", the share of the device's figures that its kernels reach",
    "between": ", a [[between]] table for each pair of groups, or one for all",
    "link": ", a table [between.link]",
    "axis_links": ", an [axis_links.NAME] table for each axis",
    "group_sizes": " of integers",
}

_IN_WORDS = {"float": "a number", "int": "an integer", "str": "text", "array": "a list", "object": "a table"}

_NOT_STATED: Mapping[str, Collection[str]] = {"Link": ("neighbors",), "Cluster": ("groups", "between")}
"""Fields that `Cluster.link_for` finds out, and those that files of several kinds of devices have."""


def device_of(value: object, where: str) -> Device:
    """A device from its table; an error names the path of the key."""
    table = typed(value, dict[str, Any], where)
    require_keys(table, Device, f"{where}.")
    return typed({**table, "flops": tables(table["flops"], float, f"{where}.flops")}, Device, where)


def links_of(value: object, where: str) -> tuple[Link, ...]:
    """Links from a list of tables."""
    return tuple(typed(link, Link, f"{where}[{i}]") for i, link in enumerate(typed(value, list[Any], where)))


def tables(value: object, kind: type[_T], where: str) -> dict[str, _T]:
    """A table whose keys are names, and whose values are of one kind."""
    return {key: typed(inner, kind, f"{where}.{key}") for key, inner in typed(value, dict[str, Any], where).items()}


def typed(value: object, kind: type[_T], where: str) -> _T:
    """The value in this type, strictly: no text is a number, and no bool.

    Raises:
        ValueError: it is of another type, or the type's own checks refuse it; names the path of the key.
    """
    if is_dataclass(kind) and isinstance(value, dict):
        require_keys(value, kind, f"{where}.")
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


def require_keys(table: dict[str, Any], kind: type, where: str) -> None:
    """Refuse keys that the class does not have, and the lack of those without a default."""
    stated = [f for f in fields(kind) if f.name not in _NOT_STATED.get(kind.__name__, ())]
    known = tuple(f.name for f in stated)
    for key in table:
        if key not in known:
            raise ValueError(f"unknown key {where}{key}: remove it{suggest(key, known)}")
    for f in stated:
        if f.name not in table and f.default is MISSING and f.default_factory is MISSING:
            raise ValueError(f"missing key {where}{f.name}: add it{_REMEDY.get(f.name, '')}")


def refused(where: str, make: Callable[[], _T]) -> _T:
    """A value, or its own error with the path of the table in front."""
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from error
