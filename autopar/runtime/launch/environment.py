"""What `autopar run` tells the processes that it starts: environment variables, and the axes of the mesh as text."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

AXES = "AUTOPAR_AXES"
"""The axes of `autopar.mesh`, as ``node=2,gpu=4``."""

BACKEND = "AUTOPAR_BACKEND"
"""The backend of `autopar.mesh`."""

FAILURES = "AUTOPAR_FAILURES"
"""The folder into which a rank writes why it failed."""

PROGRESS = "AUTOPAR_PROGRESS"
"""Whether rank 0 prints a line for each phase, the plan, and how fast the training is."""

QUIET = "AUTOPAR_QUIET"
"""Whether processes of a node but the first print nothing."""

TIMEOUT = "AUTOPAR_TIMEOUT"
"""Seconds that a process waits for the others to start."""


def parse_axes(text: str, name: str = "--axes") -> dict[str, int]:
    """Axes from ``node=32,gpu=8``.

    Args:
        text: what was given.
        name: of what it was given as, for the error.

    Raises:
        ValueError: a part is not NAME=SIZE, a size is not a positive integer, or a name is repeated.

    >>> parse_axes("node=32, gpu=8")
    {'node': 32, 'gpu': 8}
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (piece.strip() for piece in part.partition("="))
        # isdigit alone is true of superscripts, which int() refuses.
        if not axis or not size.isascii() or not size.isdigit() or int(size) < 1:
            raise ValueError(f"{name} {text!r}: {part.strip()!r} is not NAME=SIZE; write for example node=32,gpu=8")
        if axis in axes:
            raise ValueError(f"{name} {text!r} names axis {axis!r} twice; give each axis a name of its own")
        axes[axis] = int(size)
    return axes


def require_world(axes: Mapping[str, int], world: int, name: str) -> None:
    """Refuse axes of another number of devices than there are processes.

    Raises:
        ValueError: names both.
    """
    if math.prod(axes.values()) != world:
        sizes = " x ".join(map(str, axes.values()))
        raise ValueError(
            f"{name} {','.join(f'{a}={n}' for a, n in axes.items())} is a mesh of {sizes} = {math.prod(axes.values())} "
            f"devices, and the world has {world} processes; give sizes whose product is {world}"
        )


BY_MPI = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}
"""Torch's variables, and those of Open MPI and MPICH (Intel MPI) that say the same."""


def started_by_mpi(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that torch takes, from those that mpirun sets.

    Args:
        environment: of this process.

    Raises:
        ValueError: the process was not started by mpirun, or processes of several nodes do not know where to meet.

    >>> started_by_mpi({"PMI_RANK": "1", "PMI_SIZE": "2"})
    {'RANK': '1', 'WORLD_SIZE': '2', 'MASTER_ADDR': 'localhost', 'MASTER_PORT': '29500'}
    """
    found = {}
    for name, theirs in BY_MPI.items():
        value = next((environment[each] for each in theirs if each in environment), None)
        if value is not None:
            found[name] = value
    if "RANK" not in found or "WORLD_SIZE" not in found:
        raise ValueError(
            "backend 'mpi': MPI starts its processes itself, and this one was not started by it; run "
            "mpirun -n N python SCRIPT.py, or take 'gloo' with autopar run"
        )
    if found.get("LOCAL_WORLD_SIZE", found["WORLD_SIZE"]) != found["WORLD_SIZE"] and "MASTER_ADDR" not in environment:
        raise ValueError(
            "backend 'mpi': the processes are on several nodes, and control messages, which Gloo takes, need an "
            "address where they meet; set MASTER_ADDR to the host of rank 0 (mpirun -x MASTER_ADDR=HOST ...)"
        )
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    return {**found, **{name: environment.get(name, default) for name, default in meeting.items()}}


def is_told() -> bool:
    """Whether this process is to print progress."""
    return os.environ.get(PROGRESS) == "1"
