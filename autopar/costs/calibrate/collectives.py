"""Time collectives over sizes, on every level of links that the processes at hand span, and kernels beside them."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.costs.calibrate.kernels import Tick
from autopar.costs.calibrate.sample import BEHIND, BESIDE, Sample
from autopar.costs.collectives import COLLECTIVES
from autopar.errors import RankError

c10d = torch.ops._c10d_functional

SIZES = tuple(4**i for i in range(5, 14))
"""Bytes: from a kilobyte, where latency decides, to 64 MiB, where bandwidth does."""

LONG = 0.5
"""Seconds of one call after which larger sizes are left out, and each call is timed once: more would say the same."""

RUNS = 5
"""Of each collective; the median counts."""

BRIEF, OFTEN = 1 << 16, 5
"""Bytes up to which a collective takes so little that it runs several times as often: what it waits for varies."""

SIDE, PRODUCTS = 256, 64
"""Rows and columns of the products that run beside reductions, and how many are timed to know what one takes."""

HIDDEN = (1 << 20, 1 << 22, 1 << 24)
"""Bytes of reductions beside kernels, of which bandwidth decides."""

SMALL = 1 << 12
"""Bytes of reductions behind kernels, of which bandwidth decides nothing."""

TURNS = 5
"""How often in a row."""

BEFORE = (1e-3, 3e-3, 1e-2, 3e-2)
"""Seconds of the kernels before those, about."""

KINDS = tuple(kind for kind in COLLECTIVES if kind != "send")
"""All but a single message, which says nothing of a link that the others do not."""

CONTENDED = 1 << 20
"""Bytes from which sums of groups are timed that share the cards of a node: what they lose is bandwidth."""


def measure_collectives(
    device: torch.device,
    *,
    groups: Sequence[int] = (),
    sizes: Sequence[int] = SIZES,
    runs: int = RUNS,
    tick: Tick | None = None,
) -> list[Sample]:
    """Time every collective of the initialized process group, which every rank calls with the same arguments.

    Neighbors in a node form groups of level 0. Of several nodes, the processes with the same place in each form groups
    of level 1, all of which communicate at once; and so on for racks of nodes. If a node has four processes or more,
    pairs of neighbors are timed as well, as axes of a mesh that share a node are smaller groups. So are sums of groups
    with two in each of several nodes, which share the node's cards.

    Args:
        device: of this rank's tensors.
        groups: processes in a node, in a rack and so on, as `Cluster.group_sizes`; default: those of a node, by
            ``LOCAL_WORLD_SIZE``, as torchrun sets it.
        sizes: bytes.
        runs: of each collective.
        tick: called with ``(done, total, name)``.

    Returns:
        The same samples on every rank: seconds of the slowest.

    Raises:
        RankError: the processes are not as many in each group.
    """
    world = dist.get_world_size()
    shape = _levels(world, groups or (int(os.environ.get("LOCAL_WORLD_SIZE", world)),))
    names = tuple(f"level {i}" for i in range(len(shape)))
    # A mesh has its outermost axis first; levels are counted from the inside.
    mesh = init_device_mesh(device.type, shape[::-1], mesh_dim_names=names[::-1])
    found: list[Sample] = []
    timed = [(kind, level, 0, mesh.get_group(names[level])) for level in range(len(shape)) if shape[level] > 1
             for kind in KINDS]  # fmt: skip
    half = shape[0] // 2
    if half > 1 and not shape[0] % 2:
        pairs = DeviceMesh(device.type, torch.arange(world).reshape(-1, 2))
        timed = [(kind, 0, 0, pairs.get_group(1)) for kind in KINDS] + timed
    # Groups with two members in each node, so that several of them share a node's cards.
    if math.prod(shape[1:]) > 1 and half > 1 and not shape[0] % 2:
        ranks = torch.arange(world).reshape(-1, half).t().contiguous()
        timed.append(("all_reduce", 1, half, DeviceMesh(device.type, ranks).get_group(1)))
    beside = [(level, group) for kind, level, stride, group in timed if kind == "all_reduce" and not stride]
    total = len(timed) * len(sizes) + len(beside) * len(HIDDEN) + len(beside) * len(BEFORE) * (device.type == "cpu")
    for kind, level, stride, group in timed:
        members = group.size()
        for size in sizes:
            if stride and size < CONTENDED:
                continue
            # Elements of float32, a multiple of the members: each has an equal part.
            count = max(1, size // 4 // members) * members
            times = runs * (OFTEN if size <= BRIEF else 1)
            seconds = _seconds(_collective(kind, count, members, device, group), times, device)
            found.append(Sample(kind, "float32", (4 * count, members), seconds, level, stride))
            if tick is not None:
                tick(len(found), total, str(found[-1]))
            if seconds > LONG:  # of the slowest rank, the same on all
                break
    kernels = _Kernels(device)
    for level, group in beside:
        for size in HIDDEN:
            slower = _beside(size, group, runs, kernels)
            found.append(Sample(BESIDE, "float32", (size, group.size()), slower, level))
        for before in BEFORE if device.type == "cpu" else ():
            found.append(Sample(BEHIND, "float32", (SMALL, group.size()), _behind(before, group, runs, kernels), level))
        if tick is not None:
            tick(min(len(found), total), total, str(found[-1]))
    return found


def _levels(world: int, groups: Sequence[int]) -> tuple[int, ...]:
    """How many members a group of each level has, innermost first."""
    shape, inner = [], 1
    for size in (*groups, world):
        if size % inner or size < inner:
            what = f"{world} processes" if size == world else f"groups of {size}"
            raise RankError(f"{what} are not made of groups of {inner}; start the same number on every node")
        shape.append(size // inner)
        inner = size
    return tuple(shape)


def _collective(
    kind: str, count: int, members: int, device: torch.device, group: Any, wait: bool = True
) -> Callable[[], torch.Tensor]:
    """A call of a collective on ``count`` float32 elements, counted as `autopar.costs.collectives` does.

    The functional ones that rewritten graphs have: their results are new tensors, which takes time as well.
    """
    # Ones: the values make no difference to the time, and maxima of ones stay ones.
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
    return (lambda: c10d.wait_tensor(calls[kind]())) if wait else calls[kind]


class _Kernels:
    """Products that run beside reductions."""

    def __init__(self, device: torch.device) -> None:
        """What one takes is measured, on all ranks at once."""
        self.device = device
        self.factor = torch.randn(SIDE, SIDE, device=device)
        self.run(PRODUCTS)
        self._ready()
        times = torch.tensor(self.timed(PRODUCTS), dtype=torch.float64, device=device)
        dist.all_reduce(times)
        self.each = float(times) / dist.get_world_size() / PRODUCTS  # seconds, the mean of all ranks

    def run(self, count: int) -> None:
        """Launch so many."""
        for _ in range(count):
            self.factor @ self.factor

    def timed(self, count: int) -> float:
        """Seconds until so many are done, whatever else the device has to do."""
        start = time.perf_counter()
        self.run(count)
        if self.device.type != "cpu":
            torch.accelerator.current_stream().synchronize()
        return time.perf_counter() - start

    def _ready(self) -> None:
        dist.barrier()
        _wait(self.device)


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


def _beside(size: int, group: Any, runs: int, kernels: _Kernels) -> float:
    """Seconds by which kernels are longer while a reduction runs, the mean of all ranks; they are longer than it is."""
    device = kernels.device
    reduce = _collective("all_reduce", size // 4, 1, device, group, wait=False)
    seconds = _seconds(lambda: c10d.wait_tensor(reduce()), 1, device)
    runs = 1 if seconds > LONG else runs
    count = max(1, math.ceil(2 * seconds / kernels.each))
    times = torch.zeros(2, dtype=torch.float64, device=device)
    for _ in range(runs):
        for i in range(2):  # beside it and alone, by turns
            dist.barrier()
            _wait(device)
            sent = None if i else reduce()
            times[i] += kernels.timed(count) / runs
            if sent is not None:
                c10d.wait_tensor(sent)
    dist.all_reduce(times)
    # A microsecond is nothing; a ratio of nothing would not be a number.
    return max(float(times[0] - times[1]) / dist.get_world_size(), 1e-6)


def _behind(seconds: float, group: Any, runs: int, kernels: _Kernels) -> float:
    """Seconds by which kernels and then a reduction are longer than the two apart, of the slowest rank: the mean.

    On a CPU alone: a GPU's kernels are not as long as they are told to be to the microsecond, and share no cores.
    """
    reduce = _collective("all_reduce", SMALL // 4, 1, kernels.device, group)
    alone, count = _seconds(reduce, OFTEN * runs, kernels.device), max(1, round(seconds / kernels.each))
    times = torch.zeros(2, dtype=torch.float64)
    for _ in range(runs):
        for i in range(2):  # with reductions and without, by turns: kernels are not always as fast
            dist.barrier()
            start = time.perf_counter()
            for _ in range(TURNS):  # one behind the other: after a barrier all ranks would start alike
                kernels.run(count)
                if not i:
                    reduce()
            times[i] += (time.perf_counter() - start) / TURNS / runs
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return max(float(times[0] - times[1]) - alone, 1e-6)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
