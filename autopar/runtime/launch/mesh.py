"""`mesh`: the mesh of this run, as `autopar run` or torchrun has started it."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.costs.arguments import AXES as ANY_AXES
from autopar.costs.arguments import a, optional, require
from autopar.errors import RankError
from autopar.runtime.backends import GLOO, MPI, NCCL, SERVES, require_backend
from autopar.runtime.launch.environment import (
    AXES,
    BACKEND,
    NODES,
    TIMEOUT,
    axes_of_world,
    parse_range,
    require_world,
    started_by_mpi,
)

GPU, CPU = "cuda", "cpu"


def mesh(
    axes: Mapping[str, int] | None = None, *, device: str | None = None, backend: str | None = None
) -> DeviceMesh | None:
    """The mesh of all processes of this run; None for a script that was started by itself, which is one device.

    Makes the process group, if there is none, and takes it down when the process ends.

    Args:
        axes: name and size of each axis, outermost first. Default: those of ``autopar run --axes``; else ``node`` and
            ``gpu`` (of CPUs, ``cpu``), or the second alone where there is one node.
        device: ``"cuda"`` or ``"cpu"``; default: GPUs, where there are some.
        backend: of the groups along the axes: ``"nccl"``, ``"gloo"`` or, in a build of torch that has it and under
            mpirun, ``"mpi"``, whose control messages go over Gloo. Default: that of ``autopar run --backend``; else
            NCCL for GPUs and Gloo for CPUs.

    Raises:
        RankError: fewer nodes are left of the run than it needs.
        ValueError: the axes are not of as many devices as there are processes, a node has more processes than GPUs, or
            this torch does not have the backend.
    """
    named_backend = optional(a(str, " or ".join(map(repr, SERVES))))
    require(
        axes=(axes, optional(ANY_AXES)), device=(device, optional(a(str, '"cuda" or "cpu"'))),
        backend=(backend, named_backend),
    )  # fmt: skip
    if device not in (None, GPU, CPU):
        raise ValueError(f'device={device!r}: expected "cuda" or "cpu"')
    kind = device or (GPU if torch.cuda.is_available() else CPU)
    asked = backend if backend is not None else os.environ.get(BACKEND)
    chosen = asked if asked is not None else NCCL if kind == GPU else GLOO
    if asked is not None:
        require_backend(chosen, kind)
    if chosen == MPI and not dist.is_initialized():
        os.environ.update(started_by_mpi(os.environ))
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    _require_enough(world)
    named = dict(axes) if axes is not None else axes_of_run(world, kind)
    require_world(named, world, "axes" if axes is not None else f"{AXES} (of autopar run --axes)")
    if world == 1 and not dist.is_initialized():
        return None
    if kind == GPU:
        _take_gpu()
    if not dist.is_initialized():
        wait = timedelta(seconds=float(os.environ.get(TIMEOUT, 600)))
        # A world of MPI has no store, which the groups of control messages are made from.
        dist.init_process_group(GLOO if chosen == MPI else chosen, timeout=wait)
        atexit.register(_leave)
    along: dict[int | str, Any] | None = dict.fromkeys(named, MPI) if chosen == MPI else None
    return init_device_mesh(kind, tuple(named.values()), mesh_dim_names=tuple(named), backend_override=along)


def _require_enough(world: int) -> None:
    """Refuse a world of fewer nodes than were asked for: torch counts as one what is left of those that have met.

    Raises:
        RankError: says so; the launcher starts the process anew.
    """
    if text := os.environ.get(NODES):
        fewest = parse_range(text, NODES)[0] * int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if world < fewest:
            raise RankError(
                f"{world} processes are left of a run that needs {fewest}: a node was lost as they met; all meet again"
            )


def axes_of_run(world: int, kind: str) -> dict[str, int]:
    """The axes that the launcher names, or one for the nodes and one for the devices of a node."""
    if text := os.environ.get(AXES):
        return axes_of_world(text, world, AXES)
    name, local = "gpu" if kind == GPU else "cpu", int(os.environ.get("LOCAL_WORLD_SIZE", world))
    # Links within a node are others than those between nodes; with nodes of several sizes there is no such mesh.
    return {"node": world // local, name: local} if 1 < local < world and world % local == 0 else {name: world}


def _take_gpu() -> None:
    """Each process of a node uses a GPU of its own.

    Raises:
        ValueError: there are fewer.
    """
    local, count = int(os.environ.get("LOCAL_RANK", dist.get_rank() if dist.is_initialized() else 0)), 0
    count = torch.cuda.device_count()
    if local >= count:
        raise ValueError(
            f"local rank {local} has no GPU of its own, as this machine has {count}; start {count} processes a node "
            '(--nproc), or pass device="cpu" to autopar.mesh()'
        )
    torch.cuda.set_device(local)


def _leave() -> None:
    """Take the process group down, unless the process fails: then another rank may never come to that."""
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()
