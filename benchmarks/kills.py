"""Does a rank that is killed at any moment end the others, with an error that says so, and how soon?

Four processes train, in steps that clip and save a checkpoint now and then; one of them is killed at a random moment.
The others must raise `RankError`, within the timeout, wherever they are. They stay alive behind it: none may depend on
another's exit. Where checkpoints are saved, every other one in the background, the last one must load on one device.

    python -m benchmarks.kills --count 100
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

RANKS = 4
TIMEOUT = 60.0
"""Seconds that ranks wait for others."""
STARTED = 300.0
"""Seconds until all ranks train."""

KINDS = ("plain", "replicas", "pipeline", "checkpoints")
"""Parameters split over all ranks; over pairs, which reduce gradients; two stages; a checkpoint in every step."""


class Net(nn.Module):
    """Numbered blocks, for stages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss alone."""
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return {"loss": ((x - y) ** 2).mean()}


@dataclass(frozen=True)
class Kill:
    """What came of one kill.

    Attributes:
        kind: of training.
        rank: that was killed.
        seconds: from the kill to each survivor's error; None: it raised none.
        errors: of the survivors.
        lost: what is wrong with the last checkpoint; empty: nothing, or there are none.
    """

    kind: str
    rank: int
    seconds: tuple[float | None, ...]
    errors: tuple[str, ...]
    lost: str = ""

    @property
    def hangs(self) -> int:
        """Survivors that did not end."""
        return sum(s is None for s in self.seconds)

    @property
    def raw(self) -> tuple[str, ...]:
        """Errors other than `RankError`."""
        return tuple(e for e in self.errors if not e.startswith("RankError: "))

    @property
    def naming(self) -> int:
        """Errors that name the rank that was killed."""
        return sum(f"rank {self.rank} died" in e for e in self.errors)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """That of a step."""
    g = torch.Generator().manual_seed(step)
    return {k: torch.randn(8, 16, generator=g) for k in ("x", "y")}


def train(rank: int, kind: str, folder: str, pipe: Connection) -> None:
    """Train until an error comes, and say which; then wait to be ended."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS)
    store = dist.FileStore(str(Path(folder) / "store"), RANKS)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, store=store, timeout=timedelta(seconds=TIMEOUT))
    error = None
    try:
        _train(kind, folder, pipe)
    except BaseException as e:
        error = e
    now = time.time()
    pipe.send((f"{type(error).__name__}: {error}", now))
    pipe.poll(None)


def _train(kind: str, folder: str, pipe: Connection) -> None:
    from torch.distributed import init_device_mesh

    import autopar.checkpoint
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    searches = {
        "pipeline": Search(roles={"b": "data"}, pins={"stages": 2, "microbatches": 4}),
        "replicas": Search(roles={"a": "data", "b": "shard"}),
    }
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    search = searches.get(kind, Search(recipe="fsdp"))
    model: Any = parallelize(Net(), mesh, batch_of(0), search=search, timeout=TIMEOUT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(10**6):
        model(**batch_of(step))["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if kind == "checkpoints":
            autopar.checkpoint.save(f"{folder}/run", model, optimizer, step=step, wait=step % 2 == 0)
        if step == 1:
            pipe.send("trains")


def kill(kind: str, seed: int) -> Kill:
    """Start the ranks, kill one at a random moment, and see what the others do."""
    chance = random.Random(seed)
    victim = chance.randrange(RANKS)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["autopar.checkpoint", "autopar.parallelize", "torch._functorch.aot_autograd"])
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=train, args=(rank, kind, folder, theirs), daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            for rank, pipe in enumerate(pipes):
                said = pipe.recv() if pipe.poll(STARTED) else "does not train"
                if said != "trains":
                    raise RuntimeError(f"{kind}, rank {rank}: {said}")
            time.sleep(chance.uniform(0, 1.5))
            pid = processes[victim].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            found = _outcome(kind, victim, time.time(), pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return replace(found, lost=_lost(f"{folder}/run")) if kind == "checkpoints" else found


def _lost(folder: str) -> str:
    """What is wrong with the last checkpoint."""
    import autopar.checkpoint
    from autopar.parallelize import parallelize

    model: Any = parallelize(Net(), None, batch_of(0))
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        found = autopar.checkpoint.load(folder, model, optimizer)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    steps = {int(values["step"]) for values in optimizer.state.values()}
    return "" if steps == {found.step + 1} else f"step {found.step}, and its optimizer has done {steps}"


def _outcome(kind: str, victim: int, start: float, pipes: Sequence[Connection]) -> Kill:
    waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank != victim}
    seconds: dict[int, float | None] = dict.fromkeys(waiting.values())
    errors: dict[int, str] = {}
    while waiting and time.time() < start + TIMEOUT + 30:
        for pipe in multiprocessing.connection.wait(list(waiting), 1.0):
            rank = waiting.pop(pipe)  # type: ignore[arg-type]
            try:
                errors[rank], when = pipe.recv()  # type: ignore[union-attr]
                seconds[rank] = max(0.0, when - start)
            except EOFError:
                errors[rank], seconds[rank] = "the process died", time.time() - start
    return Kill(kind, victim, tuple(seconds.values()), tuple(errors.values()))


def table(kills: Sequence[Kill]) -> str:
    """A row a kind of training."""
    rows = ["| training | kills | survivors that hang | raw errors | name the rank | checkpoints lost | "
            "seconds: median, 95%, most |", "| --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for kind in dict.fromkeys(k.kind for k in kills):
        own = [k for k in kills if k.kind == kind]
        taken = sorted(s for k in own for s in k.seconds if s is not None)
        survivors = len(own) * (RANKS - 1)
        late = f"{statistics.median(taken):.2f}, {taken[int(0.95 * (len(taken) - 1))]:.2f}, {taken[-1]:.2f}"
        rows.append(
            f"| {kind} | {len(own)} | {sum(k.hangs for k in own)} | {sum(len(k.raw) for k in own)} | "
            f"{sum(k.naming for k in own)} of {survivors} | {sum(bool(k.lost) for k in own)} | {late} |"
        )
    return "\n".join(rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="kills, of all kinds of training together")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kills = []
    for i in range(options.count):
        found = kill(options.kinds[i % len(options.kinds)], options.seed + i)
        kills.append(found)
        print(i, found.kind, found.rank, [None if s is None else round(s, 2) for s in found.seconds], flush=True)
        if found.lost:
            print("  lost:", found.lost[:500], flush=True)
        for error in found.raw:
            print("  raw:", error[:500], flush=True)
        if found.naming < len(found.errors):
            print("  unnamed:", [e[:300] for e in found.errors if f"rank {found.rank} died" not in e], flush=True)
        if (i + 1) % 10 == 0:
            print(table(kills), flush=True)
    print(table(kills))


if __name__ == "__main__":
    main()
