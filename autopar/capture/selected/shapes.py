"""Views, concatenations and new tensors: which of their rows are selected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopar.capture.selected.by_rule import by_rule
from autopar.capture.selected.dims import (
    Dim,
    Dims,
    Selected,
    divided,
    merged,
    size_of,
)
from autopar.capture.selected.graph import AllRows, arguments
from autopar.ir.graph import computed

aten = torch.ops.aten


def slice_(rows: AllRows, node: fx.Node) -> None:
    """A slice of all rows, or what was concatenated, of selected ones."""
    x: fx.Node = arguments(node)[0]
    given = [*arguments(node)[1:], *[0, None, None, 1][len(node.args) - 1 :]]
    d, start, end, step = given
    d %= x.meta["val"].ndim
    dims = rows.dims_of(x)
    dim, size = dims[d], int(x.meta["val"].shape[d])
    if dim is None:
        by_rule(rows, node)
        return
    bounds = rows.size(start or 0), size if end is None else min(rows.size(end), size)
    own: Dim = dim
    if bounds != (0, size) or isinstance(start, fx.Node):
        own = _part(rows, dim, bounds, [isinstance(b, fx.Node) for b in (start, end)], end is None)
    if step != 1:
        rows.refuse("every other row is taken")
    told = rows.coordinates.get(x)
    rows.become(aten.slice.Tensor, (x, d, *bounds), None, (*dims[:d], own, *dims[d + 1 :]))
    if told is not None and own == dim:
        rows.coordinates[node] = told


def _part(rows: AllRows, dim: Selected, bounds: tuple[int, int], counted: Sequence[bool], last: bool) -> Dim:
    """What a slice is of that takes one part of a concatenation; its bounds are known, or numbers of rows."""
    whole = True
    for begin, own, size in rows.parts.get(dim[0].mask, ()) if len(dim) == 1 and dim[0].mask is not None else ():
        first, whole = whole, whole and own is None
        if bounds == (begin, begin + size) and (first or counted[0]) and (last or whole or counted[1]):
            return own
    rows.refuse("some rows are taken by their numbers")


def cat(rows: AllRows, node: fx.Node) -> None:
    """Selected rows behind others: their masks behind each other."""
    tensors: Any = node.args[0]
    d = int(arguments(node)[1] if len(node.args) > 1 else arguments(node, "dim") or 0) % tensors[0].meta["val"].ndim
    along = [rows.dims_of(t)[d] for t in tensors]
    others = {tuple(dim for e, dim in enumerate(rows.dims_of(t)) if e != d) for t in tensors}
    if len(others) > 1:
        rows.refuse("rows of one mask meet others, and may not be as many")
    dims = list(rows.dims_of(tensors[0]))
    if any(a is not None for a in along):
        sizes, device = [int(t.meta["val"].shape[d]) for t in tensors], tensors[0].meta["val"].device
        masks = [
            rows.emit(aten.full.default, [n], True, dtype=torch.bool, device=device) if a is None else rows.full_mask(a)
            for a, n in zip(along, sizes, strict=True)
        ]
        whole = rows.select(rows.emit(aten.cat.default, masks))
        assert whole is not None
        number = whole[0].mask
        assert number is not None
        begins = [sum(sizes[:i]) for i in range(len(sizes))]
        rows.parts[number] = list(zip(begins, along, sizes, strict=True))
        dims[d] = whole
    rows.become(aten.cat.default, (tensors, d), None, tuple(dims))


def flip(rows: AllRows, node: fx.Node) -> None:
    """Rows in the other order, and their mask."""
    x, along = arguments(node)[:2]
    dims = list(rows.dims_of(x))
    for d in {int(e) % len(dims) for e in along}:
        dim = dims[d]
        if dim is not None:
            if dim not in rows.flipped:
                other = rows.select(rows.emit(aten.flip.default, rows.full_mask(dim), [0]))
                rows.flipped[dim], rows.flipped[other] = other, dim
            dims[d] = rows.flipped[dim]
    rows.become(aten.flip.default, (x, along), None, tuple(dims))


def full(rows: AllRows, node: fx.Node) -> None:
    """A tensor of one value, of a size that counts rows, or like another one."""
    value = node.meta["val"]
    target: Any = node.target
    name = target._schema.name.split("::")[1]
    fill: Any = {"zeros": 0, "ones": 1, "empty": 0, "empty_strided": 0}.get(
        name.removeprefix("new_").removesuffix("_like")
    )
    if fill is None:
        fill = node.args[1] if name != "new_full" else node.args[2]
    like = node.args[0] if name.endswith("_like") else None
    dims = rows.dims_of(like) if isinstance(like, fx.Node) else tuple(rows.dim_of_size(n) for n in value.shape)
    shape = rows.size(list(value.shape))
    if isinstance(fill, fx.Node):
        made = rows.value(fill, value.dtype)
        rows.become(aten.expand.default, (made, shape), None, dims)
    else:
        rows.become(aten.full.default, (shape, fill), {"dtype": value.dtype, "device": value.device}, dims)


def arange(rows: AllRows, node: fx.Node) -> None:
    """The numbers of selected rows: their places, see `AllRows.places`."""
    value = node.meta["val"]
    start = node.args[0] if len(node.args) > 1 else 0
    if start != 0 or len(node.args) > 2 or value.dtype != torch.int64:
        rows.refuse("rows are numbered from another number on")
    dim = rows.dim_of_size(value.shape[0])
    assert dim is not None
    options = {"dtype": torch.int64, "device": value.device}
    rows.become(aten.arange.default, (size_of(dim),), options, (dim,))
    rows.places[node] = dim


def eye(rows: AllRows, node: fx.Node) -> None:
    """Ones where a row meets itself."""
    value = node.meta["val"]
    dims = tuple(rows.dim_of_size(n) for n in value.shape)
    if dims[0] != dims[1]:
        rows.refuse("rows of one mask meet others, and may not be as many")
    options = {"dtype": value.dtype, "device": value.device}
    rows.become(aten.eye.m, rows.size(list(value.shape)), options, dims)


def triangle(rows: AllRows, node: fx.Node) -> None:
    """``triu`` and ``tril`` of what rows make with each other: their order is that of all rows."""
    x: fx.Node = arguments(node)[0]
    offset = int(arguments(node)[1]) if len(node.args) > 1 else 0
    dims = rows.dims_of(x)
    if dims[-1] is None and dims[-2] is None:
        by_rule(rows, node)
        return
    # Of a row and one behind it others may have been left out: how far it is behind is not known.
    if dims[-1] != dims[-2] or offset not in ((0, 1) if node.target is aten.triu.default else (0, -1)):
        rows.refuse("it counts how far rows are from each other")
    rows.become(node.target, (x, offset), None, dims)


def compare(rows: AllRows, node: fx.Node) -> None:
    """No place along rows is negative, as labels are that a loss ignores."""
    x, other = arguments(node)[:2]
    by_rule(rows, node)
    if x in rows.places and not isinstance(other, fx.Node) and other < 0:
        rows.true.add(node)


def where(rows: AllRows, node: fx.Node) -> None:
    """One of two; places, where all rows have one."""
    mask, x, _ = arguments(node)
    if mask in rows.true and x in rows.places:
        dims = rows.dims_of(x)
        rows.become(aten.clone.default, (x,), None, dims)
        rows.pass_on(x, node)
    else:
        by_rule(rows, node)


def expand(rows: AllRows, node: fx.Node) -> None:
    """New elements along dims of size one."""
    x: fx.Node = arguments(node)[0]
    shape = node.meta["val"].shape
    own = rows.dims_of(x)
    skipped = len(shape) - len(own)
    dims = tuple(
        own[d - skipped]
        if d >= skipped and (own[d - skipped] is not None or x.meta["val"].shape[d - skipped] != 1)
        else rows.dim_of_size(n)
        for d, n in enumerate(shape)
    )
    rows.become(aten.expand.default, (x, rows.size(list(shape))), None, dims)


def reshape(rows: AllRows, node: fx.Node) -> None:
    """A view: dims that are merged or split keep their masks."""
    x: fx.Node = arguments(node)[0]
    shape = rows.size(list(node.meta["val"].shape))
    dims = _regrouped(list(x.meta["val"].shape), rows.dims_of(x), shape)
    if dims is None:
        rows.refuse("it divides rows between dims")
    rows.become(aten.reshape.default, (x, shape), None, dims)
    if x in rows.places:
        rows.places[node] = rows.places[x]
    told = rows.coordinates.get(x)
    if told is not None and len(shape) == 1 and (len(told[1]) == 1 or told[2] is not None):
        rows.coordinates[node] = told[0], told[1], told[2] or 0  # its one column


def _regrouped(before: list[int], dims: Dims, after: list[int]) -> Dims | None:
    """The dims of a reshape, or None."""
    whole = merged(zip(before, dims, strict=True))
    if whole is None:
        return (None,) * len(after)
    found = divided(whole, after)
    return None if found is None else tuple(found)


def permute(rows: AllRows, node: fx.Node) -> None:
    """Dims in another order."""
    x: fx.Node = arguments(node)[0]
    order = list(range(x.meta["val"].ndim))
    if node.target is aten.t.default:
        order.reverse()
    elif order:
        a, b = (d % len(order) for d in arguments(node)[1:3])
        order[a], order[b] = order[b], order[a]
    rows.become(aten.permute.default, (x, order), None, tuple(rows.dims_of(x)[d] for d in order))


def same(rows: AllRows, node: fx.Node) -> None:
    """A copy, or the same tensor."""
    x: fx.Node = arguments(node)[0]
    node.meta["val"] = computed(node)
    rows.set_dims(node, [rows.dims_of(x)])
    if node.meta["val"].dtype == x.meta["val"].dtype:
        rows.pass_on(x, node)
    if x in rows.places and node not in rows.places:
        by_rule(rows, node)
