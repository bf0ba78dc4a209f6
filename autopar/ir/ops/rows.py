"""Operators that fill a tensor by blocks of rows: what a product is made of while parts of it are on their way.

Each writes rows of its first argument and returns it. A graph hands that tensor from one to the next and reads rows
of what the last one before it returned, so that its order is that of the data, whatever passes do. Collectives among
them are over when their result has been waited for: a wait is for all that are on their way into the tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ir.ops import float8
from autopar.ir.ops.collectives import GROUP_ARGUMENT, c10d

# Must stay alive: torch removes the operators with the library object.
_library: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("new_rows(Tensor like, int rows, int columns, ScalarType? dtype=None) -> Tensor")
_library.define("multiply_rows_(Tensor(a!) whole, Tensor rows, Tensor matrix, int start) -> Tensor(a!)")
_library.define(
    "multiply_float8_rows_(Tensor(a!) whole, Tensor rows, Tensor matrix, Tensor scale_rows, Tensor scale_matrix, "
    "str format_rows, str format_matrix, int start) -> Tensor(a!)"
)
_library.define("gather_rows_(Tensor(a!) whole, Tensor rows, int start, int parts, str group) -> Tensor(a!)")
_library.define("scatter_rows_(Tensor(a!) whole, Tensor terms, int start, int parts, str group) -> Tensor(a!)")
_library.define("reduce_rows_(Tensor(a!) whole, Tensor terms, int start, str group) -> Tensor(a!)")
_library.define("add_rows_(Tensor(a!) whole, Tensor rows, int start) -> Tensor(a!)")
_library.define("fill_rows_(Tensor(a!) whole, int dim, int blocks, int start, Scalar number) -> Tensor(a!)")


def _new_rows(like: Tensor, rows: int, columns: int, dtype: torch.dtype | None = None) -> Tensor:
    return like.new_empty((rows, columns), dtype=dtype)


def _multiply_rows(whole: Tensor, rows: Tensor, matrix: Tensor, start: int) -> Tensor:
    torch.mm(rows, matrix, out=whole.narrow(0, start, rows.shape[0]))
    return whole


def _multiply_float8_rows(
    whole: Tensor, rows: Tensor, matrix: Tensor, scale_rows: Tensor, scale_matrix: Tensor, format_rows: str,
    format_matrix: str, start: int,
) -> Tensor:  # fmt: skip
    out = whole.narrow(0, start, rows.shape[0])
    if scale_rows.is_floating_point():
        float8.product_into(out, rows, matrix, scale_rows, scale_matrix, format_rows, format_matrix)
    else:
        out.copy_(float8.block_product(rows, matrix, scale_rows, scale_matrix, format_rows, format_matrix, whole.dtype))
    return whole


def _gather_rows(whole: Tensor, rows: Tensor, start: int, parts: int, group: str) -> Tensor:
    out = whole.narrow(0, start, rows.shape[0] * parts)
    c10d.all_gather_into_tensor_out(rows, parts, group, out=out)
    return whole


def _scatter_rows(whole: Tensor, terms: Tensor, start: int, parts: int, group: str) -> Tensor:
    out = whole.narrow(0, start, terms.shape[0] // parts)
    c10d.reduce_scatter_tensor_out(terms, "sum", parts, group, out=out)
    return whole


def _reduce_rows(whole: Tensor, terms: Tensor, start: int, group: str) -> Tensor:
    out = whole.narrow(0, start, terms.shape[0])
    if terms.data_ptr() != out.data_ptr():  # the terms are in other memory
        out.copy_(terms)
    c10d.all_reduce_(out, "sum", group)
    return whole


def _add_rows(whole: Tensor, rows: Tensor, start: int) -> Tensor:
    whole.narrow(0, start, rows.shape[0]).add_(rows)
    return whole


def _fill_rows(whole: Tensor, dim: int, blocks: int, start: int, number: float) -> Tensor:
    size = whole.shape[dim] // blocks
    block = whole.view([*whole.shape[:dim], blocks, size, *whole.shape[dim + 1 :]])
    block.narrow(dim + 1, start, size - start).fill_(number)
    return whole


for _name, _function in (
    ("multiply_rows_", _multiply_rows), ("multiply_float8_rows_", _multiply_float8_rows),
    ("gather_rows_", _gather_rows), ("scatter_rows_", _scatter_rows),
    ("reduce_rows_", _reduce_rows), ("add_rows_", _add_rows), ("fill_rows_", _fill_rows),
):  # fmt: skip
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    _library.impl(_name, lambda whole, *_: whole, "Meta")
_library.impl("new_rows", _new_rows, "CompositeExplicitAutograd")

new_rows = torch.ops.autopar.new_rows.default
"""Memory for ``[rows, columns]``, in which nothing is written yet, by default in the dtype of a tensor."""

multiply_rows_ = torch.ops.autopar.multiply_rows_.default
"""``whole[start:start + n] = rows @ matrix``, of ``[n, depth]`` and ``[depth, columns]``."""

multiply_float8_rows_ = torch.ops.autopar.multiply_float8_rows_.default
"""``whole[start:start + n]``: the product of two float8 matrices, ``[n, depth]`` and ``[columns, depth]``, with the
arguments of `autopar.ir.ops.float8.product`, or of ``block_product`` where scales are bytes."""

gather_rows_ = torch.ops.autopar.gather_rows_.default
"""``whole[start:start + parts n]``: the rows ``[n, ...]`` of all devices of a group, one after the other."""

scatter_rows_ = torch.ops.autopar.scatter_rows_.default
"""``whole[start:start + n]``: this device's part of the sum of terms ``[parts n, ...]`` over a group."""

reduce_rows_ = torch.ops.autopar.reduce_rows_.default
"""``whole[start:start + n]``: the sum of terms ``[n, ...]`` over a group; they may be these rows."""

add_rows_ = torch.ops.autopar.add_rows_.default
"""``whole[start:start + n] += rows``."""

fill_rows_ = torch.ops.autopar.fill_rows_.default
"""A number in all that is behind the first ``start`` elements of each of the equal ``blocks`` of a dim."""

WRITES_ROWS = frozenset({
    multiply_rows_, multiply_float8_rows_, gather_rows_, scatter_rows_, reduce_rows_, add_rows_, fill_rows_,
})  # fmt: skip
"""All of these operators."""

GROUP_ARGUMENT |= {gather_rows_: 4, scatter_rows_: 4, reduce_rows_: 3}
