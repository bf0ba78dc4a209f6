"""Time collectives over sizes, on every level of links that the processes at hand span."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autopar.calibrate.kernels import Tick
from autopar.calibrate.sample import Sample
from autopar.collective import c10d
from autopar.cost.collectives import COLLECTIVES
from autopar.errors import RankError

SIZES = tuple(4**i for i in range(5, 14))
"""Bytes: from a kilobyte, where latency decides, to 64 MiB, where bandwidth does."""

LONG = 2.0
"""Seconds of one call after which larger sizes are left out: they would say the same."""

RUNS = 5
"""Of each collective; the median counts."""

KINDS = tuple(COLLECTIVES)


def measure_collectives(
    device: torch.device, *, sizes: Sequence[int] = SIZES, runs: int = RUNS, tick: Tick | None = None
) -> list[Sample]:
    """Time every collective of the initialised process group, which every rank calls with the same arguments.

    Processes of one node (``LOCAL_WORLD_SIZE``, as torchrun sets it) form groups of level 0; if there are several
    nodes, the processes with the same place in each form groups of level 1, all of which communicate at once.

    Args:
        device: of this rank's tensors.
        sizes: bytes.
        runs: of each collective.
        tick: called with ``(done, total, name)``.

    Returns:
        The same samples on every rank: seconds of the slowest.

    Raises:
        RankError: the processes are not as many on each node.
    """
    world = dist.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world % local:
        raise RankError(f"{world} processes are not {local} on each node; start the same number on every node")
    mesh = init_device_mesh(device.type, (world // local, local), mesh_dim_names=("node", "device"))
    found: list[Sample] = []
    levels = [(level, axis) for level, axis in enumerate(("device", "node")) if mesh.size(1 - level) > 1]
    for level, axis in levels:
        members, group = mesh.size(1 - level), mesh.get_group(axis)
        for kind in KINDS:
            for size in sizes:
                count = max(1, size // 4 // members) * members
                run = _collective(kind, count, members, device, group)
                found.append(Sample(kind, "float32", (4 * count, members), _seconds(run, runs, device), level))
                if tick is not None:
                    tick(len(found), len(levels) * len(KINDS) * len(sizes), str(found[-1]))
                if found[-1].seconds > LONG:  # of the slowest rank, the same on all
                    break
    return found


def _collective(kind: str, count: int, members: int, device: torch.device, group: Any) -> Callable[[], object]:
    """A call of a collective on ``count`` float32 elements, counted as `autopar.cost.collectives` does.

    The functional ones that rewritten graphs have: their results are new tensors, which takes time as well.
    """
    whole = torch.ones(count, device=device)
    part = torch.ones(count // members, device=device)
    parts = [count // members] * members
    name = group.group_name
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "all_gather": lambda: c10d.all_gather_into_tensor(part, members, name),
        "reduce_scatter": lambda: c10d.reduce_scatter_tensor(whole, "sum", members, name),
        "all_reduce": lambda: c10d.all_reduce(whole, "max", name),
        "all_to_all": lambda: c10d.all_to_all_single(whole, parts, parts, name),
        "broadcast": lambda: c10d.broadcast(whole, 0, name),
    }
    return lambda: c10d.wait_tensor(calls[kind]())


def _seconds(run: Callable[[], object], runs: int, device: torch.device) -> float:
    """Median of several runs, of the slowest rank; ranks start each together."""
    times = torch.zeros(runs, dtype=torch.float64, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of names that older torch has, and newer torch renames
        return _timed(run, times, device)


def _timed(run: Callable[[], object], times: torch.Tensor, device: torch.device) -> float:
    run()  # the first one sets connections up
    for i in range(len(times)):
        dist.barrier()
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        times[i] = time.perf_counter() - start
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return float(times.median())


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
