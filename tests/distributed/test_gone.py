"""Ranks that end, fail, are late or are killed while others wait: these end with an error that says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.kills import KINDS, TIMEOUT, kill, table
from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import mlp, mlp_batch, slow_devices

pytestmark = pytest.mark.distributed

ODD = 1


def trained(timeout: float = WAIT) -> Any:
    """A module behind its first step, on all ranks."""
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    search = Search(recipe="fsdp")
    mesh = mesh_of(torch.distributed.get_world_size())
    model = parallelize(mlp(), mesh, mlp_batch(0), search=search, cluster=slow_devices(), timeout=timeout)
    model(**mlp_batch(0))["loss"].backward()
    return model


def error_of(work: Callable[[], Any]) -> tuple[str, float]:
    """What an action raises, and the seconds until then."""
    start = time.monotonic()
    try:
        work()
    except Exception as e:
        return f"{type(e).__name__}: {e}", time.monotonic() - start
    return "nothing", time.monotonic() - start


class Held:
    """Between jobs of a rank."""

    model: Any = None


def prepare(rank: int, timeout: float) -> None:
    Held.model = trained(timeout)


def step(rank: int) -> tuple[str, float]:
    return error_of(lambda: Held.model(**mlp_batch(1))["loss"].backward())


def test_a_process_that_has_ended(two_ranks: Ranks) -> None:
    two_ranks.run(prepare, WAIT)
    two_ranks.pipes[ODD].close()  # its loop ends, and so does its process
    two_ranks.pipes.pop(ODD)
    for error, seconds in two_ranks.run(step):
        assert error.startswith("RankError: no answer from every rank about forward of call 2 of Mlp"), error
        assert "the process of rank 1 (" in error and "has ended" in error, error
        assert seconds < WAIT / 2
    two_ranks.close()


def fail(rank: int, pass_: str, everywhere: bool) -> list[tuple[str, float]]:
    """Errors of a step in which one rank fails, and of the next."""
    model = trained()
    session = model._autopar
    cut, compiler = session.latest.step.cut, session.options.compiler
    graph = cut.forward if pass_ == "forward" else cut.backward
    original = compiler.executable(graph, ())

    def failing(*args: Any) -> Any:
        if rank == ODD or everywhere:
            compiler._graphs[graph] = original
            raise ValueError("bad luck")
        return original(*args)

    compiler._graphs[graph] = failing
    return [error_of(lambda i=i: model(**mlp_batch(i))["loss"].backward()) for i in (1, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("pass_", ["backward", pytest.param("forward", marks=pytest.mark.deep)])
def test_a_rank_that_fails_in_a_step(two_ranks: Ranks, pass_: str) -> None:
    for rank, ((error, seconds), (later, _)) in enumerate(two_ranks.run(fail, pass_, False)):
        if rank == ODD:
            assert error == "ValueError: bad luck"
        else:
            assert f"rank 1 failed at {pass_} of call 2 of Mlp" in error and "ValueError: bad luck" in error, error
        assert seconds < WAIT / 2
        assert later.startswith("RankError: "), later
    two_ranks.close()  # its groups are broken


def test_where_all_fail_alike_they_go_on(two_ranks: Ranks) -> None:
    for (error, _), (later, _) in two_ranks.run(fail, "forward", True):
        assert error == "ValueError: bad luck" and later == "nothing"


def late(rank: int) -> tuple[str, float]:
    model = trained(timeout=4)
    torch.distributed.barrier()
    if rank == ODD:
        time.sleep(9)
    return error_of(lambda: model(**mlp_batch(1)))


@pytest.mark.deep
def test_a_rank_that_is_late(two_ranks: Ranks) -> None:
    for rank, (error, seconds) in enumerate(two_ranks.run(late)):
        assert error.startswith("RankError: no answer from every rank about forward of call 2 of Mlp"), error
        assert rank == ODD or "rank 1 is elsewhere, after backward of call 1 of Mlp" in error, error
        assert seconds < 4 + 8
    two_ranks.close()


@pytest.mark.parametrize("kind", [k if k == "pipeline" else pytest.param(k, marks=pytest.mark.deep) for k in KINDS])
def test_kills(kind: str, seed: int = 0) -> None:
    found = kill(kind, seed + KINDS.index(kind))
    assert not found.hangs and not found.raw, found
    assert all(s is not None and s < TIMEOUT for s in found.seconds)
    assert found.naming == len(found.errors), found.errors


@pytest.mark.deep
def test_many_kills() -> None:
    found = [kill(KINDS[i % len(KINDS)], 100 + i) for i in range(100)]
    print(table(found))
    assert not sum(k.hangs for k in found) and not [e for k in found for e in k.raw]
