"""Attention with sinks: each query's sum of exponentials has one more term, which belongs to no key.

Before::

    out = softmax(cat([q @ k.mT * scale + bias, sinks], -1), -1)[..., :-1] @ v

After (``sinks`` are added up as a block of keys would be whose values are zero)::

    out, logsumexp = autopar.attention(q, k, v, bias, None, 0.0, False, scale)
    total = logaddexp(logsumexp, sinks)
    out = out * exp(logsumexp - total)

The backward pass of a kernel takes what was saved of the forward pass. With ``total`` and the result after sinks in the
place of its own, its gradients of queries, keys and values are those of attention with sinks (as for a block of keys,
H. Liu et al., "Ring attention", 2023). So whatever splits attention splits this.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ir.ops import attention_kernels as kernels
from autopar.ir.ops.attention import attention, attention_backward


def attention_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, sinks: Tensor, scale: float | None
) -> Tensor:
    """Attention whose sums of exponentials have those of ``sinks``, too.

    Args:
        query: ``[batch, heads, queries, head]``.
        key: ``[batch, kv_heads, keys, head]``.
        value: ``[batch, kv_heads, keys, value_head]``.
        bias: is added to the scores.
        sinks: ``[batch, heads, queries]``.
        scale: of the scores; None: ``head ** -0.5``.
    """
    found: Tensor = _WithSinks.apply(query, key, value, bias, sinks, scale)  # type: ignore[no-untyped-call]
    return found


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Any, sinks: Tensor, scale: Any) -> Tensor:
        before, log = attention(query, key, value, bias, None, 0.0, False, scale)
        total = torch.logaddexp(log, sinks.to(log.dtype))
        out: Tensor = (before * torch.exp(log - total).unsqueeze(-1)).to(before.dtype)
        ctx.save_for_backward(query, key, value, bias, sinks, out, total)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        *tensors, out, total = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_differentiable(grad, tensors, ctx.scale, ctx.needs_input_grad), None
        query, key, value, bias, sinks = tensors
        wanted = bias is not None and ctx.needs_input_grad[3]
        found = attention_backward(grad, query, key, value, bias, None, out, total, 0.0, False, ctx.scale, wanted)
        of_sinks = None
        if ctx.needs_input_grad[4]:
            share = torch.exp(sinks.to(total.dtype) - total)
            of_sinks = -(share * (grad.to(total.dtype) * out).sum(-1)).to(sinks.dtype)
        return *found[:3], found[3] if wanted else None, of_sinks, None


def _differentiable(grad: Tensor, tensors: list[Any], scale: float | None, wanted: Any) -> list[Any]:
    """Gradients of the formula, for gradients of gradients."""
    query, key, value, bias, sinks = tensors
    before, log = kernels.math(query, key, value, bias, None, 0.0, False, scale)
    out = (before * torch.sigmoid(log - sinks.to(log.dtype)).unsqueeze(-1)).to(before.dtype)
    of = [t for t, asked in zip(tensors, wanted, strict=False) if asked]
    found = iter(torch.autograd.grad(out, of, grad, create_graph=True))
    return [next(found) if asked else None for asked in wanted[:5]]
