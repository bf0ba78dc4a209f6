"""A rank of an elastic worker: a script for a process that may be killed."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autopar
from tests.module.low_communication.elastic_lives import batch, kill_at, live, made, optimized, wait_until


def main(told: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rank, worker, folder = told["rank"], told["worker"], Path(told["folder"])
    mesh = None
    if told["size"] > 1:
        store = dist.FileStore(told["meeting"], told["size"])
        dist.init_process_group("gloo", rank=rank, world_size=told["size"], store=store)
        mesh = dist.init_device_mesh("cpu", (told["size"],), mesh_dim_names=("gpu",))
    search = autopar.Search(**told["search"])
    model = autopar.parallelize(made(told["seed"]), mesh, (batch(0, 0),), search=search, timeout=60)
    optimizer, scheduler = optimized(model)
    local = autopar.ElasticWorkers(
        model, optimizer, worker=worker, workers=told["workers"], store=told["store"], every=3, grace=told["grace"],
        timeout=20, quorum_timeout=120, weighted=True, scheduler=scheduler,
    )  # fmt: skip
    said = 0

    def log(**facts: Any) -> None:
        nonlocal said
        said += 1
        name = folder / f"said-{told['life']}-{rank}-{said}"
        torch.save({"worker": worker, **facts}, f"{name}.part")
        os.replace(f"{name}.part", f"{name}.pt")

    def die() -> None:
        time.sleep(told.get("first", 0))  # what was written has arrived
        os.kill(os.getpid(), signal.SIGKILL)

    if local.join():
        scheduler.step()
    if told.get("kill") and rank in told["dies"]:
        kill_at(local, *told["kill"], die)

    def before(round_: int) -> None:
        for seat, awaited in told.get("waits", {}).items():
            if round_ == awaited:
                wait_until(lambda: any(s.number == int(seat) for s in local._meetings._present()), "newcomer")  # noqa: B023

    live(local, model, scheduler, worker, told.get("leaves", told["total"]), log, before)
    local.leave()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
