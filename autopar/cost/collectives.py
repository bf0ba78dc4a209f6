"""Seconds of collectives: the alpha-beta model on a ring, as closed forms over whole arrays of sizes.

A message of ``m`` bytes costs ``alpha + m / beta``: ``alpha`` is the link's latency, ``beta`` its bandwidth per device
and direction. Every function takes the bytes of the **full** tensor that one device ends or starts with:

| collective | ``size`` is, in bytes | messages in a row | bytes each device sends |
| --- | --- | --- | --- |
| all_gather | the gathered result | n - 1 | (n - 1) / n size |
| reduce_scatter | one device's input, before it is scattered | n - 1 | (n - 1) / n size |
| all_reduce | one device's input, as large as the result | 2 (n - 1) | 2 (n - 1) / n size |
| all_to_all | what one device holds, before and after | n - 1 | (n - 1) / n size |
| broadcast | the tensor | log2(n), rounded up, + n - 1 | 2 (n - 1) / n size, at most: the root |

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", 2005;
P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009 (the ring, and that
no all-reduce sends less). The time of adding numbers up is not in these formulas.

Arguments may be numbers or arrays that broadcast against each other; the result is an array of seconds (of no dims for
numbers). One device communicates nothing: ``n == 1`` gives 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.cluster import Link

Array: TypeAlias = NDArray[np.float64]


# How often each kind sends the share (n - 1) / n of the tensor: once around the ring, or twice.
_ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1, "broadcast": 2}


def wire_bytes(kind: str, size: ArrayLike, n: ArrayLike) -> Array:
    """Bytes that each device sends in one collective (for broadcast: the device that sends most).

    Args:
        kind: a name in `COLLECTIVES`.
        size: bytes, as in the table of this module.
        n: number of devices in the group.

    Raises:
        ValueError: the kind is unknown, a size is negative, or a group has no device.

    >>> float(wire_bytes("all_gather", 800, 8))
    700.0
    """
    if kind not in _ROUNDS:
        raise ValueError(f"no cost model for collective {kind!r} (known: {', '.join(_ROUNDS)})")
    devices, sizes = np.asarray(n, dtype=np.float64), np.asarray(size, dtype=np.float64)
    if np.any(devices < 1):
        raise ValueError(f"{kind} needs a group of at least one device, got n = {n!r}")
    if np.any(sizes < 0):
        raise ValueError(f"{kind} of a negative number of bytes: {size!r}")
    return np.asarray(_ROUNDS[kind] * (devices - 1) / devices * sizes)


def _seconds(kind: str, size: ArrayLike, n: ArrayLike, link: Link) -> Array:
    sent = wire_bytes(kind, size, n)
    devices = np.asarray(n, dtype=np.float64)
    messages = _ROUNDS[kind] * (devices - 1)
    if kind == "broadcast":  # its first round is a tree
        messages = np.ceil(np.log2(devices)) + devices - 1
    return np.asarray(messages * link.latency + sent / link.bandwidth)


def all_gather(full_bytes: ArrayLike, n: ArrayLike, link: Link) -> Array:
    """Gather the parts of ``n`` devices on each: ``(n - 1) alpha + (n - 1) / n full_bytes / beta``.

    On the ring, each device passes on one part of ``full_bytes / n`` in each of ``n - 1`` steps (Thakur et al. 2005).

    Args:
        full_bytes: size of the gathered result.
        n: number of devices.
        link: the link between them.

    >>> link = Link("toy", bandwidth=100.0, latency=1.0)
    >>> float(all_gather(800, 8, link))
    14.0
    """
    return _seconds("all_gather", full_bytes, n, link)


def reduce_scatter(full_bytes: ArrayLike, n: ArrayLike, link: Link) -> Array:
    """Add up ``n`` tensors and leave one part on each: ``(n - 1) alpha + (n - 1) / n full_bytes / beta``.

    The ring of `all_gather` backwards (Patarasuk and Yuan 2009).

    Args:
        full_bytes: size of one device's input.
        n: number of devices.
        link: the link between them.
    """
    return _seconds("reduce_scatter", full_bytes, n, link)


def all_reduce(full_bytes: ArrayLike, n: ArrayLike, link: Link) -> Array:
    """Add up ``n`` tensors on each device: ``2 (n - 1) alpha + 2 (n - 1) / n full_bytes / beta``.

    A reduce-scatter and an all-gather of the same tensor (Patarasuk and Yuan 2009); splitting an all-reduce into the
    two, as sharded parameters do, costs nothing here.

    Args:
        full_bytes: size of one device's input, and of the result.
        n: number of devices.
        link: the link between them.
    """
    return _seconds("all_reduce", full_bytes, n, link)


def all_to_all(local_bytes: ArrayLike, n: ArrayLike, link: Link) -> Array:
    """Give every device its part of each one's tensor: ``(n - 1) alpha + (n - 1) / n local_bytes / beta``.

    Pairwise exchange: one message of ``local_bytes / n`` to each other device (Thakur et al. 2005).

    Args:
        local_bytes: what one device holds, the same before and after.
        n: number of devices.
        link: the link between them.
    """
    return _seconds("all_to_all", local_bytes, n, link)


def broadcast(full_bytes: ArrayLike, n: ArrayLike, link: Link) -> Array:
    """Copy one device's tensor to all: ``(log2 n + n - 1) alpha + 2 (n - 1) / n full_bytes / beta``.

    A scatter down a binary tree and an all-gather on the ring, which is best for long messages (van de Geijn's
    algorithm; Thakur et al. 2005). ``log2 n`` is rounded up.

    Args:
        full_bytes: size of the tensor.
        n: number of devices.
        link: the link between them.
    """
    return _seconds("broadcast", full_bytes, n, link)


COLLECTIVES: Mapping[str, Callable[[ArrayLike, ArrayLike, Link], Array]] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
    "all_to_all": all_to_all,
    "broadcast": broadcast,
}
"""Every collective that has a cost model, by the name used in plans and in `wire_bytes`."""
