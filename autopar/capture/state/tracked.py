"""`Tracked`: a number that remembers what is computed with it, so that a counter need not be known to be counted.

A model that says ``self.calls += 1`` reads and writes a number on which nothing else depends. While it is traced, the
number is a `Tracked` one: arithmetic with plain numbers is noted, to be replayed on the live attribute after every
call. Everything else (a comparison, an index, a tensor's operand) needs the value: it is given, and the number counts
as read, so that the graph holds for this value alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

# Why this is not `autopar.ir.signature.floats.Float`, which records numbers too: a `Float` is an input of the graph. It
# computes with tensors, and each question about it becomes a guard that other values can pass. A `Tracked` number never
# enters the graph: its arithmetic is replayed in Python, so that an int stays an int, and one question makes it a
# constant. One class for both would need either half of its methods twice.
Number = int | float
Operation = tuple[Callable[[Any, Any], Any], Number, bool]
"""A binary operator, the other number, and whether that comes first."""


class Tracked:
    """A plain number in disguise; `isinstance` says what the number is."""

    def __init__(self, value: Number, operations: tuple[Operation, ...] = (), reads: list[str] | None = None) -> None:
        """``reads``: shared by all numbers made from this one; gets an entry for every use of a value."""
        self._tracked = (value, operations, [] if reads is None else reads)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """That of the number."""
        return type(self._tracked[0])

    def __getattr__(self, name: str) -> Any:
        """Methods of the number read it."""
        return getattr(_read(self, name), name)

    def __hash__(self) -> int:
        """Of the number."""
        return hash(_read(self, "hash"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is the plain number."""
        return type(self._tracked[0]), (_read(self, "copy"),)


def is_tracked(value: Any) -> bool:
    """Whether a value is a tracked number, which `isinstance` does not tell."""
    return type(value) is Tracked


def plain(value: Any) -> Any:
    """The number of a tracked one, which counts as read; any other value as it is."""
    return _read(value, "operand") if is_tracked(value) else value


def value_of(value: Any) -> Any:
    """The number of a tracked one, which does not count as read; any other value as it is."""
    return value._tracked[0] if is_tracked(value) else value


def operations_of(value: Tracked) -> tuple[Operation, ...] | None:
    """What was computed; None: the value was read somewhere."""
    _, operations, reads = value._tracked
    return None if reads else operations


def computed_from(value: Tracked, origin: Tracked | None) -> bool:
    """Whether a number was computed from another one, or is it."""
    return origin is not None and value._tracked[2] is origin._tracked[2]


def replayed(value: Number, operations: tuple[Operation, ...]) -> Number:
    """The same computation on another number."""
    for function, other, first in operations:
        value = function(other, value) if first else function(value, other)
    return value


def _read(value: Tracked, how: str) -> Number:
    value._tracked[2].append(how)
    return value._tracked[0]


def _arithmetic(function: Callable[[Any, Any], Any], first: bool) -> Callable[[Tracked, Any], Any]:
    def method(self: Tracked, other: Any) -> Any:
        number, operations, reads = self._tracked
        if type(other) in (int, float):
            # Computed at once, too: whoever reads the result needs it.
            made = function(other, number) if first else function(number, other)
            return Tracked(made, (*operations, (function, other, first)), reads)
        a, b = _read(self, function.__name__), plain(other)
        return function(b, a) if first else function(a, b)

    return method


def _reversed(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def method(a: Any, b: Any) -> Any:
        return function(b, a)

    return method


def _reading(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Tracked, *others: Any) -> Any:
        return function(_read(self, function.__name__), *map(plain, others))

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv"):
    setattr(Tracked, f"__{_name}__", _arithmetic(getattr(operator, _name), False))
    setattr(Tracked, f"__r{_name}__", _arithmetic(getattr(operator, _name), True))
for _name in ("mod", "pow", "lt", "le", "gt", "ge", "eq", "ne", "and_", "or_", "xor", "lshift", "rshift"):
    setattr(Tracked, f"__{_name.rstrip('_')}__", _reading(getattr(operator, _name)))
for _name in ("mod", "pow", "and_", "or_", "xor", "lshift", "rshift"):
    setattr(Tracked, f"__r{_name.rstrip('_')}__", _reading(_reversed(getattr(operator, _name))))
for _name in ("neg", "pos", "abs", "invert", "index"):
    setattr(Tracked, f"__{_name}__", _reading(getattr(operator, _name)))
for _function in (bool, int, float, complex, str, repr, format, round, divmod):
    setattr(Tracked, f"__{_function.__name__}__", _reading(_function))
