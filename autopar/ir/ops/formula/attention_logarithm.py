"""Attention that also gives the logarithm of each query's sum of exponentials, with the gradients of that.

The gradient of a query's logarithm by its scores are its weights. So with ``g`` as the gradient of the logarithms::

    grad_scores = weights * g

which is what the backward pass of attention computes for values of one, of which a result of zero was saved, and
``g`` in one column of the gradient. So whatever computes, splits or masks attention does the same for its logarithm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from autopar.ir.ops import attention_kernels as kernels
from autopar.ir.ops.attention import attention, attention_backward
from autopar.ir.ops.formula.attention_block import shift_of
from autopar.ir.ops.formula.attention_rows import attention_rows, attention_rows_backward


def attention_with_logarithm(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float | None, cap: float | None
) -> tuple[Tensor, Tensor]:
    """The result, and the logarithms ``[batch, heads, queries]``: minus infinity for a query that sees no key.

    Args:
        query: ``[batch, heads, queries, head]``.
        key: ``[batch, kv_heads, keys, head]``.
        value: ``[batch, kv_heads, keys, value_head]``.
        bias: is added to the scores, behind the cap.
        scale: of the scores; None: ``head ** -0.5``.
        cap: scores are ``cap * tanh(scores / cap)``; None: as they are.
    """
    if cap is None:
        out, log = attention(query, key, value, bias, None, 0.0, False, scale)
    else:
        out, log = attention_rows(query, key, value, bias, None, 0.0, scale, cap, False)
    found: Tensor = _Logarithm.apply(query, key, bias, log.detach(), scale, cap)  # type: ignore[no-untyped-call]
    return out, found


class _Logarithm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, bias: Any, log: Tensor, scale: Any, cap: Any) -> Tensor:
        ctx.save_for_backward(query, key, bias, log)
        ctx.numbers = scale, cap
        whole = log if cap is None else log + shift_of(query, bias).squeeze(-1)
        # Kernels give any number for a query that sees no key.
        return whole.clone() if bias is None else whole.masked_fill((bias == -torch.inf).all(-1), -torch.inf)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, bias, log = ctx.saved_tensors
        scale, cap = ctx.numbers
        wanted = bias is not None and ctx.needs_input_grad[2]
        if torch.is_grad_enabled():
            return *_differentiable(grad, (query, key, bias), scale, cap, ctx.needs_input_grad), None, None, None
        column = pad(grad.to(query.dtype).unsqueeze(-1), (0, query.shape[-1] - 1))
        tensors = column, query, key, torch.ones_like(key), bias, None, torch.zeros_like(query), log
        if cap is None:
            found = attention_backward(*tensors, 0.0, False, scale, wanted)
        else:
            found = attention_rows_backward(*tensors, 0.0, scale, cap, False, wanted)
        return found[0], found[1], found[3] if wanted else None, None, None, None


def _differentiable(
    grad: Tensor, tensors: tuple[Any, ...], scale: float | None, cap: float | None, wanted: Any
) -> list[Tensor | None]:
    """Gradients of the formula, for gradients of gradients."""
    query, key, bias = tensors
    log = kernels.math(query, key, key, bias, None, 0.0, False, scale, cap)[1]
    of = [t for t, asked in zip(tensors, wanted, strict=False) if asked]
    found = iter(torch.autograd.grad(log, of, grad, create_graph=True))
    return [next(found) if asked else None for asked in wanted[:3]]
