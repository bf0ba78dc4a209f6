"""`keep_freed_memory`: a process on a CPU keeps what a step has freed for the next one.

The C library gives memory back to the system when much of it is free, as it is at the end of a step, and large tensors
right away. The next step gets new pages, which the system clears one by one as they are first written to: writing to
new memory takes several times as long as computing what is written. An allocator of GPU memory keeps it for that
reason. What is measured must have the same, so this is beside the measurements; steps do it as their mesh is made.
"""

from __future__ import annotations

import ctypes
import os

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Options of glibc's ``mallopt``: how much may be free at the end of the heap, and what gets pages of its own."""

MOST = 2**31 - 1
"""The largest value that they take."""

SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
"""Variables by which a user says what the C library keeps."""


def keep_freed_memory() -> bool:
    """Keep what is freed, as long as this process lives; whether that is so.

    Nothing is done where the user has set one of `SETTINGS`, or where the C library is not glibc.
    """
    if any(name in os.environ for name in SETTINGS):
        return False
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False  # of another library, or of another system
    return bool(set_option(TRIM_THRESHOLD, MOST) and set_option(MMAP_THRESHOLD, MOST))
