"""Numbers in 8 or 4 bits: blocks of them, each with a scale.

A block of `BLOCK` numbers ``x`` has the scale ``s = max |x| / q``, with ``q`` 127 of 8 bits and 7 of 4, in float32, and
each number is sent as ``round(x / s)``, to even. What arrives is ``s`` times that: off by at most ``s / 2``, which is
``max |x| / 254`` or ``max |x| / 14`` of its block, and by the rounding of float32. A block with an infinite number or
NaN arrives as NaN.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from autopar.costs.outer_exchange import BLOCK

BITS = (8, 4)

_LARGEST = {8: 127, 4: 7}


def quantize(values: torch.Tensor, bits: int) -> torch.Tensor:
    """The bytes that stand for some numbers.

    Args:
        values: of one dim, float32.
        bits: of each, 8 or 4.

    Returns:
        A uint8 tensor: the codes of whole blocks, then their scales.
    """
    blocks = pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) / _LARGEST[bits] if blocks.numel() else blocks.new_empty(0, 1)
    # A scale of zero is that of zeros, or of numbers too small to have one.
    ratios = torch.where(scales > 0, blocks / scales, 0.0)
    codes = torch.nan_to_num(ratios, 0.0).round().clamp(-_LARGEST[bits], _LARGEST[bits]).to(torch.int8).flatten()
    if bits == 4:
        low, high = (codes + 8).view(torch.uint8).view(-1, 2).unbind(1)
        codes = low | (high << 4)
    return torch.cat([codes.view(torch.uint8), scales.flatten().view(torch.uint8)])


def dequantize(payload: torch.Tensor, count: int, bits: int) -> torch.Tensor:
    """The numbers that some bytes stand for, in float32.

    Args:
        payload: what `quantize` gave.
        count: of the numbers.
        bits: of each.
    """
    padded = count + -count % BLOCK
    codes, scales = payload.tensor_split([padded * bits // 8])
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], 1).flatten()
    signed = codes.view(torch.int8).float() - (8.0 if bits == 4 else 0.0)
    # A copy: four bytes of a view need not begin where a float32 may.
    values: torch.Tensor = signed.view(-1, BLOCK) * scales.clone().view(torch.float32)[:, None]
    return values.flatten()[:count]


def mean_of(payloads: list[torch.Tensor], count: int, bits: int) -> torch.Tensor:
    """The mean of what some workers sent, added up in float32 in the order of the workers."""
    total = dequantize(payloads[0], count, bits)
    for payload in payloads[1:]:
        total += dequantize(payload, count, bits)
    return total / len(payloads)
