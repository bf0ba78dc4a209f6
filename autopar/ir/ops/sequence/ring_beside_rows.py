"""Attention in a ring beside tensors of queries times keys: biases, and what dropout keeps.

Keys and values go round as in `autopar.ir.ops.sequence.ring_attention`. Biases, and what dropout keeps, stay: each
device has the rows of its queries, of all keys, and takes the columns of the keys that are here in a step. So does the
gradient of a bias: it is put together of the columns of all steps. Of a bias that is the same for all queries each
device has the columns of its keys; that is gathered, and its gradient is summed.

Blocks are those of `autopar.ir.ops.formula.attention_block`: a bias may hide all keys of a query by large numbers, and
which ones is not known. Under a causal mask blocks are those of the sequence: what is hidden is computed, too.

Functions here are called with local tensors, or with their proxies in a graph; ``context`` is that of a
`autopar.rules.rule.Lowering`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.ops.attention_kernels import NOTHING, wide_dtype
from autopar.ir.ops.balanced_attention import shape_of, value_of
from autopar.ir.ops.formula.attention_block import attention_block, attention_block_backward, attention_block_log
from autopar.ir.ops.sequence.masked_parts import joined

aten = torch.ops.aten


@dataclass(frozen=True)
class Rows:
    """Arguments of attention from the bias on.

    Attributes:
        bias: of this device's queries and all keys, or of its keys alone.
        kept: of this device's queries and all keys.
        dropout_p: see `autopar.ir.ops.attention.attention`.
        is_causal: see there.
        scale: see there.
        cap: see `autopar.ir.ops.formula.attention_rows.attention_rows`.
        placed: see there.
        shifted: the logarithm is that of `attention_rows`; else that of kernels.
    """

    bias: Any
    kept: Any
    dropout_p: float
    is_causal: bool
    scale: float | None
    cap: float | None = None
    placed: bool = False
    shifted: bool = False

    @property
    def numbers(self) -> tuple[Any, ...]:
        """Of a block."""
        return self.dropout_p, self.scale, self.cap, self.placed


def attend(context: Any, query: Any, key: Any, value: Any, rows: Rows) -> tuple[Any, Any]:
    """The result ``[batch, heads, queries, value_head]`` and logarithm of this device's queries."""
    work = _Work(context, query, key, rows)
    dtype, shift, found = value_of(query).dtype, work.shift(), None
    for step, keys in work.ring(aten.cat.default([key, value], 3)):
        made = attention_block(query, *work.apart(keys), *work.columns(step), shift, *rows.numbers)
        made = _to(made[0], value_of(made[1]).dtype), made[1]
        found = made if found is None else joined(*found, *made)
    assert found is not None
    out, log = found
    if not rows.shifted:
        # As of kernels: of all that was added, and 0 where nothing is seen.
        whole = log if rows.bias is None else aten.add.Tensor(log, aten.squeeze.dim(shift, -1))
        log = aten.masked_fill.Scalar(whole, aten.lt.Scalar(log, NOTHING / 2), 0.0)
    return _to(out, dtype), log


def gradients(
    context: Any, grad: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, rows: Rows, wanted: bool
) -> tuple[Any, Any, Any, Any]:
    """Gradients of this device's queries, keys and values, and of its part of the bias if that is wanted."""
    work = _Work(context, query, key, rows)
    dtype, wide = value_of(query).dtype, value_of(logsumexp).dtype
    shift = work.shift()
    log = logsumexp
    if not rows.shifted:
        of_all = context.parts * work.size
        log = attention_block_log(query, key, value, work.bias, rows.kept, shift, logsumexp, of_all, wanted)
    of_query, arrive, of_bias = None, None, list[Any]()
    for step, keys in work.ring(aten.cat.default([key, value], 3)):
        tensors = (query, *work.apart(keys), *work.columns(step), shift, out, log)
        made = attention_block_backward(grad, *tensors, *rows.numbers, wanted)
        if wanted:
            of_bias.append(made[3])
        term, of_keys = _to(made[0], wide), _to(aten.cat.default([made[1], made[2]], 3), wide)
        of_query = term if of_query is None else aten.add.Tensor(of_query, term)
        if arrive is not None:
            of_keys = aten.add.Tensor(arrive(), of_keys)
        arrive = context.start_shift(of_keys) if context.parts > 1 else None
    of_keys = _to(of_keys if arrive is None else arrive(), dtype)
    return _to(of_query, dtype), *work.apart(of_keys), work.gradient(of_bias) if wanted else None


