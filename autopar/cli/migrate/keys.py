"""`Keys`: every key of a configuration file, each of which ends in exactly one of three lists."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from autopar.cli.migrate.read import Tree

TRANSLATED, NOT_NEEDED, NO_COUNTERPART = "translated", "not needed", "no counterpart"
LISTS = (TRANSLATED, NOT_NEEDED, NO_COUNTERPART)

AUTO = "auto"
"""What Hugging Face's Trainer replaces by its own arguments."""

Reasons = Mapping[str, tuple[str, str]]
"""The list of a key, and what is said of it there, by patterns of keys; the first that matches counts."""


@dataclass(frozen=True)
class Kind:
    """What a value may be.

    Attributes:
        type: for msgspec.
        expected: the same in words.
    """

    type: Any
    expected: str


COUNT = Kind(Annotated[int, msgspec.Meta(ge=1, le=2**31)], "a whole number from 1 on")
NUMBER = Kind(Annotated[float, msgspec.Meta(ge=0, le=1e30)], "a number, 0 or more")
FLAG = Kind(bool, "true or false")
TEXT = Kind(Annotated[str, msgspec.Meta(max_length=1000)], "a text")
PAIR = Kind(Annotated[list[Annotated[float, msgspec.Meta(ge=0, lt=1)]], msgspec.Meta(min_length=2, max_length=2)],
            "two numbers, from 0 to less than 1")  # fmt: skip


def one_of(*words: Any) -> Kind:
    """One of these values."""
    return Kind(Literal[words], ", ".join(json.dumps(word) for word in words[:-1]) + f" or {json.dumps(words[-1])}")


class Keys:
    """The keys of a file that have no table below them, as dotted names, and the list of each."""

    def __init__(self, file: Path, tree: Tree, sections: Collection[str]) -> None:
        """Flatten a file's tables.

        Args:
            file: for errors.
            tree: what it says.
            sections: names of the tables that the reader knows: no other value may stand there.

        Raises:
            ValueError: one does.
        """
        self.file, self._values = file, dict(_flat(tree))
        self.lists: dict[str, dict[str, str]] = {name: {} for name in LISTS}
        self.assumed: list[str] = []
        self.unknown: list[str] = []
        self._left_open: set[str] = set()
        self._asked: set[str] = set()
        for name in sections:
            value = self._values.get(name, {})
            if value not in ({}, None):
                raise self.wrong(name, "a table of keys")

    def value(self, key: str) -> Any:
        """As the file has it."""
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        """Whether the file has the key."""
        return key in self._values

    def has_value(self, key: str) -> bool:
        """Whether the file has a value there, and no empty table."""
        return self._values.get(key) not in (None, {})

    def __iter__(self) -> Iterator[str]:
        """All keys, in the order of the file."""
        return iter(self._values)

    def read(self, key: str, kind: Kind, default: Any = None) -> Any:
        """A value of this kind; the default where the file does not have the key, or leaves it to the Trainer.

        Raises:
            ValueError: it is of another kind.
        """
        value = self._values.get(key)
        self._asked.add(key)
        if value == AUTO:
            self._left_open.add(key)
        if value is None or value == AUTO:
            return default
        try:
            return msgspec.convert(value, kind.type)
        except msgspec.ValidationError as error:
            raise self.wrong(key, kind.expected) from error

    def is_open(self, key: str) -> bool:
        """Whether the file leaves a key to the Trainer."""
        return self._values.get(key) == AUTO

    def translate(self, key: str, says: str) -> None:
        """Put a key, if there is one, into the list of what is translated."""
        self._put(TRANSLATED, key, says)

    def drop(self, key: str, why: str) -> None:
        """Put a key, if there is one, into the list of what is not needed."""
        self._put(NOT_NEEDED, key, why)

    def lack(self, key: str, why: str) -> None:
        """Put a key, if there is one, into the list of what has no counterpart."""
        self._put(NO_COUNTERPART, key, why)

    def _put(self, name: str, key: str, says: str) -> None:
        if key not in self._values:
            return
        assert not any(key in rows for rows in self.lists.values()), key
        auto = key in self._left_open
        self.lists[NOT_NEEDED if auto else name][key] = "the Trainer's own arguments decide" if auto else says

    def finish(self, reasons: Reasons) -> None:
        """Put the keys that are left where the reasons say; those that these do not name have no counterpart."""
        done = {key for rows in self.lists.values() for key in rows}
        plain = [pattern for pattern in reasons if "*" not in pattern]
        for key in self._values:
            if key in done:
                continue
            found = next((row for pattern, row in reasons.items() if fnmatchcase(key, pattern)), None)
            if found is None and self._values[key] in ({}, None):
                found = NOT_NEEDED, "it is empty"
            if found is not None and found[0] == NO_COUNTERPART and self._is_off(key):
                found = NOT_NEEDED, "it is off"
            if found is None:
                near = difflib.get_close_matches(key[:80], [*plain, *sorted({*done, *self._asked})], 1, 0.8)
                hint = f"; did you mean {near[0]}?" if near else ""
                found = NO_COUNTERPART, f"autopar migrate does not know this key{hint}"
                self.unknown.append(key)
            self._put(found[0], key, found[1])

    def _is_off(self, key: str) -> bool:
        """Whether a key turns something off, or is of a table that does."""
        value, enabled = self._values[key], f"{key.rpartition('.')[0]}.enabled"
        return value is False or value in (None, "no", "none", []) or self._values.get(enabled) is False

    def wrong(self, key: str, expected: str) -> ValueError:
        """The error of a value that is none of what is expected."""
        return ValueError(f"{self.file}: {key} is {shown(self._values.get(key))}; write {expected}")


def shown(value: Any) -> str:
    """A value in a line, cut where it is long.

    >>> shown({"a": [1, 2]}), shown("x" * 100)[-5:]
    ('{"a": [1, 2]}', 'xx...')
    """
    text = json.dumps(value, default=str, ensure_ascii=False) if _small(value) else str(type(value).__name__)
    return text if len(text) <= 60 else text[:57] + "..."


def _small(value: Any) -> bool:
    """Whether a value can be printed: Python refuses whole numbers of thousands of digits."""
    if isinstance(value, dict | list):
        return all(_small(v) for v in (value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int) or value.bit_length() < 1000


def _flat(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = prefix + (name if re.fullmatch(r"[\w-]+", name) else json.dumps(name))
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{key}.")
        else:
            yield key, value
