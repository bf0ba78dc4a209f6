"""Attention under a mask's function whose queries are split, alone or with keys and values.

Queries alone: each device is told which it has, and computes the keys that their window leaves.

With keys and values, in one of two ways. Under a window that reaches over fewer devices than there are, the rows that
it reaches come from the neighbors, one after the other, and gradients of these go back the same way (a halo exchange).
Else keys and values go round in a ring, as in `autopar.ir.ops.sequence.ring_attention`, with what the formula reads of
them. Where large numbers may hide all keys of a query, all devices get these leaves before, and logarithms are of
scores less what is added most, as in `autopar.ir.ops.formula.attention_block`. Blocks are those of the sequence there:
under half a mask the last device computes in every step, the first in one, and the cost is that of the last.

Functions here are called with local tensors, or with their proxies in a graph; ``context`` is that of a
`autopar.rules.rule.Lowering`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.ir.ops.balanced_attention import shape_of, value_of
from autopar.ir.ops.sequence.masked_attention import (
    INFINITY,
    NUMBERS,
    attention_masked,
    attention_masked_backward,
    attention_masked_shift,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class Mask:
    """Arguments of the operator from the formula on."""

    formula: str
    added: bool
    before: int
    after: int
    first_query: Any
    first_key: Any
    positions: int
    scale: float | None
    table: Any = None
    cap: float | None = None
    hides: str = NUMBERS
    table_gradient: bool = False

    @property
    def arguments(self) -> tuple[Any, ...]:
        """In the order of the operator."""
        ends = (self.before, self.after, self.first_query, self.first_key, self.positions)
        return self.formula, self.added, *ends, self.scale, self.table, self.cap, self.hides

    @property
    def backward_arguments(self) -> tuple[Any, ...]:
        """The same of the gradients' operator."""
        return *self.arguments, self.table_gradient


def of_some_queries(context: Any, query: Any, key: Any, value: Any, leaves: Any, *mask: Any) -> Any:
    """Attention of this device's queries to all keys."""
    own = replace(Mask(*mask), first_query=context.axis_index() * context.local_size("q"))
    return attention_masked(query, key, value, leaves, *own.arguments)


def gradients_of_some_queries(
    context: Any, grad: Any, query: Any, key: Any, value: Any, leaves: Any, out: Any, log: Any, *mask: Any
) -> Any:
    """Its gradients; of keys and values the terms of this device's queries."""
    own = replace(Mask(*mask), first_query=context.axis_index() * context.local_size("q"))
    return attention_masked_backward(grad, query, key, value, leaves, out, log, *own.backward_arguments)


def is_joined(added: bool, hides: str) -> bool:
    """Whether blocks of keys can be joined: not where kernels add large numbers, in which their logarithms are lost."""
    return hides != NUMBERS or not added


def is_windowed(before: int, after: int, queries: int, keys: int) -> bool:
    """Whether a window hides any key of a whole sequence."""
    return before < queries - 1 or after < keys - 1


