"""Pools of ranks for all tests here: of four, and of two where these show the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.launch import Ranks

Pools = dict[int, Ranks]


@pytest.fixture(scope="session")
def _pools() -> Iterator[Pools]:
    pools: Pools = {}
    yield pools
    for ranks in pools.values():
        ranks.close()


def _living(pools: Pools, count: int) -> Ranks:
    """A test that broke its pool leaves the next one a new pool."""
    if count not in pools or not pools[count].alive:
        pools[count] = Ranks(count)
    return pools[count]


@pytest.fixture
def ranks(_pools: Pools) -> Ranks:
    """Four, for a mesh of several axes."""
    return _living(_pools, 4)


@pytest.fixture
def two_ranks(_pools: Pools) -> Ranks:
    """Half the processes, for one axis; and for what breaks them, so that the four live on."""
    return _living(_pools, 2)
