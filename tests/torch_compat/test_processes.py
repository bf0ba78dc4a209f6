"""Contracts: process groups, their names and waits."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar import _torch_compat as compat


def test_group_timeout(fake_group: object) -> None:
    assert callable(compat.set_group_timeout)


def test_names_of_groups_that_only_their_ranks_make(fake_group: object) -> None:
    """Why processes that have made other numbers of groups would wait for each other under different names."""
    made = compat.number_of_groups()
    first, second = (dist.new_group([0], backend="fake", use_local_synchronization=True) for _ in range(2))
    assert compat.number_of_groups() == made + 2 and first.group_name != second.group_name
    name = hashlib.sha1(f"0_{made}".encode(), usedforsecurity=False).hexdigest()
    assert first.group_name == name


def _wait_in_vain(rank: int, store: str, ended: Any) -> None:
    """Wait for a message that nobody sends, in two ways, until another thread ends the wait."""
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(store, 2))
    group = dist.group.WORLD
    dist.barrier()
    if rank == 0:
        threading.Timer(0.5, compat.interrupt_gloo, (group,)).start()
        with pytest.raises(RuntimeError):
            dist.recv(torch.empty(1), src=1)
        with pytest.raises(RuntimeError):  # and none is waited for again
            dist.all_reduce(torch.ones(1))
        ended.put(True)
    else:
        ended.get(timeout=60)


@pytest.mark.slow
@pytest.mark.distributed
def test_waits_of_gloo_end(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ended, one = context.Queue(), str(tmp_path / "store")
    processes = [context.Process(target=_wait_in_vain, args=(r, one, ended), daemon=True) for r in range(2)]
    for process in processes:
        process.start()
    try:
        processes[1].join(120)
        assert processes[1].exitcode == 0
    finally:
        for process in processes:
            process.kill()


def test_what_is_put_around_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of DTensors and of checkpoints go through these names, which torch looks up when it calls them."""
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.checkpoint.utils import _DistWrapper

    own = ("gather_object", "scatter_object", "broadcast_object", "all_gather_object", "barrier")
    for owner, name in [(functional, "wait_tensor"), *((_DistWrapper, name) for name in own)]:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, getattr(original, "__wrapped__", original))
    entered: list[str] = []

    @contextlib.contextmanager
    def around(what: str) -> Generator[None]:
        entered.append(what)
        yield

    for _ in range(2):
        compat.put_around_collectives(around)
    waited = functional.AsyncCollectiveTensor(torch.ones(2)) + 1
    assert float(waited.sum()) == 4 and entered == ["an operator of DTensors"]
    alone = _DistWrapper(None, False, 0)
    assert alone.all_reduce("a step", lambda: 2, sum) == 2
    assert entered[1:] == ["torch.distributed.checkpoint"] * 2
