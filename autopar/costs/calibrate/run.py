"""Measure everything: in this process, in the process group that there is, or in processes started for it."""

from __future__ import annotations

import os
import queue
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from autopar.costs.calibrate import collectives
from autopar.costs.calibrate.allocator import keep_freed_memory
from autopar.costs.calibrate.fit import fit_alone, fit_contention, fit_device, fit_link, fit_occupies, fit_wait
from autopar.costs.calibrate.kernels import ENOUGH, Kernels, Tick, measure_alone, measure_kernels
from autopar.costs.calibrate.sample import ALONE, BEHIND, BESIDE, LAUNCH, Sample
from autopar.costs.calibrate.several_starts import require_scipy
from autopar.costs.cluster import Cluster
from autopar.costs.collectives import COLLECTIVES
from autopar.costs.known_devices import preset_for
from autopar.errors import RankError


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        dtypes: names of the dtypes of kernels.
        kernels: their sizes; None: those for the device.
        groups: processes of a node, of a rack and so on; empty: of a node, as torchrun says.
        sizes: bytes of collectives.
        runs: of each collective.
        enough: seconds that the runs of each kernel take together, at least.
        threads: intra-op threads of each process.
        timeout: seconds that everything may take.
    """

    dtypes: tuple[str, ...] = ("float32",)
    kernels: Kernels | None = None
    groups: tuple[int, ...] = ()
    sizes: tuple[int, ...] = collectives.SIZES
    runs: int = collectives.RUNS
    enough: float = ENOUGH
    threads: int = 1
    timeout: float = 600.0


def calibrate(
    settings: Settings, *, ranks: int, base: str | None, name: str, tick: Tick | None = None
) -> tuple[Cluster, list[Sample]] | None:
    """Measure what is at hand, and fit a cluster to it.

    Under torchrun every process is a rank, on its own GPU if there are any. Otherwise a GPU is measured alone, and on
    a CPU ``ranks`` processes are started.

    Args:
        settings: what is measured.
        ranks: processes to start.
        base: a preset or a file that gives what is not measured; default: the preset of the device.
        name: of the cluster.
        tick: called with ``(done, total, name)``.

    Returns:
        The cluster and its samples; None on all ranks of torchrun but the first.

    Raises:
        ValueError: scipy is missing, there is no such base, or no preset is of the device and no base is given.
        RankError: a process failed, or the time ran out.
    """
    require_scipy()
    # torchrun sets RANK; a process that was started by hand has none.
    cuda, launched = torch.cuda.is_available(), "RANK" in os.environ
    rank = int(os.environ.get("LOCAL_RANK", 0))
    groups = settings.groups or (int(os.environ.get("LOCAL_WORLD_SIZE", ranks)),)
    device, units = torch.device("cpu"), 1
    if cuda:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        found = torch.cuda.get_device_properties(device)
        units = found.multi_processor_count  # tiles of a product are spread over streaming multiprocessors
        known = Cluster.resolve(base) if base else preset_for(found.name, found.total_memory)
        # A base of another kind gives its costs, and not what lies on its devices.
        kind = "rocm" if torch.version.hip else "cuda"
        own = replace(known.device, name=found.name, memory=float(found.total_memory), kind=kind)
        known = replace(known, device=own)
    else:
        known = Cluster.resolve(base or "cpu")
    # One process alone would have the whole memory bandwidth, which ranks share in training.
    if not launched and not cuda and ranks > 1:
        samples = measure_over_processes(ranks, settings, tick)
        return cluster_of(samples, known, name=name, groups=groups), samples
    torch.set_num_threads(settings.threads)
    if launched:
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=settings.timeout))
    try:
        samples = measure(settings, device, tick)
        first = not launched or dist.get_rank() == 0
    finally:
        if launched:
            dist.destroy_process_group()
    return (cluster_of(samples, known, name=name, groups=groups, units=units), samples) if first else None


def measure(settings: Settings, device: torch.device, tick: Tick | None = None) -> list[Sample]:
    """Kernels, on all ranks of the process group at once if there is one, and then its collectives."""
    dtypes = [getattr(torch, name) for name in settings.dtypes]
    if device.type == "cpu":
        keep_freed_memory()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return measure_kernels(device, dtypes, settings.kernels, enough=settings.enough, tick=tick)

    def together(seconds: float) -> float:
        """The mean over all ranks, which share memory and cores as they do in training."""
        total = torch.tensor(seconds, dtype=torch.float64, device=device)
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    kernels = measure_kernels(device, dtypes, settings.kernels, enough=settings.enough, together=together, tick=tick)
    # Processes share cores, but no GPUs.
    alone = measure_alone(dtypes[0], settings.enough, together) if device.type == "cpu" else []
    return (
        kernels
        + alone
        + collectives.measure_collectives(
            device, groups=settings.groups, sizes=settings.sizes, runs=settings.runs, tick=tick
        )
    )


def measure_over_processes(count: int, settings: Settings, tick: Tick | None = None) -> list[Sample]:
    """Start Gloo processes on this machine, and `measure` in all of them at once.

    Raises:
        RankError: a process failed, or the time ran out.
    """
    processes: Any = torch.multiprocessing  # not annotated
    # Spawned, as `processes.spawn` does it: a queue of another context cannot be passed on.
    messages = processes.get_context("spawn").Queue()
    folder = tempfile.TemporaryDirectory()
    arguments = (count, str(Path(folder.name) / "store"), settings, messages)
    context = processes.spawn(_member, args=arguments, nprocs=count, join=False)
    deadline = time.monotonic() + settings.timeout
    found: list[Sample] | None = None
    try:
        done = False
        while not done or found is None:
            # The result may come before or after the processes have ended: both are waited for.
            done = done or context.join(timeout=0.1)
            try:
                message = messages.get(timeout=0.1)
            except queue.Empty:
                if done and found is None:
                    raise RankError("the processes ended without a result; use fewer --ranks") from None
            else:
                if isinstance(message, list):
                    found = message
                elif tick is not None:
                    tick(*message)
            if time.monotonic() > deadline:
                raise RankError(
                    f"not measured within {settings.timeout:.0f} s; use fewer --ranks or a longer --timeout"
                )
    except ProcessRaisedException as e:
        raise RankError(f"a process failed: {str(e).strip().splitlines()[-1]}") from e
    except ProcessExitedException as e:
        raise RankError(f"a process ended: {e}; is there enough memory?") from e
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
        folder.cleanup()
    return found


def _member(rank: int, count: int, store: str, settings: Settings, messages: Any) -> None:
    torch.set_num_threads(settings.threads)
    os.environ["LOCAL_WORLD_SIZE"] = str(count)
    wait = timedelta(seconds=settings.timeout)
    shared = FileStore(store, count)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=count, timeout=wait)
    try:
        # One rank speaks for all: they measure the same things at the same time.
        tick = (lambda *progress: messages.put(progress)) if rank == 0 else None
        found = measure(settings, torch.device("cpu"), tick)
        if rank == 0:
            messages.put(found)
    finally:
        dist.destroy_process_group()


def cluster_of(
    samples: Sequence[Sample], base: Cluster, *, name: str, groups: Sequence[int], units: int = 1
) -> Cluster:
    """The cluster that was measured.

    Args:
        samples: kernels and collectives.
        base: gives what was not measured: memory, and the links that no collective used.
        name: of the cluster.
        groups: processes of a node, of a rack and so on, where links between them were measured.
        units: see `autopar.costs.calibrate.fit.fit_device`.
    """
    on_links = [s for s in samples if s.kind in COLLECTIVES]
    kernels = [s for s in samples if s.kind not in (*COLLECTIVES, LAUNCH, ALONE, BESIDE, BEHIND)]
    launches = [s.seconds for s in samples if s.kind == LAUNCH]
    alone = [s for s in samples if s.kind == ALONE]
    fitted = fit_device(kernels, name=base.device.name, memory=base.device.memory, units=units)
    reached = base.device.host_bandwidth * base.device.streaming  # fitted figures are what is reached
    device = replace(
        fitted, host=min(launches, default=base.device.host), host_bandwidth=reached, copies=base.device.copies,
        kind=base.device.kind, alone=fit_alone(alone, fitted) if alone else base.device.alone,
    )  # fmt: skip
    links, levels = list(base.links), sorted({s.level for s in on_links})
    for level in levels:
        # Names, algorithms and copies cannot be measured: they come from the base's link of that level.
        known = base.links[min(level, len(base.links) - 1)]
        own = [s for s in on_links if s.level == level and not s.stride]
        link = fit_link(own, name=known.name, launch=device.launch, algorithms=known.algorithms, copies=known.copies)
        beside, behind = ([s for s in samples if s.kind == kind and s.level == level] for kind in (BESIDE, BEHIND))
        occupies = fit_occupies(beside, link, device.launch) if beside else known.occupies
        wait = fit_wait(behind) if behind else known.wait
        links[level : level + 1] = [replace(link, wait=wait, occupies=occupies)]
    if levels in ([], [0]):  # nothing between nodes
        return Cluster(name, device, tuple(links), base.group_sizes)
    found = Cluster(name, device, tuple(links[: levels[-1] + 1]), tuple(groups[: levels[-1]]))
    # Contention comes last: it is what the fitted links leave unexplained.
    contended = [s for s in on_links if s.stride]
    if not contended:
        return found
    near, far, *others = found.links
    return replace(found, links=(near, replace(far, contention=fit_contention(contended, found)), *others))
