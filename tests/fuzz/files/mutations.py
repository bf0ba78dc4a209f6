"""Files changed at random: their data, where it is JSON, and their bytes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from random import Random
from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 2**31 - 1, 2**31, 2**63, 10**30, 10**400, 1.5, -0.0, 1e-300, 1e308, float("inf"),
    float("nan"), "", "x", "\0", "\ud800", "../x", "a.b", "x" * 5000, "R", "S(0)", "S(1)", "S(2)", "S(0.0)", "S(9)",
    "P(sum)", "P", "@0", [], {}, [1], [[1]], [0, 0], [-1, 2], {"a": 1}, {"": {}}, {"a": {"b": []}},
)  # fmt: skip
"""What is put in a place of anything."""

DEPTH = 2000

BYTES = (b"", b"-", b"e", b"[", b"{", b'"', b"\n", b"\x01", b"\xff", b"9", b",", b":", b"\\", b"NaN", b"1e999", b"\0")

Path = tuple[Any, ...]


class Again(str):
    """A key that a dict may have twice, as a file may."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


def mutated(text: bytes, draw: Random) -> bytes:
    """A file that differs from another in one place, or in a few."""
    if draw.random() < 0.2:
        return damaged(text, draw)
    data = json.loads(text)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        if every := places(data):
            draw.choice(CHANGES)(data, draw.choice(every), every, draw)
    return json.dumps(data, indent=1).encode("utf-8", "surrogatepass")


def damaged(text: bytes, draw: Random) -> bytes:
    """Some bytes are others, absent, or there twice."""
    for _ in range(draw.choice((1, 1, 2, 5))):
        i = draw.randrange(len(text) + 1)
        kind = draw.randrange(5)
        if kind == 0 and i < len(text):
            text = text[:i] + bytes([text[i] ^ (1 << draw.randrange(8))]) + text[i + 1 :]
        if kind == 1:
            text = text[:i] + draw.choice(BYTES) + text[i + draw.choice((0, 1, 20)) :]
        if kind == 2:
            text = text[:i]
        if kind == 3:
            text = text[:i] + text[i : i + draw.choice((1, 100))] + text[i:]
        if kind == 4:
            text = text[:i] + draw.choice((b"[", b'{"a":')) * DEPTH + text[i:]
    return text


def places(value: Any, path: Path = ()) -> list[Path]:
    """Every entry of nested data."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [p for key, v in inner for p in ((*path, key), *places(v, (*path, key)))]


def at(data: Any, path: Path) -> Any:
    """The value in a place."""
    for key in path:
        data = data[key]
    return data


def _other_value(data: Any, path: Path, every: list[Path], draw: Random) -> None:
    at(data, path[:-1])[path[-1]] = copy.deepcopy(draw.choice(VALUES))


def _near_value(data: Any, path: Path, every: list[Path], draw: Random) -> None:
    """A number that is another one, a text of other characters, a list of other members."""
    holder, last = at(data, path[:-1]), path[-1]
    value = holder[last]
    if isinstance(value, bool):
        holder[last] = not value
    elif isinstance(value, int):
        holder[last] = draw.choice((value + 1, value - 1, 2 * value, value // 2, float(value), str(value)))
    elif isinstance(value, float):
        holder[last] = draw.choice((value * (1 + 1e-9), value * 1.01, value / 2, 0.0, -value, str(value)))
    elif isinstance(value, str) and value:
        i = draw.randrange(len(value))
        holder[last] = draw.choice(
            (value[:i], value[:i] + value[i + 1 :], value[:i] + draw.choice("0R1.(x ") + value[i:])
        )
    elif isinstance(value, list) and value:
        holder[last] = draw.choice((value[1:], [*value, value[-1]], value[::-1]))


def _lost(data: Any, path: Path, every: list[Path], draw: Random) -> None:
    del at(data, path[:-1])[path[-1]]


def _twice(data: Any, path: Path, every: list[Path], draw: Random) -> None:
    """Once more, with the value of another place or its own."""
    holder, last = at(data, path[:-1]), path[-1]
    value = copy.deepcopy(at(data, draw.choice(every)) if draw.random() < 0.5 else holder[last])
    if isinstance(holder, list):
        holder.insert(last, value)
    else:
        holder[Again(last)] = value


def _foreign(data: Any, path: Path, every: list[Path], draw: Random) -> None:
    """Under another name, which is one of the file's or none."""
    holder, last = at(data, path[:-1]), path[-1]
    names = [p[-1] for p in every if isinstance(p[-1], str)]
    name = draw.choice((draw.choice(names), "foreign", "", "x" * 300, f"{last}x", "é\0"))
    if isinstance(holder, list):
        holder[last] = name
    else:
        holder[name] = holder[last] if draw.random() < 0.5 else holder.pop(last)


def _moved(data: Any, path: Path, every: list[Path], draw: Random) -> None:
    """The values of two places change places, of one kind if there are such."""
    holder, last = at(data, path[:-1]), path[-1]
    value = holder[last]
    kin = [p for p in every if p != path and type(at(data, p)) is type(value)]
    near = [p for p in kin if len(p) == len(path) and p[:-2] == path[:-2]]
    choices = [c for c in (near, kin, every) if c]
    other = draw.choice(draw.choice(choices))
    if other[: len(path)] == path or path[: len(other)] == other:  # one within the other
        holder[last] = copy.deepcopy(at(data, other))
        return
    second = at(data, other[:-1])
    holder[last], second[other[-1]] = second[other[-1]], value


def _copied(data: Any, path: Path, every: list[Path], draw: Random) -> None:
    """The value of another place of its kind."""
    holder, last = at(data, path[:-1]), path[-1]
    kin = [p for p in every if type(at(data, p)) is type(holder[last])]
    holder[last] = copy.deepcopy(at(data, draw.choice(kin)))


def _deep(data: Any, path: Path, every: list[Path], draw: Random) -> None:
    """Within many lists or dicts."""
    value = at(data, path)
    for _ in range(draw.choice((1, 2, 100))):
        value = [value] if draw.random() < 0.5 else {"a": value}
    at(data, path[:-1])[path[-1]] = value


CHANGES: tuple[Callable[[Any, Path, list[Path], Random], None], ...] = (
    _other_value, _other_value, _near_value, _near_value, _lost, _twice, _foreign, _moved, _moved, _copied, _copied,
    _deep,
)  # fmt: skip
