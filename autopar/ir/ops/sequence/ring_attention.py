"""Attention whose queries, keys and values are all split: keys and values go round the devices in a ring.

Device ``r`` of ``parts`` has some queries, and keys and values of as many positions as any other. In step ``s`` it
attends to those of device ``r - s``, while those of device ``r - s - 1`` are on their way to it (H. Liu, M. Zaharia,
P. Abbeel, "Ring Attention with Blockwise Transformers", 2023). Results of the steps are joined by their sums of
exponentials, in the precision of these. In the backward pass the gradients of keys and values travel with them, a step
behind, and come home in the last one; a kernel's backward takes the joined result and logarithm, so that its gradients
are terms of sums.

Under a causal mask each device takes an early and a late block of the positions, as in
`autopar.ir.ops.balanced_attention`. Its own block of keys is causal. Of those of a device before it, both blocks of
queries see the early one; of those of a device behind it, the late queries see both. So late queries see early keys in
any case, and either early ones early keys, or late ones late keys: two calls of a kernel, of sizes that are the same on
every device, and none of them computes what is hidden.

Functions here are called with local tensors, or with their proxies in a graph; ``context`` is that of a
`autopar.rules.rule.Lowering`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.ir.ops.attention import attention, attention_backward
from autopar.ir.ops.balanced_attention import shape_of, swap_rows, value_of

aten = torch.ops.aten


def attend(context: Any, query: Any, key: Any, value: Any, causal: bool, scale: float | None) -> tuple[Any, Any]:
    """The result ``[batch, heads, queries, value_head]`` and logarithm of this device's queries.

    Args:
        context: of the lowering.
        query: this device's.
        key: this device's.
        value: this device's.
        causal: whether queries see earlier keys only; then there are as many of either, and an even number.
        scale: of the scores.
    """
    dtype, head, keys = value_of(query).dtype, shape_of(key)[3], aten.cat.default([key, value], 3)
    if causal:
        query, keys = (swap_rows(context.swap_blocks, t) for t in (query, keys))
    found: list[tuple[Any, Any]] = []
    for step in context.each_step():
        arrive = context.start_shift(keys) if step + 1 < context.steps else None
        if step == 0 or not causal:
            found = _joined(found, [(i, x, None) for i, x in enumerate(_own(query, keys, head, causal, scale))])
        else:
            seen, calls = _calls(context, step, query, keys)
            both, one = (_kernel(q, k, head, False, scale) for q, k in calls)
            found = _joined(found, [(1, both, None), (0, one, seen), (1, one, 1 - seen)])
        keys = keys if arrive is None else arrive()
    out, log = (aten.cat.default([x[i] for x in found], 2) if causal else found[0][i] for i in (0, 1))
    out = _to(out, dtype)
    if causal:
        return swap_rows(context.swap_blocks, out, back=True), swap_rows(context.swap_blocks, log, back=True)
    return out, log


def gradients(
    context: Any, grad: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, causal: bool,
    scale: float | None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Gradients of this device's queries, keys and values.

    Args:
        context: of the lowering.
        grad: of the result of this device's queries.
        query: this device's.
        key: this device's.
        value: this device's.
        out: the result.
        logsumexp: the logarithm.
        causal: see `attend`.
        scale: of the scores.
    """
    head, dtype = shape_of(key)[3], value_of(query).dtype
    keys = aten.cat.default([key, value], 3)
    if causal:
        given = aten.cat.default([query, grad, out], 3)
        given, keys, logsumexp = (swap_rows(context.swap_blocks, t) for t in (given, keys, logsumexp))
        wide = head + shape_of(value)[3]
        ends = ((0, head), (head, wide), (wide, shape_of(given)[3]))
        query, grad, out = (aten.slice.Tensor(given, 3, a, b) for a, b in ends)
    queries = _Queries(query, grad, out, logsumexp, head, scale)
    of_query: Any = None
    arrive_gradient: Callable[[], Any] | None = None
    for step in context.each_step():
        arrive = context.start_shift(keys) if step + 1 < context.steps else None
        if step == 0 or not causal:
            term, of_keys = queries.gradients(None, keys, causal)
            of_query = [term] if of_query is None else [aten.add.Tensor(of_query[0], term)]
            if causal:
                size = shape_of(term)[2] // 2
                of_query = [aten.slice.Tensor(term, 2, i * size, (i + 1) * size) for i in (0, 1)]
        else:
            seen, places = _places(context, step, shape_of(keys)[2] // 2)
            (late, of_early), (either, of_either) = (queries.gradients(q, _rows(keys, k), False) for q, k in places)
            # What early queries or keys have no part in is added to them with a factor of zero.
            of_query = [
                aten.add.Tensor(of_query[0], either, alpha=seen),
                aten.add.Tensor(aten.add.Tensor(of_query[1], late), either, alpha=1 - seen),
            ]
            first = aten.add.Tensor(of_early, of_either, alpha=seen)
            of_keys = aten.cat.default([first, aten.mul.Scalar(of_either, 1 - seen)], 2)
        if arrive_gradient is not None:
            of_keys = aten.add.Tensor(arrive_gradient(), of_keys)
        if context.parts > 1:
            arrive_gradient = context.start_shift(of_keys)
        keys = keys if arrive is None else arrive()
    of_keys = of_keys if arrive_gradient is None else arrive_gradient()
    made, of_keys = _to(aten.cat.default(of_query, 2) if causal else of_query[0], dtype), _to(of_keys, dtype)
    if causal:
        made, of_keys = (swap_rows(context.swap_blocks, t, back=True) for t in (made, of_keys))
    return made, *(aten.slice.Tensor(of_keys, 3, a, b) for a, b in ((0, head), (head, shape_of(of_keys)[3])))


Rows = tuple[Any, Any]
"""First and last of some positions of this device, the last excluded."""


def _places(context: Any, step: int, size: int) -> tuple[Any, list[tuple[Rows, Rows]]]:
    """Whether the keys of a step are of a device before this one, 1 or 0; queries and keys of both calls."""
    seen = (context.axis_index() + (context.parts - step)) // context.parts
    start = size - seen * size
    late, early, either = (size, 2 * size), (0, size), (start, start + size)
    return seen, [(late, early), (either, either)]


def _calls(context: Any, step: int, query: Any, keys: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    seen, places = _places(context, step, shape_of(keys)[2] // 2)
    return seen, [(_rows(query, q), _rows(keys, k)) for q, k in places]


def _rows(tensor: Any, rows: Rows) -> Any:
    return aten.slice.Tensor(tensor, 2, *rows)


def _kernel(query: Any, keys: Any, head: int, causal: bool, scale: float | None) -> tuple[Any, Any]:
    """Result and logarithm of a call, in the precision of the logarithm."""
    key, value = (aten.slice.Tensor(keys, 3, a, b) for a, b in ((0, head), (head, shape_of(keys)[3])))
    found = attention(query, key, value, None, None, 0.0, causal, scale)
    return _to(found[0], value_of(found[1]).dtype), found[1]


def _own(query: Any, keys: Any, head: int, causal: bool, scale: float | None) -> list[tuple[Any, Any]]:
    """Result and logarithm of all queries; under a causal mask of early and late ones."""
    out, log = _kernel(query, keys, head, causal, scale)
    if not causal:
        return [(out, log)]
    size = shape_of(query)[2] // 2
    return [(_rows(out, rows), _rows(log, rows)) for rows in ((0, size), (size, 2 * size))]


def _joined(found: list[tuple[Any, Any]], more: list[tuple[int, tuple[Any, Any], Any]]) -> list[tuple[Any, Any]]:
    """Results and logarithms of blocks of queries, each with what more keys give: block, result, and 0 if unseen."""
    found = list(found)
    for block, (out, log), seen in more:
        if block == len(found):
            found.append((out, log))
            continue
        before, logs = found[block]
        share = aten.sigmoid.default(aten.sub.Tensor(log, logs))
        total = aten.logaddexp.default(logs, log)
        if seen is not None:
            share = aten.mul.Scalar(share, seen)
            total = aten.add.Tensor(logs, aten.sub.Tensor(total, logs), alpha=seen)
        found[block] = aten.lerp.Tensor(before, out, aten.unsqueeze.default(share, -1)), total
    return found


class _Queries:
    """What the backward of a kernel takes beside keys and values."""

    def __init__(self, query: Any, grad: Any, out: Any, logsumexp: Any, head: int, scale: float | None) -> None:
        self.query, self.grad, self.out, self.log = query, grad, out, logsumexp
        self.head, self.scale = head, scale

    def gradients(self, rows: Rows | None, keys: Any, causal: bool) -> tuple[Any, Any]:
        """Gradients of some queries, and ``[..., head + value_head]`` of keys with values, in wide precision."""
        tensors = (self.grad, self.query, self.out, self.log)
        grad, query, out, log = tensors if rows is None else (_rows(t, rows) for t in tensors)
        key, value = (aten.slice.Tensor(keys, 3, a, b) for a, b in ((0, self.head), (self.head, shape_of(keys)[3])))
        log = aten.contiguous.default(log)
        found = attention_backward(grad, query, key, value, None, None, out, log, 0.0, causal, self.scale, False)
        of_keys = aten.cat.default([found[1], found[2]], 3)
        dtype = value_of(log).dtype
        return _to(found[0], dtype), _to(of_keys, dtype)


def _to(tensor: Any, dtype: torch.dtype) -> Any:
    return tensor if value_of(tensor).dtype == dtype else aten._to_copy.default(tensor, dtype=dtype)
