"""Numbers in 8 or 4 bits: blocks of them, each with a scale.

A block of `BLOCK` numbers ``x`` has the scale ``s = max |x| / q``, with ``q`` 127 of 8 bits and 7 of 4, in float32, and
each number is sent as ``round(x / s)``, to even. What arrives is ``s`` times that: off by at most ``s / 2``, which is
``max |x| / 254`` or ``max |x| / 14`` of its block, and by the rounding of float32. A block with an infinite number or
NaN arrives as NaN.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.functional import pad

from autopar.costs.outer_exchange import BLOCK

BITS = (8, 4)

_LARGEST = {8: 127, 4: 7}


def largest_error(bits: int) -> str:
    """How far off a number arrives at the most, in words.

    >>> largest_error(4)
    'max |x| / 14 of its block of 256'
    """
    return f"max |x| / {2 * _LARGEST[bits]} of its block of {BLOCK}"


def quantize(values: torch.Tensor, bits: int) -> torch.Tensor:
    """The bytes that stand for some numbers.

    Args:
        values: float32, [..., numbers]: each row begins a block.
        bits: of each, 8 or 4.

    Returns:
        A uint8 tensor, [..., bytes]: the codes of whole blocks, then their scales.
    """
    count = -(-values.shape[-1] // BLOCK)
    blocks = pad(values, (0, -values.shape[-1] % BLOCK)).reshape(*values.shape[:-1], count, BLOCK)
    scales = blocks.abs().amax(-1, keepdim=True) / _LARGEST[bits]
    # A scale of zero is that of zeros, or of numbers too small to have one.
    ratios = blocks / torch.where(scales == 0, torch.inf, scales)
    codes = ratios.nan_to_num_(0.0).round_().clamp_(-_LARGEST[bits], _LARGEST[bits]).to(torch.int8).flatten(-2)
    if bits == 4:
        low, high = (codes + 8).view(torch.uint8).reshape(*codes.shape[:-1], count * BLOCK // 2, 2).unbind(-1)
        codes = low | (high << 4)
    return torch.cat([codes.view(torch.uint8), scales.squeeze(-1).view(torch.uint8)], -1)


def dequantize(payload: torch.Tensor, count: int, bits: int) -> torch.Tensor:
    """The numbers that some bytes stand for, in float32.

    Args:
        payload: what `quantize` gave, [..., bytes].
        count: of the numbers in a row.
        bits: of each.

    Returns:
        ``[..., count]``.
    """
    blocks = -(-count // BLOCK)
    codes, scales = payload.tensor_split([blocks * BLOCK * bits // 8], -1)
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    signed = codes.view(torch.int8).float()
    signed = signed - 8.0 if bits == 4 else signed
    # A copy: four bytes of a view need not begin where a float32 may.
    own = scales.clone(memory_format=torch.contiguous_format).view(torch.float32)
    values = signed.reshape(*payload.shape[:-1], blocks, BLOCK).mul_(own.unsqueeze(-1)).flatten(-2)
    return values[..., :count]


def sum_of(payloads: Iterable[torch.Tensor], count: int, bits: int) -> torch.Tensor:
    """The sum of what some devices sent, added up in float32 in the order in which they are given."""
    total = None
    for payload in payloads:
        term = dequantize(payload, count, bits)
        total = term.clone() if total is None else total.add_(term)
    assert total is not None
    return total


def mean_of(payloads: list[torch.Tensor], count: int, bits: int) -> torch.Tensor:
    """The mean of what some workers sent, added up in float32 in the order of the workers."""
    return sum_of(payloads, count, bits) / len(payloads)
