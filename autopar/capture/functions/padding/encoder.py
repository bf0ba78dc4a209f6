"""`nn.TransformerEncoder` in evaluation, whose padded positions are zeros in eager mode.

There torch packs sequences whose padding is at the end into a nested tensor, and fills that with zeros behind the last
layer. A trace would have numbers there, from the same layers under a mask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def padded_with_zeros() -> Iterator[None]:
    """While it lasts, encoders give zeros for what is padded, where eager mode's do."""
    before = nn.TransformerEncoder.forward

    def forward(
        module: nn.TransformerEncoder,
        src: Any,
        mask: Any = None,
        src_key_padding_mask: Any = None,
        is_causal: Any = None,
    ) -> Any:
        if mask is None and not is_causal and _is_packed(module, src, src_key_padding_mask):
            return _padded(module, src, src_key_padding_mask)
        return before(module, src, mask, src_key_padding_mask, is_causal)

    nn.TransformerEncoder.forward = forward  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.TransformerEncoder.forward = before  # type: ignore[method-assign]


def _is_packed(module: nn.TransformerEncoder, src: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether eager mode packs sequences, if their padding is at the end: torch's own conditions."""
    first: Any = module.layers[0]
    if mask is None or not module.use_nested_tensor or first.training or src.dim() != 3:
        return False
    if torch.is_autocast_enabled() or not torch.backends.mha.get_fastpath_enabled():
        return False
    attention = first.self_attn
    layers = (first.norm1, first.norm2, first.linear1, first.linear2, attention.out_proj)
    tensors = (src, attention.in_proj_weight, attention.in_proj_bias, *(p for m in layers for p in (m.weight, m.bias)))
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))


def _padded(module: nn.TransformerEncoder, src: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The encoder's output, whose padded positions are zeros where padding is at the end of each sequence."""
    if mask.dtype == torch.bool:
        padded, mask = mask, torch.zeros_like(mask, dtype=src.dtype).masked_fill(mask, float("-inf"))
    else:
        padded = mask != 0
    output = src
    for layer in module.layers:
        output = layer(output, src_key_padding_mask=mask)
    if module.mask_check:
        padded = padded & ~(padded[:, :-1] & ~padded[:, 1:]).any()
    output = torch.where(padded.unsqueeze(-1), 0.0, output)
    return output if module.norm is None else module.norm(output)
