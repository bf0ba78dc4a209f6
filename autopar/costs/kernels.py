"""Seconds of kernels whose shape matters: tiles, waves and small depths, which a flat share of the peak misses.

A matrix product is computed tile by tile. Sizes that tiles do not divide are rounded up (tile quantization), tiles
that do not fill the device's units leave some of them idle in the last wave (wave quantization), and each tile has a
start and an end during which its unit multiplies nothing (NVIDIA, "Matrix Multiplication Background User's Guide").
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.costs.cluster import Device
from autopar.costs.device import FLOAT8

Array = NDArray[np.float64]

TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.95),
    (128, 64, 0.8),
    (64, 128, 0.8),
    (64, 64, 0.6),
)
"""Rows and columns of the tiles that libraries choose from (the guide's list), and the rate of each relative to the
largest: a small tile loads more per multiplication. The rates are assumed; a calibration fits what they scale."""

ALIGNED, UNALIGNED = 8, 0.5
"""Tensor cores load 16 bytes at once: sizes that are not a multiple of 8 elements of 2 bytes fall back to slower
kernels (the same guide, section 4.1). The rate is fitted: 50257 words cost twice what 50304 do. Products in float32,
which torch does not put on tensor cores, are as fast at any size: measured on an H200."""

_ON_TENSOR_CORES = ("bfloat16", "float16")

ALIGNED_FLOAT8 = 16
"""Kernels of float8 take no other sizes of columns and depth: `autopar.ir.ops.float8.product` widens these to float32
before it multiplies."""

BATCHED = 0.5
"""Rate of batched products relative to single ones: theirs is attention's, of transposed views. Fitted, too.

Products of groups of rows, a matrix each, have the rate of single ones: 91% of an H800's peak was reached
(https://arxiv.org/abs/2501.16103), and 98.6% of what cuBLAS does with equal groups (MegaBlocks,
https://arxiv.org/abs/2211.15841). Each group has tiles of its own, so that small ones are far below: 16 rows take as
long as 64."""


@dataclass(frozen=True)
class Work:
    """Kernels, one an element of the arrays: what each does on one device.

    Attributes:
        flops: operations.
        moved: bytes read from and written to the device's memory.
        rows: of a matrix product's result; 0 where the kernel is none.
        columns: of its result.
        depth: what is summed over.
        batch: how many products.
        rate: of the products relative to a single one's.
        launches: kernels that the host launches; 0 for a view.
    """

    flops: Array
    moved: Array
    rows: Array
    columns: Array
    depth: Array
    batch: Array
    rate: Array
    launches: Array

    def take(self, index: ArrayLike) -> Work:
        """The kernels with these numbers."""
        chosen = np.asarray(index)
        return Work(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))

    def computing(self, flops: float) -> Work:
        """The same kernels with so many operations each."""
        return replace(self, flops=np.full(self.moved.shape, flops))

    @staticmethod
    def join(parts: list[Work]) -> Work:
        """All kernels of the parts, in order."""
        return Work(*(np.concatenate([getattr(p, name) for p in parts]) for name in Work.__dataclass_fields__))


def stream(moved: ArrayLike) -> Work:
    """Kernels that move data and compute next to nothing."""
    size = np.atleast_1d(np.asarray(moved, dtype=np.float64))
    none = np.zeros_like(size)  # no arithmetic, and no product
    return Work(none, size, none, none, none, none, np.ones_like(size), np.where(size > 0, 1.0, 0.0))


def product(rows: ArrayLike, columns: ArrayLike, depth: ArrayLike, batch: ArrayLike = 1, item: float = 2) -> Work:
    """Matrix products ``batch`` times ``[rows, depth] @ [depth, columns]``.

    Args:
        rows: of the result.
        columns: of the result.
        depth: what is summed over.
        batch: how many.
        item: bytes of an element.
    """
    m, n, k, b = np.broadcast_arrays(
        *(np.atleast_1d(np.asarray(x, dtype=np.float64)) for x in (rows, columns, depth, batch))
    )
    rate = np.where(b > 1, BATCHED, 1.0)
    return Work(2 * b * m * n * k, item * b * (m * k + k * n + m * n), m, n, k, b, rate, np.ones_like(m))


def busy_seconds(work: Work, dtype: str, device: Device) -> Array:
    """Seconds during which each kernel keeps a device busy, its launch not counted.

    A matrix product takes the best of `TILES`, and no less than its memory traffic; every other kernel is bound by
    arithmetic or by traffic (S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model
    for multicore architectures", 2009).

    Args:
        work: the kernels.
        dtype: of the arithmetic.
        device: peak, efficiency, fused, units, ramp, bandwidth and streaming count.

    Raises:
        ValueError: the device states no peak for this dtype.
    """
    rate = device.peak(dtype) * device.efficiency
    # A flat share of the peak; matrix products on devices of many units get their tiles below.
    products = work.rows > 0
    arithmetic = work.flops / np.where(products, rate, rate * device.fused)
    if device.units > 1 and np.any(products):
        rates = rate * _alignment(work, dtype, device)
        arithmetic = np.where(products, _tiled(work, rates, device), arithmetic)
    elif device.ramp:
        # A CPU core works through a product without waves: its sizes are not quantized. But libraries copy operands
        # into an order of their own, of which few rows, or few columns, make little use.
        few = np.where(products, 1 / np.maximum(work.rows, 1) + 1 / np.maximum(work.columns, 1), 0.0)
        arithmetic = arithmetic * (1 + device.ramp * few)
    return np.maximum(arithmetic, work.moved / (device.bandwidth * device.streaming))


def kernel_seconds(work: Work, dtype: str, device: Device) -> Array:
    """Seconds that each kernel takes on a device: busy, and the pause that a launch costs; 0 for one that does nothing.

    >>> toy = Device("toy", {"float32": 100.0}, memory=1.0, bandwidth=10.0, launch=0.5)
    >>> kernel_seconds(stream([10, 0]), "float32", toy).tolist()
    [1.5, 0.0]
    """
    busy = busy_seconds(work, dtype, device)
    # A view does nothing and launches nothing; it must not pay for a launch either.
    return np.where(busy > 0, busy + work.launches * device.launch, 0.0)


def host_wait_seconds(device: Device) -> float:
    """Seconds for which a device has nothing to do while the host waits for numbers of it, to launch what is next.

    The numbers are copied to the host, which then launches a kernel, which starts: two launches, and the host's time
    for one. A CPU runs its kernels itself.
    """
    return 0.0 if device.kind == "cpu" else 2 * device.launch + device.host


def _alignment(work: Work, dtype: str, device: Device) -> Array:
    """The rate of each product relative to one whose sizes suit the kernels."""
    if dtype == FLOAT8:
        aligned = (work.columns % ALIGNED_FLOAT8 == 0) & (work.depth % ALIGNED_FLOAT8 == 0)
        return np.where(aligned, 1.0, device.peak("float32") / device.peak(FLOAT8))
    aligned = (work.rows % ALIGNED == 0) & (work.columns % ALIGNED == 0) & (work.depth % ALIGNED == 0)
    return np.where(aligned | (dtype not in _ON_TENSOR_CORES), 1.0, UNALIGNED)


def _tiled(work: Work, rate: Array, device: Device) -> Array:
    rates = work.rate * rate
    best = np.full(work.rows.shape, math.inf)
    for rows, columns, relative in TILES:
        # Partial tiles take as long as whole ones, and so does a last wave that leaves units idle.
        tiles = work.batch * np.ceil(work.rows / rows) * np.ceil(work.columns / columns)
        waves = np.ceil(tiles / device.units)
        # What all units could multiply in these waves, `ramp` elements of depth included for start and end.
        multiplied = 2.0 * rows * columns * (work.depth + device.ramp) * device.units * waves
        best = np.minimum(best, multiplied / (rates * relative))
    return best
