"""Attention of queries to a block of their keys, by its formula: what a ring joins, whatever large numbers hide.

A kernel gives the logarithm of a query's sum of exponentials. Where a number such as the least of its dtype is added to
all of its scores, that has lost how many keys there are, and blocks would be joined in wrong shares. Here logarithms
are of scores less a *shift*, the largest number that is added to any score of the query: they have all of their digits.

Before::

    out, logsumexp = autopar.attention(q, k, v, bias, kept, 0.1, False, None)

After (of one block)::

    out, log = autopar.attention_block(q, some_k, some_v, some_bias, some_kept, largest_bias, 0.1, None, None, False)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autopar.ir.ops import attention_kernels as kernels

# Must stay alive: torch removes the operators with the library object.
_library: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? kept, Tensor shift"
_NUMBERS = "float dropout_p, float? scale, float? cap, bool placed"
_library.define(f"attention_block({_TENSORS}, {_NUMBERS}) -> (Tensor, Tensor)")
_library.define(
    f"attention_block_backward(Tensor grad, {_TENSORS}, Tensor out, Tensor logsumexp, {_NUMBERS}, bool bias_gradient) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)

_library.define(
    "attention_block_log(Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? kept, Tensor shift, "
    "Tensor logsumexp, int keys, bool bias_gradient) -> Tensor"
)

attention_block = torch.ops.autopar.attention_block.default
"""Attention to some keys.

Args:
    query: see `autopar.ir.ops.formula.attention_rows.attention_rows`, as for all others but these:
    key: of the block, as the value, and what is added and kept.
    value: see there.
    bias: see there.
    kept: see there.
    shift: of each query, broadcasts to ``[batch, heads, queries, 1]``.
    dropout_p: see there.
    scale: see there.
    cap: see there.
    placed: see there.

Returns:
    The result, and the logarithm of each query's sum of exponentials of scores less the shift; `NOTHING` of
    `autopar.ir.ops.attention_kernels` where it sees no key.
"""

attention_block_backward = torch.ops.autopar.attention_block_backward.default
"""Gradients of query, key, value and bias, from the result and the logarithm for all keys; that of the bias is empty
where it is not asked for."""

attention_block_log = torch.ops.autopar.attention_block_log.default
"""The logarithm for all keys less the shift, from that of `autopar.ir.ops.attention.attention`.

Args:
    query: as of a block.
    key: as of a block.
    value: as of a block.
    bias: what is added for all keys.
    kept: as of a block.
    shift: as of a block.
    logsumexp: the logarithm.
    keys: how many there are in all.
    bias_gradient: that of the bias is asked for.
"""

LOST = 8
"""Scores are lost in numbers whose digits are this far apart."""

LARGEST = 2**25
"""Scores that are computed at a time."""


def rows_at_a_time(scores: int, queries: int) -> int:
    """Of how many queries scores are computed at a time, of one of which there are so many."""
    return max(1, min(queries, LARGEST // max(scores, 1)))


def shift_of(query: Tensor, bias: Tensor | None) -> Tensor:
    """The largest number that is added to any score of each query, where all of its keys are known."""
    if bias is None:
        return query.new_zeros((1, 1, 1, 1), dtype=kernels.wide_dtype(query))
    largest = bias.amax(-1, keepdim=True).to(kernels.wide_dtype(query))
    return largest.masked_fill(largest == -torch.inf, 0.0)


def _bands(query: Tensor, key: Tensor) -> Iterator[slice]:
    rows = rows_at_a_time(query.shape[0] * query.shape[1] * key.shape[2], query.shape[2])
    for start in range(0, query.shape[2], rows):
        yield slice(start, start + rows)


def _some(tensor: Tensor | None, rows: slice) -> Any:
    """Rows of what has the shape of scores, or is broadcast to it."""
    if tensor is None or tensor.shape[-2] == 1:
        return tensor
    return tensor[..., rows, :]


def forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, kept: Tensor | None, shift: Tensor,
    dropout_p: float, scale: float | None, cap: float | None, placed: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The operator's kernel."""
    made = [
        kernels.math(
            query[:, :, rows], key, value, _some(bias, rows), _some(kept, rows), dropout_p, False, scale, cap, placed,
            _some(shift, rows),
        )
        for rows in _bands(query, key)
    ]  # fmt: skip
    out, log = (torch.cat([m[i] for m in made], 2) for i in (0, 1))
    return out, log


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, kept: Tensor | None, shift: Tensor,
    out: Tensor, logsumexp: Tensor, dropout_p: float, scale: float | None, cap: float | None, placed: bool,
    bias_gradient: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """That of its gradients."""
    wide = kernels.wide_dtype(query)
    of_query, (of_key, of_value) = torch.empty_like(query), (torch.zeros_like(t, dtype=wide) for t in (key, value))
    of_bias = query.new_empty(0) if bias is None or not bias_gradient else torch.zeros_like(bias)
    for rows in _bands(query, key):
        found = kernels.math_backward(
            grad[:, :, rows], query[:, :, rows], key, value, _some(bias, rows), _some(kept, rows), out[:, :, rows],
            logsumexp[:, :, rows], dropout_p, False, scale, bias_gradient, cap, placed, _some(shift, rows),
        )  # fmt: skip
        of_query[:, :, rows] = found[0]
        of_key += found[1]
        of_value += found[2]
        if of_bias.numel():
            part = _some(of_bias, rows)
            part += found[3]
    return of_query, of_key.to(key.dtype), of_value.to(value.dtype), of_bias


def _log(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, kept: Tensor | None, shift: Tensor,
    logsumexp: Tensor, keys: int, bias_gradient: bool,
) -> Tensor:  # fmt: skip
    log = logsumexp - shift.squeeze(-1)
    if bias is not None:
        some = bias[..., : key.shape[2]]
        name, _ = kernels.choose(query, key, value, some, 0.0, False)
        # Kernels compute gradients from the sum as it is in large numbers, which is lost in them; the formula does not.
        if kept is not None or name == kernels.MATH or (name == kernels.CPU and bias_gradient):
            total = torch.logsumexp(bias.to(shift.dtype) - shift, -1)
            total = total if bias.shape[-1] > 1 else total + math.log(keys)
            lost = shift.abs() >= LOST / torch.finfo(shift.dtype).eps
            log = torch.where(lost.squeeze(-1), total, log)
    # Kernels give minus infinity, too, where nothing is seen.
    return log.clamp_min(kernels.NOTHING)


def _fake_log(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(rest[3], memory_format=torch.contiguous_format)


def fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Shapes of the results."""
    shape = query.shape[:3]
    out = query.new_empty((*shape, value.shape[3]))
    return out, query.new_empty(shape, dtype=kernels.wide_dtype(query))


def fake_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    """Shapes of the gradients."""
    gradients = [torch.empty_like(t) for t in (query, key, value)]
    return *gradients, torch.empty_like(bias) if bias is not None and rest[-1] else query.new_empty(0)


for _name, _kernel, _shapes in (
    ("attention_block", forward, fake),
    ("attention_block_backward", backward, fake_backward),
    ("attention_block_log", _log, _fake_log),
):
    kernels.register(_library, _name, _kernel, _shapes)
