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

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ir.ops import attention_kernels as kernels
from autopar.ir.ops.attention import save_for_backward

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
    The result, ``[batch, heads, queries, value_head]``, and the logarithm of each query's sum of exponentials.
"""

attention_rows_backward = torch.ops.autopar.attention_rows_backward.default
"""Gradients of query, key, value and bias; that of the bias is empty where it is not asked for."""

LARGEST = 2**25
"""Scores that are computed at a time."""


def rows_at_a_time(scores: int, queries: int) -> int:
    """Of how many queries scores are computed at a time, of one of which there are so many."""
    return max(1, min(queries, LARGEST // max(scores, 1)))


def _bands(query: Tensor, key: Tensor) -> Iterator[slice]:
    rows = rows_at_a_time(query.shape[0] * query.shape[1] * key.shape[2], query.shape[2])
    for start in range(0, query.shape[2], rows):
        yield slice(start, start + rows)


def _some(tensor: Tensor | None, rows: slice) -> Tensor | None:
    """Rows of what has the shape of scores, or is broadcast to it."""
    if tensor is None or tensor.shape[-2] == 1:
        return tensor
    return tensor[..., rows, :]


def _attention_rows(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, kept: Tensor | None, dropout_p: float,
    scale: float | None, cap: float | None, placed: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    made = [
        kernels.math(
            query[:, :, rows],
            key,
            value,
            _some(bias, rows),
            _some(kept, rows),
            dropout_p,
            False,
            scale,
            cap,
            True,
            placed,
        )
        for rows in _bands(query, key)
    ]
    out, log = (torch.cat([m[i] for m in made], 2) for i in (0, 1))
    return out, log


def _attention_rows_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, kept: Tensor | None, out: Tensor,
    logsumexp: Tensor, dropout_p: float, scale: float | None, cap: float | None, placed: bool, bias_gradient: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    wide = kernels.wide_dtype(query)
    of_query, (of_key, of_value) = torch.empty_like(query), (torch.zeros_like(t, dtype=wide) for t in (key, value))
    of_bias = query.new_empty(0) if bias is None or not bias_gradient else torch.zeros_like(bias)
    for rows in _bands(query, key):
        found = kernels.math_backward(
            grad[:, :, rows], query[:, :, rows], key, value, _some(bias, rows), _some(kept, rows), out[:, :, rows],
            logsumexp[:, :, rows], dropout_p, False, scale, bias_gradient, cap, True, placed,
        )  # fmt: skip
        of_query[:, :, rows] = found[0]
        of_key += found[1]
        of_value += found[2]
        if of_bias.numel():
            part = _some(of_bias, rows)
            assert part is not None
            part += found[3]
    return of_query, of_key.to(key.dtype), of_value.to(value.dtype), of_bias


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    shape = query.shape[:3]
    out = query.new_empty((*shape, value.shape[3]))
    return out, query.new_empty(shape, dtype=kernels.wide_dtype(query))


def _fake_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    gradients = [torch.empty_like(t) for t in (query, key, value)]
    return *gradients, torch.empty_like(bias) if bias is not None and rest[-1] else query.new_empty(0)


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
    out = kernels.math(query, key, value, bias, kept, dropout_p, False, scale, cap, True, placed)[0]
    of = [query, key, value, *([bias] if wanted else [])]
    differentiated = [t for t in of if t.requires_grad]
    found = iter(torch.autograd.grad(out, differentiated, grad, create_graph=True))
    made = [next(found) if t.requires_grad else None for t in of]
    return [*made, *([] if wanted else [None])]


for _name, _kernel, _shapes in (
    ("attention_rows", _attention_rows, _fake),
    ("attention_rows_backward", _attention_rows_backward, _fake_backward),
):
    _library.impl(_name, _kernel, "CPU")
    _library.impl(_name, _kernel, "CUDA")
    torch.library.register_fake(f"autopar::{_name}", _shapes, lib=_library)
torch.library.register_autograd(
    "autopar::attention_rows", _differentiated, setup_context=save_for_backward, lib=_library
)
