"""Seconds of kernels: a roofline per device, and how many operations the expensive ops take.

A multiplication and an addition count as two operations. The counts are plain arithmetic on exact integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.cluster import Device


def roofline(flops: ArrayLike, bytes_moved: ArrayLike, dtype: str, device: Device) -> NDArray[np.float64]:
    """Seconds of kernels on one device: ``max(flops / (peak efficiency), bytes / bandwidth) + launch``.

    A kernel is bound by arithmetic or by its memory traffic, whichever takes longer (S. Williams, A. Waterman,
    D. Patterson, "Roofline: an insightful visual performance model for multicore architectures", 2009). One that does
    nothing, such as a view, is not launched and costs 0.

    Args:
        flops: operations, per device.
        bytes_moved: read from and written to the device's memory.
        dtype: of the arithmetic, such as ``"bfloat16"``.
        device: its peak for the dtype, efficiency, bandwidth and launch cost count.

    Returns:
        Seconds, as an array of the arguments' common shape (of no dims for numbers).

    Raises:
        ValueError: the device states no peak for this dtype, or an amount is negative.

    >>> toy = Device("toy", {"float32": 100.0}, memory=1.0, bandwidth=10.0, launch=0.5)
    >>> roofline([200, 200, 0], [10, 40, 0], "float32", toy).tolist()
    [2.5, 4.5, 0.0]
    """
    work, traffic = np.asarray(flops, dtype=np.float64), np.asarray(bytes_moved, dtype=np.float64)
    if np.any(work < 0) or np.any(traffic < 0):
        raise ValueError(f"a kernel of a negative amount of work: {flops!r} operations, {bytes_moved!r} bytes")
    busy = np.maximum(work / (device.peak(dtype) * device.efficiency), traffic / device.bandwidth)
    return np.where(busy > 0, busy + device.launch, 0.0)


def matmul_flops(m: int, k: int, n: int, batch: int = 1) -> int:
    """Operations of ``batch`` products ``[m, k] @ [k, n]``: ``2 batch m k n``."""
    return 2 * batch * m * k * n


def matmul_backward_flops(m: int, k: int, n: int, batch: int = 1) -> int:
    """Operations of both gradients of a product, ``[m, n] @ [n, k]`` and ``[k, m] @ [m, n]``: twice the forward's."""
    return 2 * matmul_flops(m, k, n, batch)


def conv_flops(
    batch: int, in_channels: int, out_channels: int, kernel: Sequence[int], output: Sequence[int], groups: int = 1
) -> int:
    """Operations of a convolution: each output element is a product of ``in_channels / groups prod(kernel)`` pairs.

    Args:
        batch: number of images.
        in_channels: of the input, all groups together.
        out_channels: of the output, all groups together.
        kernel: sizes of the kernel's window, one per spatial dim.
        output: sizes of the output, one per spatial dim.
        groups: number of groups that do not see each other.
    """
    return 2 * batch * out_channels * math.prod(output) * (in_channels // groups) * math.prod(kernel)


def conv_backward_flops(
    batch: int, in_channels: int, out_channels: int, kernel: Sequence[int], output: Sequence[int], groups: int = 1
) -> int:
    """Operations of the gradients of input and weight: each pairs the same elements as `conv_flops`."""
    return 2 * conv_flops(batch, in_channels, out_channels, kernel, output, groups)


def attention_flops(b: int, h: int, q: int, k: int, d: int, causal: bool = False, d_value: int | None = None) -> int:
    """Operations of attention's two products, scores and output; the softmax is not counted.

    ``2 b h pairs (d + d_value)``, where ``pairs`` is ``q k``, or with a causal mask (query ``i`` sees keys ``0..i``, as
    in torch) only the pairs that it leaves: half of them and the diagonal, if ``q == k``. A fused kernel skips the
    rest (T. Dao, "FlashAttention-2", 2023).

    Args:
        b: batch.
        h: heads of the queries.
        q: number of queries.
        k: number of keys.
        d: size of a head, in queries and keys.
        causal: whether the mask is causal.
        d_value: size of a head in values, if it is another one.
    """
    return 2 * b * h * _attended_pairs(q, k, causal) * (d + (d if d_value is None else d_value))


def attention_backward_flops(
    b: int, h: int, q: int, k: int, d: int, causal: bool = False, d_value: int | None = None
) -> int:
    """Operations of the backward of fused attention: 2.5 times the forward's, if values are as large as keys.

    Five products per pair instead of two: the scores again, and the gradients of probabilities, values, queries and
    keys (T. Dao, "FlashAttention-2", 2023, section 4.1). Arguments as in `attention_flops`.
    """
    values = d if d_value is None else d_value
    return 2 * b * h * _attended_pairs(q, k, causal) * (3 * d + 2 * values)


def _attended_pairs(q: int, k: int, causal: bool) -> int:
    if not causal:
        return q * k
    ramp = min(q, k)  # queries past the last key see all keys
    return ramp * (ramp + 1) // 2 + (q - ramp) * k
