"""Attention with what no kernel has, some queries at a time: capped scores, or rows that large numbers hide.

Where a number such as the least of its dtype is added to all scores of a query, their softmax is the mean of all
values; the logarithm of its sum, of which kernels compute gradients, has lost how many there are. And no kernel of
torch caps scores by ``tanh``. Here scores of as many queries as there is room for are computed, in the backward pass
anew: of all queries times keys no tensor of floating numbers is made.

Before::

    out = softmax(cap * tanh(q @ k.mT * scale / cap) + bias, -1) @ v

After::

    out, logsumexp = autopar.attention_rows(q, k, v, bias, None, 0.0, scale, cap, False)

A bias that is a function of queries and of keys is replaced by it, see `autopar.passes.canonicalize.masks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ir.ops import attention_kernels as kernels
from autopar.ir.ops.attention import save_for_backward
from autopar.ir.ops.formula import attention_block as blocks

# Must stay alive: torch removes the operators with the library object.
_library: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? kept"
_NUMBERS = "float dropout_p, float? scale, float? cap, bool placed"
_library.define(f"attention_rows({_TENSORS}, {_NUMBERS}) -> (Tensor, Tensor)")
_library.define(
    f"attention_rows_backward(Tensor grad, {_TENSORS}, Tensor out, Tensor logsumexp, {_NUMBERS}, bool bias_gradient) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)

attention_rows = torch.ops.autopar.attention_rows.default
"""Attention by its formula, some rows at a time.

Args:
    query: ``[batch, heads, queries, head]``.
    key: ``[batch, kv_heads, keys, head]``; each serves ``heads / kv_heads`` consecutive heads of the queries.
    value: ``[batch, kv_heads, keys, value_head]``.
    bias: is added to the scores, behind the cap; broadcasts to ``[batch, heads, queries, keys]``.
    kept: the elements that dropout keeps, bool ``[batch, heads, queries, keys]``; None: all.
    dropout_p: share of the elements that dropout drops.
    scale: of the scores; None: ``head ** -0.5``.
    cap: scores are ``cap * tanh(scores / cap)``; None: as they are.
    placed: large numbers of the bias are in the places of scores, which have no gradients; they are not added to them.

Returns:
    The result, ``[batch, heads, queries, value_head]``, and the logarithm of each query's sum of exponentials of scores
    less the largest number that is added to any, see `autopar.ir.ops.formula.attention_block`.
"""

attention_rows_backward = torch.ops.autopar.attention_rows_backward.default
"""Gradients of query, key, value and bias; that of the bias is empty where it is not asked for."""


def _attention_rows(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, kept: Tensor | None, *numbers: Any
) -> tuple[Tensor, Tensor]:
    return blocks.forward(query, key, value, bias, kept, blocks.shift_of(query, bias), *numbers)


def _attention_rows_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, kept: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    return blocks.backward(grad, query, key, value, bias, kept, blocks.shift_of(query, bias), *rest)


def _differentiated(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * (1 + len(ctx.numbers))
    if grad is None:
        return (None,) * 4 + nothing
    *tensors, out, log = ctx.saved_tensors
    wanted = tensors[3] is not None and ctx.needs_input_grad[3]
    if torch.is_grad_enabled():
        return *_of_formula(grad, tensors, ctx.numbers, wanted), *nothing
    found = attention_rows_backward(grad, *tensors, out, log, *ctx.numbers, wanted)
    return *found[:3], found[3] if wanted else None, *nothing


def _of_formula(grad: Tensor, tensors: Sequence[Any], numbers: Sequence[Any], wanted: bool) -> list[Tensor | None]:
    """Gradients of the formula, for gradients of gradients."""
    query, key, value, bias, kept = tensors
    dropout_p, scale, cap, placed = numbers
    out = kernels.math(query, key, value, bias, kept, dropout_p, False, scale, cap, placed)[0]
    of = [query, key, value, *([bias] if wanted else [])]
    differentiated = [t for t in of if t.requires_grad]
    found = iter(torch.autograd.grad(out, differentiated, grad, create_graph=True))
    made = [next(found) if t.requires_grad else None for t in of]
    return [*made, *([] if wanted else [None])]


for _name, _kernel, _shapes in (
    ("attention_rows", _attention_rows, blocks.fake),
    ("attention_rows_backward", _attention_rows_backward, blocks.fake_backward),
):
    kernels.register(_library, _name, _kernel, _shapes)
torch.library.register_autograd(
    "autopar::attention_rows", _differentiated, setup_context=save_for_backward, lib=_library
)