def hops(reach: int, size: int) -> int:
    """From how many neighbors on one side rows come."""
    return -(-reach // size)


def is_near(before: int, after: int, size: int, parts: int) -> bool:
    """Whether a window reaches over fewer devices than there are."""
    return hops(max(before, 0), size) + hops(max(after, 0), size) + 1 < parts


def attend(context: Any, query: Any, key: Any, value: Any, leaves: Any, *mask: Any) -> Any:
    """The result ``[batch, heads, queries, value_head]`` and logarithm of this device's queries.

    Args:
        context: of the lowering.
        query: this device's.
        key: this device's.
        value: this device's.
        leaves: this device's.
        mask: the operator's arguments from the formula on.
    """
    work = _Work(context, Mask(*mask), query, key, value, leaves)
    if work.is_near:
        return attention_masked(query, *work.apart(work.halo()), *work.halo_mask().arguments)
    dtype, wide, found, shift = value_of(query).dtype, None, None, work.shift()
    for step, block in work.ring():
        made = attention_masked(query, *work.apart(block), *work.ring_mask(step).arguments, shift)
        wide = value_of(made[1]).dtype
        out, log = _to(made[0], wide), made[1]
        found = (out, log) if found is None else joined(*found, out, log)
    assert found is not None
    return _to(found[0], dtype), found[1]


def gradients(
    context: Any, grad: Any, query: Any, key: Any, value: Any, leaves: Any, out: Any, log: Any, *mask: Any
) -> tuple[Any, Any, Any, Any]:
    """Gradients of this device's queries, keys and values, and the terms of its queries in that of the table.

    Args:
        context: of the lowering.
        grad: of the result of this device's queries.
        query: this device's.
        key: this device's.
        value: this device's.
        leaves: this device's.
        out: the result.
        log: the logarithm.
        mask: the operator's arguments from the formula on.
    """
    work = _Work(context, Mask(*mask), query, key, value, leaves)
    head, dtype, wide = shape_of(key)[3], value_of(query).dtype, value_of(log).dtype
    shift = None if work.is_near else work.shift()
    of_table: list[Any] = []

    def call(block: _Block, own: Mask) -> tuple[Any, Any]:
        keys, values, read = work.apart(block)
        made = attention_masked_backward(grad, query, keys, values, read, out, log, *own.backward_arguments, shift)
        if own.table_gradient:
            of_table.append(made[3])
        return made[0], _to(aten.cat.default([made[1], made[2]], 3), wide)

    if work.is_near:
        made, of_keys = call(work.halo(), work.halo_mask())
        of_query, of_keys = aten.alias.default(made), work.home(of_keys)
    else:
        of_query, arrive = None, None
        for step, block in work.ring():
            made, of_keys = call(block, work.ring_mask(step))
            term = _to(made, wide)
            of_query = term if of_query is None else aten.add.Tensor(of_query, term)
            if arrive is not None:
                of_keys = aten.add.Tensor(arrive(), of_keys)
            arrive = context.start_shift(of_keys) if context.parts > 1 else None
        of_keys = of_keys if arrive is None else arrive()
    of_keys = _to(of_keys, dtype)
    ends = ((0, head), (head, shape_of(of_keys)[3]))
    of_key, of_value = (aten.slice.Tensor(of_keys, 3, a, b) for a, b in ends)
    return _to(of_query, dtype), of_key, of_value, _sum(of_table)


def _sum(terms: list[Any]) -> Any:
    """The sum of what steps gave; None: they gave nothing."""
    found = None
    for term in terms:
        # Another tensor than the operator's own result, which is named otherwise.
        found = aten.alias.default(term) if found is None else aten.add.Tensor(found, term)
    return found


@dataclass(frozen=True)
class _Block:
    """Keys with values ``[batch, kv_heads, keys, head + value_head]``, and leaves that have keys."""

    keys: Any
    leaves: tuple[Any, ...]

    def each(self, function: Callable[[Any, int], Any]) -> _Block:
        """What a function gives of each tensor and the dim of its keys."""
        return _Block(function(self.keys, 2), tuple(function(t, 3) for t in self.leaves))


class _Work:
    """One device's part of the keys, and what comes to it."""

    def __init__(self, context: Any, mask: Mask, query: Any, key: Any, value: Any, leaves: Sequence[Any]) -> None:
        self.context, self.mask, self.query, self.head = context, mask, query, shape_of(key)[3]
        self.size, self.leaves = shape_of(key)[2], list(leaves)
        # Leaves of one key are the same for all of them, and stay.
        self.moving = [i for i, t in enumerate(leaves) if shape_of(t)[3] != 1]
        self.own = _Block(aten.cat.default([key, value], 3), tuple(leaves[i] for i in self.moving))
        self.first = context.axis_index() * shape_of(query)[2]
        self.low, self.high = (hops(max(n, 0), self.size) for n in (mask.before, mask.after))
        self.is_near = is_near(mask.before, mask.after, self.size, context.parts)

    def apart(self, block: _Block) -> tuple[Any, Any, list[Any]]:
        """Keys, values and all leaves."""
        wide, found = shape_of(block.keys)[3], list(self.leaves)
        for i, t in zip(self.moving, block.leaves, strict=True):
            found[i] = t
        key, value = (aten.slice.Tensor(block.keys, 3, a, b) for a, b in ((0, self.head), (self.head, wide)))
        return key, value, found

    def ring_mask(self, step: int) -> Mask:
        """Of the keys that are here in a step: those of the device so many before this one."""
        index, parts = self.context.axis_index(), self.context.parts
        behind = index + (parts - step)
        return replace(self.mask, first_query=self.first, first_key=(behind - behind // parts * parts) * self.size)

    def shift(self) -> Any:
        """The largest number that is added to any score of each query; None where it is not needed."""
        mask = self.mask
        if mask.hides in (INFINITY, NUMBERS):
            return None
        leaves = [self._of_all(t) if i in self.moving else t for i, t in enumerate(self.leaves)]
        ends = (mask.before, mask.after, self.first, mask.positions)
        return attention_masked_shift(self.query, leaves, mask.formula, mask.added, *ends, mask.table)

    def _of_all(self, leaf: Any) -> Any:
        """What all devices have of a leaf that has keys."""
        shape = shape_of(leaf)
        last = aten.permute.default(self.context.all_gather(leaf), [1, 2, 3, 0, 4])
        return aten.reshape.default(last, [*shape[:3], self.context.parts * shape[3]])

    def halo_mask(self) -> Mask:
        """Of the keys of this device and its neighbors."""
        return replace(self.mask, first_query=self.first, first_key=self.first - max(self.mask.before, 0))

    def ring(self) -> Iterator[tuple[int, _Block]]:
        """Each step with the block that is here then, the next one being on its way."""
        block = self.own
        for step in self.context.each_step():
            arrive, leaves = None, block.leaves
            if step + 1 < self.context.steps:
                arrive = self.context.start_shift(block.keys)
                leaves = tuple(
                    self.context.shift(t) for t in leaves
                )  # small: keys go beside the kernel, these before it
            yield step, block
            if arrive is not None:
                block = _Block(arrive(), leaves)

    def halo(self) -> _Block:
        """The keys of this device with those that its window reaches."""
        pieces = [self.own]
        for back, count, reach in ((False, self.low, self.mask.before), (True, self.high, self.mask.after)):
            came = self.own
            for hop in range(count):
                came = self._from_neighbor(came, self._rows(hop, count, reach), back)
                pieces = [*pieces, came] if back else [came, *pieces]
        if len(pieces) == 1:
            return pieces[0]
        keys = aten.cat.default([p.keys for p in pieces], 2)
        leaves = zip(*(p.leaves for p in pieces), strict=True)
        return _Block(keys, tuple(aten.cat.default(list(each), 3) for each in leaves))

    def _from_neighbor(self, block: _Block, rows: int, back: bool) -> _Block:
        """Rows of the block that a neighbor has."""
        return block.each(lambda t, dim: self.context.shift(self._end(t, dim, rows, not back), back=back))

    def home(self, grad: Any) -> Any:
        """This device's gradient of keys and values, from those of the keys that each device has got.

        What came around the ends is seen by no query there, and its gradient is zero.
        """
        start = max(self.mask.before, 0)
        own = aten.slice.Tensor(grad, 2, start, start + self.size)
        for back, count, reach in ((False, self.low, self.mask.before), (True, self.high, self.mask.after)):
            came, at = None, 0 if not back else shape_of(grad)[2]
            # The farthest first: from hop to hop what is for one device is added up.
            for hop in reversed(range(count)):
                rows = self._rows(hop, count, reach)
                ends = (at - rows, at) if back else (at, at + rows)
                piece = aten.slice.Tensor(grad, 2, *ends)
                at = ends[0] if back else ends[1]
                if came is not None:
                    piece = self._add_end(piece, came, not back)
                came = self.context.shift(aten.contiguous.default(piece), back=not back)
            if came is not None:
                own = self._add_end(own, came, not back)
        return own

    def _rows(self, hop: int, count: int, reach: int) -> int:
        """How many rows come in a hop: of the last one those that the window reaches."""
        return self.size if hop + 1 < count else reach - (count - 1) * self.size

    def _end(self, tensor: Any, dim: int, rows: int, last: bool) -> Any:
        size = shape_of(tensor)[dim]
        if rows == size:
            return tensor
        return aten.slice.Tensor(tensor, dim, size - rows if last else 0, size if last else rows)

    def _add_end(self, tensor: Any, came: Any, last: bool) -> Any:
        """A tensor with rows added to its last ones, or to its first ones."""
        size, rows = shape_of(tensor)[2], shape_of(came)[2]
        if rows == size:
            return aten.add.Tensor(tensor, came)
        start = size - rows if last else 0
        total = aten.add.Tensor(aten.slice.Tensor(tensor, 2, start, start + rows), came)
        return aten.slice_scatter.default(tensor, total, 2, start, start + rows)


def joined(before: Any, logs: Any, out: Any, log: Any) -> tuple[Any, Any]:
    """Result and logarithm of queries with what more keys give."""
    share = aten.unsqueeze.default(aten.sigmoid.default(aten.sub.Tensor(log, logs)), -1)
    return aten.lerp.Tensor(before, out, share), aten.logaddexp.default(logs, log)


def _to(tensor: Any, dtype: torch.dtype) -> Any:
    return tensor if value_of(tensor).dtype == dtype else aten._to_copy.default(tensor, dtype=dtype)