class _Work:
    """One device's queries, and the blocks of keys that come to it."""

    def __init__(self, context: Any, query: Any, key: Any, rows: Rows) -> None:
        self.context, self.rows, self.query = context, rows, query
        self.queries, (_, _, self.size, self.head) = shape_of(query)[2], shape_of(key)
        self.index, self.bias = context.axis_index(), rows.bias
        shape = [1, 1] if rows.bias is None else shape_of(rows.bias)
        self.has_keys = shape[-1] > 1
        # Rows have all keys; a device may have a row alone, where another axis splits queries, too.
        self.of_keys = self.has_keys and shape[-1] == self.size and context.parts > 1
        if self.of_keys:
            blocks = context.all_gather(rows.bias)  # [parts, ..., 1, keys of a device]
            last = aten.permute.default(blocks, [*range(1, len(shape)), 0, len(shape)])
            self.bias = aten.reshape.default(last, [*shape[:-1], context.parts * self.size])

    def ring(self, keys: Any) -> Iterator[tuple[int, Any]]:
        """Each step with the keys and values that are here then, the next ones being on their way."""
        for step in self.context.each_step():
            arrive = self.context.start_shift(keys) if step + 1 < self.context.steps else None
            yield step, keys
            keys = keys if arrive is None else arrive()

    def apart(self, keys: Any) -> tuple[Any, Any]:
        """Keys and values, or their gradients."""
        ends = ((0, self.head), (self.head, shape_of(keys)[3]))
        key, value = (aten.slice.Tensor(keys, 3, a, b) for a, b in ends)
        return key, value

    def columns(self, step: int) -> tuple[Any, Any]:
        """What is added and kept for the keys that are here in a step: those of the device so many before this one."""
        behind = self.index + (self.context.parts - step)
        first = (behind - behind // self.context.parts * self.context.parts) * self.size
        bias = self._some(self.bias, first) if self.has_keys else self.bias
        if self.rows.is_causal:
            # Row r of this device is query ``index * queries + r``, which sees the keys up to itself.
            hidden = aten.new_full.default(self.query, [self.queries, self.size], -math.inf)
            hidden = aten.triu.default(hidden, self.index * self.queries - first + 1)
            bias = hidden if bias is None else aten.add.Tensor(bias, hidden)
        return bias, None if self.rows.kept is None else self._some(self.rows.kept, first)

    def _some(self, tensor: Any, first: Any) -> Any:
        return aten.slice.Tensor(tensor, len(shape_of(tensor)) - 1, first, first + self.size)

    def no_shift(self) -> Any:
        """Zero for all queries."""
        return aten.new_zeros.default(self.query, [1] * 4, dtype=wide_dtype(value_of(self.query)))

    def shift(self) -> Any:
        """The largest number that is added to any score of each query."""
        if self.bias is None:
            return self.no_shift()
        largest = _to(aten.amax.default(self.bias, [-1], True), wide_dtype(value_of(self.query)))
        return aten.masked_fill.Scalar(largest, aten.eq.Scalar(largest, -math.inf), 0.0)

    def gradient(self, terms: list[Any]) -> Any:
        """The gradient of this device's part of the bias, from those of the columns of each step."""
        if not self.has_keys:
            total = aten.alias.default(terms[0])  # another tensor than the operator's own result
            for term in terms[1:]:
                total = aten.add.Tensor(total, term)
            return total
        # The last step's keys are those of the device behind this one, and so on around to its own.
        dim = len(shape_of(terms[0])) - 1
        around = aten.cat.default(terms[::-1], dim)
        whole = aten.roll.default(around, [(self.index + 1) * self.size], [dim])
        return self._some(self.context.all_reduce(whole, "sum"), self.index * self.size) if self.of_keys else whole


def _to(tensor: Any, dtype: torch.dtype) -> Any:
    return tensor if value_of(tensor).dtype == dtype else aten._to_copy.default(tensor, dtype=dtype)
