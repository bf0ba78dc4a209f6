"""Four processes with Gloo that run functions of the test modules: started once, used by many tests."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh, init_device_mesh

from tests.garbage import collect_now_and_then, freeze
from tests.rounds import search_thoroughly, searches_thoroughly

WAIT = 60
"""Seconds that a rank waits for the others: many times what a fast machine needs."""

JOB = 1200
"""Seconds that a job may take on all ranks."""


CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
"""Signals of memory that is broken."""


PRELOADED = [
    "autopar.checkpoint",  # the package itself imports next to nothing
    "autopar.parallelize",
    "autopar.verify",
    "pytest",
    "tests.distributed.models",
    "torch._functorch.aot_autograd",  # and the next: what a capture and a cut import when they come first
    "torch._functorch.partitioners",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "tests.frozen",
]
"""What a rank would import sooner or later; the last one is done with all of it."""


class RanksError(Exception):
    """A job failed on some rank, or did not end in time."""


class Ranks:
    """A pool of ranks; a job that fails or hangs takes the pool down."""

    def __init__(self, count: int = 4) -> None:
        self.count = count
        self.start()

    def start(self) -> None:
        count = self.count
        self.folder = tempfile.TemporaryDirectory()
        store = str(Path(self.folder.name) / "store")
        context = multiprocessing.get_context("forkserver")
        # Imported once, not by every rank.
        context.set_forkserver_preload(PRELOADED)
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, count, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(
        self, work: Callable[..., Any], *args: Any, timeout: float = JOB, silent: tuple[int, ...] = ()
    ) -> list[Any]:
        """``work(rank, *args)`` on every rank; what each returned, None for the ``silent``, which may die.

        Gloo's own thread crashes a process once in thousands of jobs, under load (seen in its event loop's malloc). A
        job of which a process ends so is run once more in a new pool; if one does so again, it fails.
        """
        try:
            return self._run(work, args, timeout, silent)
        except RanksError as e:
            crashed = [r for r, p in enumerate(self.processes) if -(p.exitcode or 0) in CRASHES]
            if not crashed:
                raise
            warnings.warn(f"crash of ranks {crashed}, run once more: {e}", stacklevel=2)
            self.start()
            return self._run(work, args, timeout, silent)

    def _run(
        self, work: Callable[..., Any], args: tuple[Any, ...], timeout: float, silent: tuple[int, ...]
    ) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((searches_thoroughly(), work, args))
        deadline = time.monotonic() + timeout
        results: list[Any] = [None] * len(self.pipes)
        errors: dict[int, str] = {}
        waiting = {r: p for r, p in enumerate(self.pipes) if r not in silent}
        while waiting and time.monotonic() < deadline:
            for pipe in multiprocessing.connection.wait(list(waiting.values()), max(0, deadline - time.monotonic())):
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                del waiting[rank]
                try:
                    error, results[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    error = "the process died"
                if error:
                    errors[rank] = error
        if waiting or errors:
            self.close()
            late = f"ranks {sorted(waiting)} did not end within {timeout} s\n" if waiting else ""
            raise RanksError(late + "\n".join(f"rank {r}: {e}" for r, e in sorted(errors.items())))
        return results

    @property
    def alive(self) -> bool:
        return all(p.is_alive() for p in self.processes)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.folder.cleanup()


def _serve(rank: int, count: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    os.environ["LOCAL_WORLD_SIZE"] = str(count)
    dist.init_process_group("gloo", rank=rank, world_size=count, store=dist.FileStore(store, count))
    freeze()
    while True:
        try:
            thoroughly, work, args = pipe.recv()
        except EOFError:
            return
        search_thoroughly(thoroughly)
        try:
            pipe.send(("", work(rank, *args)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))
        del work, args
        collect_now_and_then()


_MESHES: dict[tuple[int, ...], DeviceMesh] = {}


def mesh_of(*sizes: int) -> DeviceMesh:
    """A mesh with axes ``a``, ``b``, ...; in a worker."""
    if sizes not in _MESHES:
        _MESHES[sizes] = init_device_mesh("cpu", sizes, mesh_dim_names=tuple("abcd"[: len(sizes)]))
    return _MESHES[sizes]
