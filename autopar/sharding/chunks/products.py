"""Matrix products of which some rows can be computed by themselves: which operators, and what some rows take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.costs.cluster import Device
from autopar.costs.device import FLOAT8
from autopar.costs.kernels import Work, product
from autopar.ir.ops import float8
from autopar.ir.ops.rows import multiply_float8_rows_, multiply_rows_

aten = torch.ops.aten

_WRITES: dict[Any, Any] = {
    aten.mm.default: multiply_rows_,
    float8.product: multiply_float8_rows_,
    float8.block_product: multiply_float8_rows_,
}
"""What writes some rows of each product, the first operand of which has these rows."""

PRODUCTS, WRITES_PRODUCTS = frozenset(_WRITES), frozenset(_WRITES.values())
"""Products, and what writes rows of them."""


def others(node: fx.Node) -> tuple[fx.Node, ...]:
    """The operands of a product beside the first: a matrix, and the scales of both in float8."""
    return tuple(a for a in node.args[1:] if isinstance(a, fx.Node))


def of_rows(node: fx.Node, rows: fx.Node, narrow: Callable[[fx.Node], fx.Node]) -> tuple[Any, tuple[Any, ...]]:
    """The operator that writes rows of a product, and its arguments between the tensor that it writes and the place.

    Args:
        node: the product.
        rows: of its first operand.
        narrow: takes the same rows of another operand, such as scales of rows.
    """
    count = node.meta["val"].shape[0]
    given: list[Any] = list(node.args[1:])
    if node.target is not aten.mm.default:
        given.pop()  # the dtype: that of the tensor
        scale = given[1]
        given[1] = narrow(scale) if count > 1 and scale.meta["val"].shape[0] == count else scale
    return _WRITES[node.target], (rows, *given)


def rows_work(rows: int, operand: torch.Tensor, columns: int, made: torch.dtype) -> Work:
    """Of a product of some rows.

    Args:
        rows: how many.
        operand: with them, ``[at least as many, depth]``.
        columns: of the result.
        made: dtype of the result.
    """
    item = operand.element_size()
    work = product(rows, columns, operand.shape[1], item=item)
    return replace(work, moved=work.moved + (made.itemsize - item) * rows * columns)


def rate_of(node: fx.Node, device: Device) -> str:
    """The dtype at whose rate a product, or what writes rows of one, is computed."""
    made = str(node.meta["val"].dtype).removeprefix("torch.")
    if node.target in (aten.mm.default, multiply_rows_):
        return made if made in device.flops else "float32"
    scale: Any = node.args[-5]
    if scale.meta["val"].is_floating_point() and FLOAT8 in device.flops:
        return FLOAT8
    # Where no kernel takes them, operands are widened first, at the least to float32.
    return "float64" if made == "float64" else "float32"
