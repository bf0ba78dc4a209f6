"""How many operations the expensive operators take.

A multiplication and an addition count as two operations. The counts are plain arithmetic on exact integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def matmul_flops(m: int, k: int, n: int, batch: int = 1) -> int:
    """Operations of ``batch`` products ``[m, k] @ [k, n]``: ``2 batch m k n``."""
    return 2 * batch * m * k * n


def matmul_backward_flops(m: int, k: int, n: int, batch: int = 1) -> int:
    """Operations of both gradients of a product, ``[m, n] @ [n, k]`` and ``[k, m] @ [m, n]``: twice the forward's."""
    return 2 * matmul_flops(m, k, n, batch)  # each gradient is a product of the same three sizes


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
