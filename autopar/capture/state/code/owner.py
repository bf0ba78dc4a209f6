"""`Scope`: names of an `Owner` (a module's globals, a class, a function) that some code reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from types import FunctionType
from typing import Any

from autopar.capture.state.code.objects import own_values

MISSING = object()
"""In place of the value of a name that is not there."""


STANDS_FOR = "_autopar_stands_for"
"""Attribute of a ``__setattr__`` that is put on a class while assignments are noted: the class's own one, or None."""


class Owner:
    """A module's globals, a class or a function; one object for each, so that paths through it are equal."""

    def __init__(self, space: Any, label: str) -> None:
        """``space``: a dict of globals, or what has attributes."""
        self.space, self.label = space, label

    def __repr__(self) -> str:
        """As messages call it."""
        return self.label

    def values(self) -> Mapping[str, Any]:
        """What it holds now, by name."""
        if isinstance(self.space, dict):
            return self.space
        found = own_values(self.space)
        put_on = vars(found["__setattr__"]) if isinstance(found.get("__setattr__"), FunctionType) else {}
        if STANDS_FOR not in put_on:
            return found
        others = {name: value for name, value in found.items() if name != "__setattr__"}
        own = put_on[STANDS_FOR]
        return others if own is None else others | {"__setattr__": own}

    def __getitem__(self, name: str) -> Any:
        """The value of a name."""
        return self.values()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Assign a name."""
        if isinstance(self.space, dict):
            self.space[name] = value
        else:
            setattr(self.space, name, value)

    def __delitem__(self, name: str) -> None:
        """Delete a name."""
        if isinstance(self.space, dict):
            del self.space[name]
        else:
            delattr(self.space, name)


@dataclass(frozen=True)
class Scope:
    """Names of one owner that the code reads, in order."""

    owner: Owner
    names: tuple[str, ...]

    def items(self) -> list[tuple[str, Any]]:
        """Those that are there, with their values."""
        space = self.owner.values()
        return [(n, space[n]) for n in self.names if n in space]

    def now(self) -> Iterator[Any]:
        """The value of each name, in order, and the same object for each that is not there."""
        return map(self.owner.values().get, self.names, repeat(MISSING))
