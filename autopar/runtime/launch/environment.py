"""What `autopar run` tells the processes that it starts: environment variables, and the axes of the mesh as text."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

AXES = "AUTOPAR_AXES"
"""The axes of `autopar.mesh`, as ``node=2,gpu=4``."""

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


def is_told() -> bool:
    """Whether this process is to print progress."""
    return os.environ.get(PROGRESS) == "1"
