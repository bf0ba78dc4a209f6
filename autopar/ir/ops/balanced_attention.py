"""Causal attention of a part of the queries, with as much work on each device and nothing computed that is hidden.

The sequence is cut into ``2 parts`` blocks; device ``r`` of ``parts`` has queries ``2 r`` and ``2 r + 1``. Late queries
see more keys: for the time of the kernels each device takes blocks ``r`` and ``2 parts - 1 - r``, an early and a late
one (as Megatron-LM's context parallelism assigns the sequence). What these see of all keys is, on every device,

* the late block: the first ``parts`` blocks of keys;
* either of them: the blocks between, ``parts - 1`` in all, ``r`` of them the early block's;
* each its own, as far as a causal mask lets it.

Three calls of a kernel, of sizes that are the same on every device, and none of them takes a mask. Their results are
joined by their sums of exponentials (T. Dao et al., "FlashAttention", 2022); gradients are sums, since a kernel's
backward takes the joined result and logarithm (H. Liu et al., "Ring attention", 2023).

Functions here are called with local tensors, or with their proxies in a graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ir.ops.attention import attention, attention_backward
from autopar.ir.ops.collectives import GROUP_ARGUMENT, c10d

aten = torch.ops.aten

# Must stay alive: torch removes the operators with the library object.
_library: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("swap_blocks(Tensor blocks, int index, int parts, bool back, str group) -> Tensor")


def owner(block: int, parts: int) -> int:
    """The device that attends for a block."""
    return min(block, 2 * parts - 1 - block)


def _swap_blocks(blocks: Tensor, index: int, parts: int, back: bool, group: str) -> Tensor:
    size = blocks.shape[0] // 2
    own, balanced = (2 * index, 2 * index + 1), (index, 2 * parts - 1 - index)
    away = [size * sum(owner(m, parts) == t for m in own) for t in range(parts)]
    home = [size * sum(m // 2 == t for m in balanced) for t in range(parts)]
    # Rows go in the order of the devices that they go to, or come from; that of two late blocks is the other one.
    turned = owner(own[0], parts) > owner(own[1], parts)
    if not back:
        rows = torch.cat([*reversed(blocks.chunk(2))]) if turned else blocks.contiguous()
        there: Tensor = c10d.all_to_all_single(rows, home, away, group)
        return there
    found: Tensor = c10d.all_to_all_single(blocks.contiguous(), away, home, group)
    return torch.cat([*reversed(c10d.wait_tensor(found).chunk(2))]) if turned else found


_library.impl("swap_blocks", _swap_blocks, "CompositeExplicitAutograd")
_library.impl("swap_blocks", lambda blocks, *_: torch.empty_like(blocks, memory_format=torch.contiguous_format), "Meta")


def swapped(blocks: Sequence[Tensor], back: bool) -> list[Tensor]:
    """What each device has after `swap_blocks`, from what each had before."""
    parts, halves = len(blocks), [half for pair in blocks for half in pair.chunk(2)]
    # In the order of the sequence; or, coming back, an early and a late one of each device.
    early_late = [m for r in range(parts) for m in (r, 2 * parts - 1 - r)]
    order = [early_late.index(m) for m in range(2 * parts)] if back else early_late
    return [torch.cat([halves[m] for m in order[2 * i : 2 * i + 2]]) for i in range(parts)]


swap_blocks = torch.ops.autopar.swap_blocks.default
"""Two blocks ``[2 size, ...]`` of each of ``parts`` devices for the two that balance, or back, given its ``index``."""

GROUP_ARGUMENT[swap_blocks] = 4

Exchange = Callable[[Any, bool], Any]
"""`swap_blocks` of ``[queries, ...]`` over the devices that share the queries, forth or back."""


def attend(
    exchange: Exchange, index: Any, parts: int, query: Any, key: Any, value: Any, scale: float | None
) -> tuple[Any, Any]:
    """The result ``[batch, heads, queries, value_head]`` and logarithm of this device's queries.

    Args:
        exchange: of blocks.
        index: this device's number.
        parts: of how many.
        query: this device's.
        key: whole.
        value: whole.
        scale: of the scores.
    """
    work = _Blocks(index, parts, query)
    both = swap_rows(exchange, query)
    late = aten.slice.Tensor(both, 2, work.size, 2 * work.size)
    first, first_log = _kernel(late, work.early_keys(key), work.early_keys(value), False, scale)
    blocks = work.between(both)
    other, other_log = _kernel(blocks, work.keys_between(key), work.keys_between(value), False, scale)
    own, own_log = _kernel(work.stacked(both), work.own_keys(key), work.own_keys(value), True, scale)
    # [blocks, batch, heads, size]: what the early block does not see has no part in its sum.
    logs, values = work.by_block(other_log), work.by_block(other)
    is_early = work.is_early(other_log)
    results, sums = [], []
    for early in (True, False):
        mine = aten.logical_not(is_early) if early else is_early
        pieces = [aten.masked_fill.Scalar(logs, mine, -math.inf), work.of_pair(own_log, early)]
        outs = [values, work.of_pair(own, early)]
        if not early:
            pieces.append(aten.unsqueeze.default(first_log, 0))
            outs.append(aten.unsqueeze.default(first, 0))
        total = aten.logsumexp.default(aten.cat.default(pieces, 0), [0])
        joined = None
        for log, out in zip(pieces, outs, strict=True):
            share = aten.unsqueeze.default(aten.exp.default(aten.sub.Tensor(log, total)), -1)
            term = aten.sum.dim_IntList(aten.mul.Tensor(share, out), [0])
            joined = term if joined is None else aten.add.Tensor(joined, term)
        results.append(joined)
        sums.append(total)
    made = aten._to_copy.default(aten.cat.default(results, 2), dtype=value_of(query).dtype)
    return swap_rows(exchange, made, back=True), swap_rows(exchange, aten.cat.default(sums, 2), back=True)


def gradients(
    exchange: Exchange, index: Any, parts: int,
    grad: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, scale: float | None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Gradients of this device's queries, and its terms of those of all keys and values.

    Args:
        exchange: of blocks.
        index: this device's number.
        parts: of how many.
        grad: of the result of this device's queries.
        query: this device's.
        key: whole.
        value: whole.
        out: the result.
        logsumexp: the logarithm.
        scale: of the scores.
    """
    work = _Blocks(index, parts, query)
    head, wide = shape_of(query)[3], shape_of(value)[3]
    together = swap_rows(exchange, aten.cat.default([query, grad, out], 3))
    both, given, made = (
        aten.slice.Tensor(together, 3, a, b)
        for a, b in ((0, head), (head, head + wide), (head + wide, head + 2 * wide))
    )
    log = swap_rows(exchange, logsumexp)

    def call(pick: Callable[[Any], Any], keys: Any, values: Any, causal: bool) -> list[Any]:
        g, q, o = (aten.contiguous.default(pick(t)) for t in (given, both, made))
        logs = aten.contiguous.default(pick(log))
        found = attention_backward(g, q, keys, values, None, None, o, logs, 0.0, causal, scale, False)
        return [found[i] for i in range(3)]

    first = call(
        lambda t: aten.slice.Tensor(t, 2, work.size, 2 * work.size), work.early_keys(key), work.early_keys(value), False
    )
    other = call(work.between, work.keys_between(key), work.keys_between(value), False)
    own = call(work.stacked, work.own_keys(key), work.own_keys(value), True)
    blocks = work.by_block(other[0])
    is_early = aten.unsqueeze.default(work.is_early(blocks), -1)
    halves = []
    for early in (True, False):
        mine = aten.logical_not(is_early) if early else is_early
        total = aten.sum.dim_IntList(aten.masked_fill.Scalar(blocks, mine, 0.0), [0])
        total = aten.add.Tensor(total, aten.squeeze.dim(work.of_pair(own[0], early), 0))
        halves.append(total if early else aten.add.Tensor(total, first[0]))
    of_query = swap_rows(exchange, aten.cat.default(halves, 2), back=True)
    of_key, of_value = (
        work.whole(first[i], other[i], own[i], shape_of(tensor)) for i, tensor in ((1, key), (2, value))
    )
    return of_query, of_key, of_value


