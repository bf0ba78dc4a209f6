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

NODES = "AUTOPAR_NODES"
"""How many nodes the run may have, as ``2:4``, where they may come and go."""

SNAPSHOTS = "AUTOPAR_SNAPSHOTS"
"""The folder in which the processes of this node keep snapshots in memory, where they may be started anew."""

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


OPEN = "*"
"""The size of an axis that has what the other axes leave of the devices."""


def axes_of_world(text: str, world: int, name: str = "--axes") -> dict[str, int]:
    """Axes from a text in which one size may be open, for a world of so many processes.

    Args:
        text: what was given.
        world: processes.
        name: of what it was given as, for the error.

    Raises:
        ValueError: as `parse_axes`; two sizes are open; or the others do not divide the world.

    >>> axes_of_world("data=*,model=2", 6), axes_of_world("data=2,model=2", 6)
    ({'data': 3, 'model': 2}, {'data': 2, 'model': 2})
    """
    pieces = [[piece.strip() for piece in part.split("=")] for part in text.split(",")]
    opened = [axis for axis, *size in pieces if size == [OPEN]]
    axes = parse_axes(
        ",".join("=".join([axis, *("1" if n == OPEN else n for n in size)]) for axis, *size in pieces), name
    )
    if len(opened) > 1:
        raise ValueError(f"{name} {text!r} leaves the sizes of {' and '.join(opened)} open; give all but one")
    rest = math.prod(axes.values())
    if opened and world % rest:
        raise ValueError(
            f"{name} {text!r}: {world} processes do not divide by the {rest} devices of the other axes; start a "
            f"multiple of {rest}, or give other sizes"
        )
    return {axis: world // rest if axis in opened else n for axis, n in axes.items()}


def parse_range(text: str, name: str) -> tuple[int, int]:
    """Two whole numbers from ``2:4``.

    Raises:
        ValueError: they are none, or the first is larger than the second.

    >>> parse_range("2:4", "--elastic")
    (2, 4)
    """
    low, _, high = (part.strip() for part in text.partition(":"))
    if not all(part.isascii() and part.isdigit() and len(part) < 8 for part in (low, high)) or int(low) < 1:
        raise ValueError(f"{name} {text!r} is not MIN:MAX; write for example 2:4, the fewest nodes and the most")
    if int(low) > int(high):
        raise ValueError(
            f"{name} {text!r}: the fewest nodes, {low}, are more than the most, {high}; write {high}:{low}"
        )
    return int(low), int(high)


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
