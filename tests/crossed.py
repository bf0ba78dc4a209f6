"""Cases of several parameters at once: in quick tests every value of each comes up, in deep ones every pair; seeds."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
from hypothesis import settings


def crossed(*values: Iterable[Any]) -> list[Any]:
    """All combinations of the values, for ``parametrize``; quick are those on the diagonal, shorter lists repeated."""
    lists = [list(v) for v in values]
    quick = {tuple(i % len(v) for v in lists) for i in range(max(map(len, lists)))}
    return [
        pytest.param(*(v[i] for v, i in zip(lists, at, strict=True)), marks=() if at in quick else pytest.mark.deep)
        for at in product(*(range(len(v)) for v in lists))
    ]


def is_deep() -> bool:
    """Whether this is a deep run."""
    return settings().max_examples > 1000


def seeds(count: int, quick: int = 1) -> range:
    """Seeds of random plans of one program: few in the quick tests, whose plans are of many programs."""
    return range(count if is_deep() else quick)
