"""Sizes among the arguments of a call, on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.ir.layout import Layout, open_shape
from autopar.rules.rule import entries
from autopar.sharding.candidates import letter_parts
from autopar.sharding.dims import Operator

Arguments = tuple[list[Any], dict[str, Any]]


def localized(
    operator: Operator,
    strategy: Sequence[str],
    made: Layout | None,
    sizes: Sequence[int],
    call: tuple[Sequence[Any], Mapping[str, Any]],
) -> Arguments:
    """A call's arguments where those that are sizes are local; numbers that are not sizes stay global.

    Args:
        operator: the bound operator.
        strategy: a name for each axis.
        made: layout of output 0.
        sizes: of the mesh axes.
        call: positional and keyword arguments.
    """
    args, kwargs = list(call[0]), dict(call[1])
    for position in operator.rule.shapes:
        type_ = operator.outputs[0]
        assert type_ is not None and made is not None
        args[position] = open_shape(type_, made, sizes)
    for key, letters in operator.rule.scaled.items():
        # A default that was left out stays so.
        if isinstance(key, int) and key < len(args):
            args[key] = entries(args[key], letters, lambda n, c: _divide(n, letter_parts(strategy, c, sizes)))
        elif str(key) in kwargs:
            kwargs[str(key)] = entries(
                kwargs[str(key)], letters, lambda n, c: _divide(n, letter_parts(strategy, c, sizes))
            )
    return args, kwargs


def _divide(value: Any, parts: int) -> Any:
    if parts == 1:
        return value
    assert isinstance(value, int)
    # Candidates divide every factor of a letter, and so its counts.
    assert value % parts == 0
    return value // parts