def _kernel(query: Any, key: Any, value: Any, causal: bool, scale: float | None) -> tuple[Any, Any]:
    found = attention(aten.contiguous.default(query), key, value, None, None, 0.0, causal, scale)
    return found[0], found[1]


def value_of(tensor: Any) -> Tensor:
    """A tensor, or that of a proxy."""
    found: Tensor = tensor.node.meta["val"] if isinstance(tensor, torch.fx.Proxy) else tensor
    return found


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Of a tensor, or of a proxy's."""
    return tuple(value_of(tensor).shape)


def swap_rows(exchange: Exchange, tensor: Any, back: bool = False) -> Any:
    """A tensor ``[batch, heads, rows, ...]`` with the rows of the two blocks that balance, or back."""
    rest = value_of(tensor).ndim - 3
    front = aten.permute.default(tensor, [2, 0, 1, *([3] * rest)])
    moved = exchange(aten.contiguous.default(front), back)
    return aten.contiguous.default(aten.permute.default(moved, [1, 2, 0, *([3] * rest)]))


class _Blocks:
    """How one device's blocks are taken from its tensors, and put back."""

    def __init__(self, index: Any, parts: int, query: Any) -> None:
        self.index, self.parts, self.batch = index, parts, shape_of(query)[0]
        self.size = shape_of(query)[2] // 2
        self.late = 2 * parts - 1 - index
        self._made: dict[str, Any] = {}

    def early_keys(self, keys: Any) -> Any:
        """The first half, which the late block sees."""
        return aten.contiguous.default(aten.slice.Tensor(keys, 2, 0, self.parts * self.size))

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def _numbers(self, like: Any, count: int) -> Any:
        """0, 1, ..."""

        def make() -> Any:
            ones = aten.new_ones.default(like, [count], dtype=torch.int64)
            return aten.sub.Tensor(aten.cumsum.default(ones, 0), 1)

        return self._once(f"numbers {count}", make)

    def _early(self, like: Any) -> Any:
        """Which blocks of keys between are the early block's, ``[blocks]``."""
        return self._once("early", lambda: aten.lt.Scalar(self._numbers(like, self.parts - 1), self.index))

    def is_early(self, like: Any) -> Any:
        """The same as ``[blocks, 1, 1, 1]``."""
        return aten.reshape.default(self._early(like), [self.parts - 1, 1, 1, 1])

    def between(self, both: Any) -> Any:
        """The block of queries, early or late, for each block of keys between: ``[blocks batch, heads, size, ...]``."""

        def make() -> Any:
            return aten._to_copy.default(aten.logical_not.default(self._early(both)), dtype=torch.int64)

        return self._chosen(both, self._once("late", make), 2)

    def keys_between(self, keys: Any) -> Any:
        """Those blocks of keys: the first ``index``, and those that follow the first half."""
        return self._chosen(keys, self._places(keys), 2 * self.parts)

    def _places(self, like: Any) -> Any:
        def make() -> Any:
            numbers = self._numbers(like, self.parts - 1)
            return aten.where.self(self._early(like), numbers, aten.add.Tensor(numbers, self.parts - self.index))

        return self._once("places", make)

    def _own(self, like: Any) -> Any:
        """Numbers of the blocks that the device attends for."""

        def make() -> Any:
            steps = aten.mul.Tensor(self._numbers(like, 2), self.late - self.index)
            return aten.add.Tensor(steps, self.index)

        return self._once("own", make)

    def own_keys(self, keys: Any) -> Any:
        """Keys at the places of the device's queries, ``[2 batch, heads, size, ...]``."""
        return self._chosen(keys, self._own(keys), 2 * self.parts)

    def stacked(self, both: Any) -> Any:
        """The device's queries so."""
        return self._chosen(both, self._numbers(both, 2), 2)

    def _chosen(self, tensor: Any, places: Any, blocks: int) -> Any:
        """Blocks of dim 2 one after the other in the batch."""
        shape = list(shape_of(tensor))
        apart = aten.reshape.default(tensor, [*shape[:2], blocks, self.size, *shape[3:]])
        found = aten.index_select.default(apart, 2, places)
        order = [2, 0, 1, *range(3, len(shape) + 1)]
        return aten.reshape.default(aten.permute.default(found, order), [-1, shape[1], self.size, *shape[3:]])

    def by_block(self, tensor: Any) -> Any:
        """``[blocks, batch, heads, ...]`` of ``[blocks batch, heads, ...]``."""
        return aten.reshape.default(tensor, [-1, self.batch, *shape_of(tensor)[1:]])

    def of_pair(self, tensor: Any, early: bool) -> Any:
        """``[1, batch, heads, ...]`` of the early or the late block of ``[2 batch, heads, ...]``."""
        at = 0 if early else 1
        return aten.slice.Tensor(self.by_block(tensor), 0, at, at + 1)

    def whole(self, first: Any, other: Any, own: Any, shape: tuple[int, ...]) -> Any:
        """The gradient ``[batch, heads, keys, ...]`` from those of the parts of keys."""
        total = aten.new_zeros.default(first, [*shape[:2], 2 * self.parts, self.size, shape[3]])
        early = aten.reshape.default(first, [*shape[:2], self.parts, self.size, shape[3]])
        total = aten.slice_scatter.default(total, early, 2, 0, self.parts)
        for part, places in ((other, self._places(first)), (own, self._own(first))):
            blocks = aten.permute.default(self.by_block(part), [1, 2, 0, 3, 4])
            total = aten.index_add.default(total, 2, places, blocks)
        return aten.reshape.default(total, list(shape))
