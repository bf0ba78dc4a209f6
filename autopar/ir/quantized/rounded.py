"""What numbers arrive as that are sent in few bits, from the definition alone: what messages are verified against."""

from __future__ import annotations

import torch


def rounded(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers as multiples of the scale of their block of 256; nothing is packed, and no block is padded.

    Args:
        values: [..., numbers], of which float32 is taken: each row begins a block.
        bits: of each, 8 or 4.

    Returns:
        float32, of the same shape.

    >>> rounded(torch.tensor([7.0, 3.2, 1.6]), 4)
    tensor([7., 3., 2.])
    """
    largest = 2 ** (bits - 1) - 1
    found = []
    for block in values.float().split(256, -1):  # type: ignore[no-untyped-call]
        scale = block.abs().amax(-1, keepdim=True) / largest if block.numel() else block.sum(-1, keepdim=True)
        multiples = (block / scale).round().clamp(-largest, largest) * scale
        found.append(torch.where(scale == 0, torch.zeros_like(block), multiples))
    return torch.cat(found, -1)
