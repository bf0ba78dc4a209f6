"""`remembered`: functions of operators and their types, of which results are kept for as long as a search asks."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_KNOWN: list[Any] = []


def remembered(most: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """As `functools.lru_cache`, until `forget` is called.

    Args:
        most: results that are kept.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        found = lru_cache(maxsize=most)(function)
        _KNOWN.append(found)
        return found  # type: ignore[return-value]  # all arguments are hashable

    return decorate


def forget() -> None:
    """Forget all results: of operators of graphs that are built, and perhaps gone."""
    for found in _KNOWN:
        found.cache_clear()
