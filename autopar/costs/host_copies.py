"""Seconds of copies between a device and the memory of its host."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.costs.cluster import Device


def copy_seconds(size: ArrayLike, device: Device, copies: int = 1) -> NDArray[np.float64]:
    """Seconds that copies take which follow one another, in one direction; infinite where there is no way.

    Args:
        size: bytes, of all copies together.
        device: whose host it is.
        copies: how many, each with a launch of its own.
    """
    size = np.asarray(size, dtype=np.float64)
    if not device.host_bandwidth:
        return np.full(size.shape, np.inf)
    return copies * device.launch + size / (device.host_bandwidth * device.streaming)
