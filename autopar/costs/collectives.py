"""Seconds of collectives by algorithm: closed forms in sympy, evaluated over whole arrays of sizes.

A message of ``m`` bytes costs ``alpha + m / beta``: ``alpha`` is the link's latency, ``beta`` its bandwidth per device
and direction. ``size`` is in bytes and always of the **full** tensor that one device ends or starts with:

| collective | ``size`` | algorithm | messages in a row | bytes each device sends |
| --- | --- | --- | --- | --- |
| all_gather | the gathered result | ring | n - 1 | (n - 1) / n size |
| | | pat | 0.29 (n + log2 n) | the same, at 0.75 beta |
| reduce_scatter | one device's input, before it is scattered | as all_gather | | |
| all_reduce | one device's input, as large as the result | ring | 2 (n - 1) | 2 (n - 1) / n size |
| | | tree | 2 (k - 1 + log2 N) | 2 size, at 0.92 beta; size if N is 2 |
| all_to_all | what one device holds, before and after | direct | n - 1 | (n - 1) / n size |
| send | what one device sends to one other, as all do | direct | 1 | size |
| broadcast | the tensor | ring | log2(n) + n - 1 | 2 (n - 1) / n size, at most: the root |

``k`` is how many of the group's devices are in each node (`Link.neighbors`), and ``N = n / k`` the number of nodes: a
tree is a chain through each node and a tree of the nodes. Of two nodes each is the root of one of the double tree's
halves and a leaf of the other, so that it sends every half once; an inner node of more sends its half to two and up.

What a library has besides is in `Link.factors`: how many times as long as this a collective takes there.

Logarithms are rounded up. A library takes what is fastest of what it has, and so do these functions: `Link.algorithms`
says what it has, a ring always (and all_to_all, send and broadcast in one way only). Adding numbers up costs nothing.

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", 2005
(rings, pairwise exchange, van de Geijn's broadcast: a scatter down a binary tree, then a ring); P. Patarasuk, X. Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009 (no all-reduce sends less than the ring);
NCCL's own model, src/graph/tuning.cc, for the double binary tree's share of the bandwidth and for PAT, parallel
aggregated trees between nodes: three quarters of the bandwidth, and per step 1 / 3.5 of a ring's latency, of which it
counts log2 of the nodes and, at 2.8 us, one for each rank.

Arguments may be numbers or arrays that broadcast against each other; the result is an array of seconds (of no dims for
numbers). One device communicates nothing: ``n == 1`` gives 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np
import sympy
from numpy.typing import ArrayLike, NDArray
from sympy.codegen.cfunctions import log2

from autopar.costs.cluster import Link

Array: TypeAlias = NDArray[np.float64]

SIZE, N, NODES, ALPHA, BETA = sympy.symbols("size n nodes alpha beta", positive=True)

# What a device lacks of the full tensor. PAT and tree have the figures of NCCL's tuning.cc, see above.
_SHARE = (N - 1) / N * SIZE
_DEPTH = sympy.ceiling(log2(N))
_RING = (N - 1) * ALPHA + _SHARE / BETA
_PAT = sympy.Rational(29, 100) * (N + _DEPTH) * ALPHA + _SHARE / (sympy.Rational(3, 4) * BETA)
# The longest way in a tree: a chain through one node, then up the tree of nodes.
_HOPS = N / NODES - 1 + sympy.ceiling(log2(NODES))
_TREE = 2 * _HOPS * ALPHA + sympy.Min(2, NODES - 1) * SIZE / (sympy.Rational(92, 100) * BETA)

FORMS: Mapping[str, Mapping[str, sympy.Expr]] = {
    "all_gather": {"ring": _RING, "pat": _PAT},
    "reduce_scatter": {"ring": _RING, "pat": _PAT},
    "all_reduce": {"ring": 2 * _RING, "tree": _TREE},
    "all_to_all": {"direct": _RING},
    "send": {"direct": ALPHA + SIZE / BETA},
    "broadcast": {"ring": (_DEPTH + N - 1) * ALPHA + 2 * _SHARE / BETA},
}
"""Seconds of each collective under each algorithm, in ``size``, ``n``, ``nodes``, ``alpha`` and ``beta``."""


@cache
def _function(form: sympy.Expr) -> Callable[..., Any]:
    # Compiled once: a search evaluates these forms for all layouts of all tensors.
    function: Callable[..., Any] = sympy.lambdify((SIZE, N, NODES, ALPHA, BETA), form, "numpy", cse=True)
    return function


# How often each kind sends the share (n - 1) / n of the tensor when it sends the least.
_ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1, "send": 1, "broadcast": 2}


def wire_bytes(kind: str, size: ArrayLike, n: ArrayLike) -> Array:
    """Bytes that each device sends in one collective (for broadcast: the device that sends most), on a ring.

    Args:
        kind: a name in `COLLECTIVES`.
        size: bytes, as in the table of this module.
        n: number of devices in the group.

    Raises:
        ValueError: the kind is unknown, a size is negative, or a group has no device.

    >>> float(wire_bytes("all_gather", 800, 8))
    700.0
    """
    devices, sizes = _checked(kind, size, n)
    share = np.where(devices > 1, 1.0, 0.0) if kind == "send" else (devices - 1) / devices
    return np.asarray(_ROUNDS[kind] * share * sizes)


def _checked(kind: str, size: ArrayLike, n: ArrayLike) -> tuple[Array, Array]:
    if kind not in _ROUNDS:
        raise ValueError(f"no cost model for collective {kind!r} (known: {', '.join(_ROUNDS)})")
    devices, sizes = np.asarray(n, dtype=np.float64), np.asarray(size, dtype=np.float64)
    if np.any(devices < 1):
        raise ValueError(f"{kind} needs a group of at least one device, got n = {n!r}")
    if np.any(sizes < 0):
        raise ValueError(f"{kind} of a negative number of bytes: {size!r}")
    return devices, sizes


def collective_seconds(kind: str, size: ArrayLike, n: ArrayLike, link: Link) -> Array:
    """Seconds of one collective by the fastest algorithm that the link's library has.

    Args:
        kind: a name in `COLLECTIVES`.
        size: bytes, as in the table of this module.
        n: number of devices in the group.
        link: the link between them.

    Raises:
        ValueError: the kind is unknown, a size is negative, or a group has no device.

    >>> link = Link("toy", bandwidth=100.0, latency=1.0)
    >>> float(collective_seconds("all_gather", 800, 8, link))
    14.0
    """
    devices, sizes = _checked(kind, size, n)
    # What is done in one way only has a form that no link names.
    forms = [form for name, form in FORMS[kind].items() if name in link.algorithms] or list(FORMS[kind].values())[:1]
    # A group that is smaller than its neighbors in a node lies within one node.
    nodes = np.maximum(devices / link.neighbors, 1.0)
    seconds = (_function(form)(sizes, devices, nodes, link.latency, link.bandwidth) for form in forms)
    fastest = np.asarray(np.minimum.reduce(list(np.broadcast_arrays(*seconds))), dtype=np.float64)
    return np.where(devices > 1, fastest * link.factors.get(kind, 1.0), 0.0)[()]


Seconds = Callable[[ArrayLike, ArrayLike, Link], Array]

COLLECTIVES: Mapping[str, Seconds] = {kind: partial(collective_seconds, kind) for kind in FORMS}
"""Every collective that has a cost model, by the name used in plans: ``(size, n, link) -> seconds``."""
