"""One pool of four ranks for all tests here, and two ranks apart for those that break their pool."""

from collections.abc import Iterator

import pytest

from tests.distributed.launch import Ranks


class _Pool:
    ranks: Ranks | None = None


@pytest.fixture(scope="session")
def _pool() -> Iterator[_Pool]:
    pool = _Pool()
    yield pool
    if pool.ranks is not None:
        pool.ranks.close()


@pytest.fixture
def ranks(_pool: _Pool) -> Ranks:
    """A living pool: a test that broke it leaves the next one a new pool."""
    if _pool.ranks is None or not _pool.ranks.alive:
        _pool.ranks = Ranks()
    return _pool.ranks


@pytest.fixture
def two_ranks() -> Iterator[Ranks]:
    """A pool for a test that breaks it: half the processes, and the pool of all others lives on."""
    ranks = Ranks(2)
    yield ranks
    ranks.close()
