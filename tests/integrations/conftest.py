"""Pools of four and of two ranks, and the process as a launcher leaves it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from tests.distributed.launch import Ranks


@contextlib.contextmanager
def launched(rank: int, count: int) -> Iterator[None]:
    """What torchrun sets, for libraries that look for it; what accelerate remembers of it is forgotten after."""
    from accelerate.state import AcceleratorState, GradientState

    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    before = dict(os.environ)
    if count > 1:
        os.environ.update({name: str(value) for name, value in names.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Ranks]]:
    found: dict[int, Ranks] = {}
    yield found
    for pool in found.values():
        pool.close()


def ranks_of(pools: dict[int, Ranks], count: int) -> Ranks:
    if count not in pools or not pools[count].alive:
        pools[count] = Ranks(count)
    return pools[count]


@pytest.fixture
def four(pools: dict[int, Ranks]) -> Ranks:
    return ranks_of(pools, 4)


@pytest.fixture
def two(pools: dict[int, Ranks]) -> Ranks:
    return ranks_of(pools, 2)
