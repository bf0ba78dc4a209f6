"""What operators compute that have no CPU kernel, written with operators that have one.

A rule proven on a stand-in is right if the operator computes what the stand-in does, with outputs of the same shape.
"""

from typing import Any

import torch
from torch._decomp import decomposition_table

from autopar.verify.float64 import grouped_mm

aten = torch.ops.aten
cpu = aten._scaled_dot_product_flash_attention_for_cpu.default
cpu_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _state(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def flash(q: Any, k: Any, v: Any, p: float = 0.0, causal: bool = False) -> Any:
    out, lse = cpu(q, k, v, p, causal)
    return out, lse, None, None, q.size(2), k.size(2), _state(2), _state(), q.new_empty(0)


def flash_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, cum_q: Any, cum_k: Any, max_q: int, max_k: int, *args: Any
) -> Any:
    assert (max_q, max_k) == (q.size(2), k.size(2))
    return cpu_backward(grad, q, k, v, out, lse, *args[:2])


def efficient(q: Any, k: Any, v: Any, bias: Any, compute_lse: bool, p: float = 0.0, causal: bool = False) -> Any:
    out, lse = cpu(q, k, v, p, causal, attn_mask=bias)
    return out, torch.nn.functional.pad(lse, (0, -lse.size(-1) % 32)), _state(), _state()


def efficient_backward(
    grad: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, lse: Any, seed: Any, offset: Any, p: float, mask: Any,
    causal: bool = False,
) -> Any:  # fmt: skip
    assert not causal
    scale = q.size(-1) ** -0.5
    scores = q @ k.mT * scale
    weights = (scores if bias is None else scores + bias).sub(lse[..., : q.size(2), None]).exp()
    d_scores = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True))
    d_bias = d_scores.sum_to_size(bias.shape) if mask[3] else None
    return d_scores @ k * scale, d_scores.mT @ q * scale, weights.mT @ grad, d_bias


def cudnn(q: Any, k: Any, v: Any, bias: Any, compute_lse: bool, p: float = 0.0, causal: bool = False) -> Any:
    out, lse = cpu(q, k, v, p, causal, attn_mask=bias)
    return out, lse.unsqueeze(-1), None, None, q.size(2), k.size(2), _state(), _state(), None


def cudnn_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, seed: Any, offset: Any, bias: Any, *args: Any
) -> Any:
    assert args[2:4] == (q.size(2), k.size(2))
    return cpu_backward(grad, q, k, v, out, lse.squeeze(-1), *args[4:6], attn_mask=bias)


STAND_INS = {
    aten._grouped_mm.default: grouped_mm,
    aten._scaled_dot_product_flash_attention.default: flash,
    aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
    aten._scaled_dot_product_efficient_attention.default: efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
    aten._scaled_dot_product_cudnn_attention.default: cudnn,
    aten._scaled_dot_product_cudnn_attention_backward.default: cudnn_backward,
    aten._fused_rms_norm_backward.default: decomposition_table[aten._fused_rms_norm_backward.default],
}
