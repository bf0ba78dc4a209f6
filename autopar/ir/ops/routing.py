"""Tokens in the order of their experts: the operators behind the sort of a mixture of experts.

A token goes to ``k`` experts; its *pairs* ``(token, expert)`` are sorted by expert, so that the rows of each expert
follow one another and one grouped product computes all. Which order that is, nobody sees who reads the tokens again:
what each device sorts of its own tokens serves as well as a part of the whole order. That is what these operators say,
and what no operator of torch can: `autopar.passes.canonicalize.experts` puts them in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# Must stay alive: torch removes the operators with the library object.
_library: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("sort_by_expert(Tensor experts, int k, int count) -> (Tensor, Tensor)")
_library.define("route(Tensor tokens, Tensor order, int k) -> Tensor")
_library.define("collect(Tensor rows, Tensor order, int k, int count) -> Tensor")
_library.define("group_ends(Tensor experts, int count) -> Tensor")
_library.define("add_by_expert(Tensor rows, Tensor experts, int count) -> Tensor")
_library.define("multiply_by_expert(Tensor rows, Tensor weight, Tensor ends) -> Tensor")
_library.define("outer_by_expert(Tensor left, Tensor right, Tensor ends) -> Tensor")


def _sort_by_expert(experts: Tensor, k: int, count: int) -> tuple[Tensor, Tensor]:
    # Stable: replicas, which sort the same numbers, get the same order.
    found, order = torch.sort(experts, stable=True)
    return found, order


def _route(tokens: Tensor, order: Tensor, k: int) -> Tensor:
    return tokens.index_select(0, order if k == 1 else order // k)


def _collect(rows: Tensor, order: Tensor, k: int, count: int) -> Tensor:
    # Of a part of the rows the other pairs are zero.
    make = rows.new_empty if len(rows) == count else rows.new_zeros
    pairs = make((count, *rows.shape[1:]))
    pairs[order] = rows
    return pairs if k == 1 else pairs.reshape(-1, k, *rows.shape[1:]).sum(1, dtype=rows.dtype)


def _group_ends(experts: Tensor, count: int) -> Tensor:
    numbers = torch.arange(count, device=experts.device, dtype=experts.dtype)
    # Sorted: no histogram is needed, nor any operator that adds in another order each time.
    return torch.searchsorted(experts.contiguous(), numbers, right=True, out_int32=True)


def _add_by_expert(rows: Tensor, experts: Tensor, count: int) -> Tensor:
    return rows.new_zeros(count, *rows.shape[1:]).index_add(0, experts, rows)


def _groups(ends: Tensor) -> Iterator[tuple[int, int, int]]:
    """The experts that have rows, with where these begin and end; the host waits for the device."""
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            yield expert, start, end
        start = end


def _has_kernel(*operands: Tensor) -> bool:
    """Whether torch's grouped product takes operands: of 16-bit numbers, in whole vectors of 16 bytes."""
    return all(t.dtype == torch.bfloat16 and t.numel() and not t.data_ptr() % 16
               and sum(s == 1 for s in t.stride()[-2:]) == 1
               and all(s == 1 or not s % 8 for s in t.stride()) for t in operands)  # fmt: skip


def _multiply_by_expert(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if _has_kernel(rows, weight) and not weight.shape[2] % 8:
        product: Tensor = torch.ops.aten._grouped_mm.default(rows, weight, ends)
        return product
    made = rows.new_zeros(len(rows), weight.shape[2])
    for expert, start, end in _groups(ends):
        torch.mm(rows[start:end], weight[expert], out=made[start:end])
    return made


def _outer_by_expert(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    if _has_kernel(left, right) and not right.shape[1] % 8 and not left.shape[1] % 8:
        product: Tensor = torch.ops.aten._grouped_mm.default(left.T, right, ends)
        return product
    made = left.new_zeros(len(ends), left.shape[1], right.shape[1])
    for expert, start, end in _groups(ends):
        torch.mm(left[start:end].T, right[start:end], out=made[expert])
    return made


for _name, _function in (
    ("sort_by_expert", _sort_by_expert), ("route", _route), ("collect", _collect), ("group_ends", _group_ends),
    ("add_by_expert", _add_by_expert), ("multiply_by_expert", _multiply_by_expert),
    ("outer_by_expert", _outer_by_expert),
):  # fmt: skip
    _library.impl(_name, _function, "CompositeExplicitAutograd")
_library.impl("multiply_by_expert", lambda rows, weight, ends: rows.new_empty(len(rows), weight.shape[2]), "Meta")
_library.impl(
    "outer_by_expert", lambda left, right, ends: left.new_empty(len(ends), left.shape[1], right.shape[1]), "Meta"
)

sort_by_expert = torch.ops.autopar.sort_by_expert.default
"""The sorted experts ``[pairs]`` of pairs ``[pairs]``, and the pair at each place: the *order*.

A token's ``k`` pairs follow one another before; no device has some of them only. There are ``count`` experts; 0 where
pairs may be of none, so that devices cannot have experts of their own.
"""

route = torch.ops.autopar.route.default
"""Rows ``[tokens * k, ...]`` of tokens ``[tokens, ...]`` in an order of their pairs; with ``k = 1``, of pairs."""

collect = torch.ops.autopar.collect.default
"""Tokens ``[tokens, ...]`` of rows ``[tokens * k, ...]`` in an order, those of a token added up: what `route` is the
transpose of. ``count`` is ``tokens * k``, also where rows and order are of some experts only: then these are terms."""

group_ends = torch.ops.autopar.group_ends.default
"""Where the rows of each of ``count`` experts end, int32 ``[count]``, given the sorted experts."""

add_by_expert = torch.ops.autopar.add_by_expert.default
"""Sums ``[count, ...]`` of the rows of each of ``count`` experts."""

multiply_by_expert = torch.ops.autopar.multiply_by_expert.default
"""Rows ``[rows, k]`` times the matrix of their expert, of ``[experts, k, n]``, given where each expert's rows end."""

outer_by_expert = torch.ops.autopar.outer_by_expert.default
"""Sums ``[experts, m, n]`` of the outer products of rows ``[rows, m]`` and ``[rows, n]`` of each expert."""
