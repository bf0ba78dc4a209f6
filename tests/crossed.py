"""Cases of several parameters at once: in the quick tests every value of each comes up, in deep ones every pair."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def crossed(*values: Iterable[Any]) -> list[Any]:
    """All combinations of the values, for ``parametrize``; quick are those on the diagonal, shorter lists repeated."""
    lists = [list(v) for v in values]
    quick = {tuple(i % len(v) for v in lists) for i in range(max(map(len, lists)))}
    return [
        pytest.param(*(v[i] for v, i in zip(lists, at, strict=True)), marks=() if at in quick else pytest.mark.deep)
        for at in product(*(range(len(v)) for v in lists))
    ]
