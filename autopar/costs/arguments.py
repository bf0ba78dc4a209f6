"""`require`: arguments of public functions, each against what it may be. Errors are of one form, before any work.

A kind is a function from a value to what was expected of it, or None where the value is fine. A function says what its
arguments are in one table::

    require(axes=(axes, AXES), timeout=(timeout, number(0, above=True)), plan=(plan, optional(a(Plan, "a Plan"))))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autopar.costs.device import check_name
from autopar.costs.device import shown as shown
from autopar.costs.memory import OPTIMIZERS, parse_bytes

Kind = Callable[[Any], str | None]
"""From a value to what is expected instead, as a remedy; None: nothing is wrong."""

MOST_DEVICES = 2**31


def require(**arguments: tuple[Any, Kind]) -> None:
    """Refuse the first argument that is not what it may be.

    Args:
        arguments: by name, each with its kind.

    Raises:
        ValueError: names the argument, its value, and what is expected.
    """
    for name, (value, kind) in arguments.items():
        if (expected := kind(value)) is not None:
            raise ValueError(f"{name}={shown(value)}: expected {expected}")


def a(kind: type | tuple[type, ...], words: str) -> Kind:
    """An instance of a class."""
    return lambda value: None if isinstance(value, kind) else words


def optional(kind: Kind) -> Kind:
    """A value of a kind, or None."""

    def expected(value: Any) -> str | None:
        wanted = None if value is None else kind(value)
        return None if wanted is None else f"{wanted}, or None"

    return expected


def whole(least: int, most: int = 2**63 - 1) -> Kind:
    """A whole number in a range; True and False are none."""

    def expected(value: Any) -> str | None:
        fine = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        return None if fine else f"a whole number from {least} to {most}"

    return expected


def number(least: float, *, above: bool = False, infinite: bool = False) -> Kind:
    """A number from ``least`` on, or above it, that is finite unless ``infinite``."""

    def expected(value: Any) -> str | None:
        fine = isinstance(value, int | float) and not isinstance(value, bool) and value >= least
        if fine and (value > least or not above) and (infinite or value < math.inf):
            return None
        return f"a number {'above' if above else 'of at least'} {least:g}" + ("" if infinite else ", not infinite")

    return expected


def one_of(*words: Any) -> Kind:
    """One of several texts."""
    return lambda value: None if isinstance(value, str) and value in words else f"one of {', '.join(map(repr, words))}"


def _size(value: Any) -> str | None:
    try:
        size = parse_bytes(value)
    except ValueError as e:
        return f"a size in bytes such as '70GiB' ({e})"
    return None if size > 0 else "more than 0 bytes, such as '70GiB'"


def _axes(value: Any) -> str | None:
    example = "the size of each mesh axis by its name, such as {'node': 32, 'gpu': 8}"
    if not isinstance(value, Mapping):
        return example  # without any it is one device
    for name, size in value.items():
        try:
            check_name(name)
        except ValueError:
            return f"{example}: {shown(name)} is no name"
        if whole(1)(size) is not None:
            return f"{example}: the size of {name!r} must be a whole number of at least 1"
    if math.prod(value.values()) >= MOST_DEVICES:
        return f"{example}: fewer than {MOST_DEVICES} devices"
    return None


def _path(value: Any) -> str | None:
    # No numbers, though Python takes them: for files that are open already.
    fine = isinstance(value, Path) or (isinstance(value, str) and value and "\0" not in value)
    return None if fine else "a path, as text or a pathlib.Path"


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "True or False"


def _function(value: Any) -> str | None:
    return None if callable(value) else "a function"


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) and value else "text that is not empty"


def _loss(value: Any) -> str | None:
    fine = callable(value) or (isinstance(value, str) and value) or whole(-MOST_DEVICES)(value) is None
    return None if fine else "the name, path or index of an output, or a function that picks it"


SIZE, AXES, PATH, FLAG, FUNCTION, TEXT, LOSS = _size, _axes, _path, _flag, _function, _text, _loss

OPTIMIZER = one_of(*OPTIMIZERS)
