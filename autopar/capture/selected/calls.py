"""`CALLS`: operators that select rows, put them back, count them, or whose rule does not tell what becomes of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopar.capture.selected import batch_norm
from autopar.capture.selected.dims import (
    Dim,
    Dims,
    Factor,
    Selected,
    by_letter,
    divided,
    merged,
    outputs_by_letter,
    size_of,
)
from autopar.capture.selected.rewrite import AllRows, Call, by_rule, rule_of
from autopar.ir.graph import computed, values_of

aten = torch.ops.aten

_VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.squeeze.default, aten.flatten.using_ints, aten.unflatten.int, aten._reshape_alias.default,
    aten.view_copy.default,
}  # fmt: skip
"""Operators that give the same elements in another shape."""


def _take(rows: AllRows, node: fx.Node) -> None:
    """``x[mask]``, or ``x[i, j]`` with what ``nonzero`` gives, is ``x`` with the dims of the mask as one."""
    x, indices = node.args[:2]
    assert isinstance(x, fx.Node)
    indices = list(indices)  # type: ignore[arg-type]
    found = _mask_of(rows, x, indices)
    if found is None:
        _look_up(rows, node, x, indices)
        return
    first, mask, dim = found
    size = node.meta["val"].shape[first]
    _enter(rows, size, dim)
    shape, ndim = list(x.meta["val"].shape), mask
    dims = rows.dims_of(x)
    made = [*shape[:first], size_of(dim), *shape[first + ndim :]]  # type: ignore[arg-type]
    rows.become(aten.reshape.default, (x, made), None, (*dims[:first], dim, *dims[first + ndim :]))


def _masked_select(rows: AllRows, node: fx.Node) -> None:
    """All elements of both, which are broadcast, as one dim."""
    x, mask = node.args[:2]
    assert isinstance(x, fx.Node)
    assert isinstance(mask, fx.Node)
    shape = list(torch.broadcast_shapes(x.meta["val"].shape, mask.meta["val"].shape))  # type: ignore[no-untyped-call]
    dim = _selected(rows, mask, shape, rows.dims_of(x) if len(rows.dims_of(x)) == len(shape) else ())
    _enter(rows, node.meta["val"].shape[0], dim)
    x = x if list(x.meta["val"].shape) == shape else rows.emit(aten.expand.default, x, shape)
    rows.become(aten.reshape.default, (x, [math.prod(shape)]), None, (dim,))


def _selected(rows: AllRows, mask: fx.Node, shape: Sequence[int], dims: Dims) -> Dim:
    """What a mask selects of all elements of a tensor, as one dim.

    Args:
        rows: the graph.
        mask: which is broadcast to the tensor.
        shape: of the tensor.
        dims: of the tensor, without any where others than the mask's may not be selected.
    """
    own = rows.dims_of(mask)
    if any(d is not None for d in (*own, *dims)) and own != dims:
        rows.refuse("a mask and what it selects of have other rows")
    sizes = list(mask.meta["val"].shape)
    sizes = [1] * (len(shape) - len(sizes)) + sizes
    if any(d is not None for d in own):
        return _flat(rows, mask, own)
    # As of tokens: a mask that is the same along the last dims selects whole rows.
    rest = len(shape)
    while rest and sizes[rest - 1] == 1 and shape[rest - 1] != 1:
        rest -= 1
    if sizes[:rest] == list(shape[:rest]):
        whole = math.prod(shape[rest:])
        return merged([(math.prod(shape[:rest]), _flat(rows, mask, (None,) * len(own))), (whole, None)])
    return _flat(rows, rows.emit(aten.expand.default, mask, list(shape)), (None,) * len(shape))


def _flat(rows: AllRows, mask: fx.Node, dims: Dims) -> Dim:
    """What a mask selects as one dim, given what is selected of its own dims."""
    shape = mask.meta["val"].shape
    own: Any = mask
    while all(d is None for d in dims) and own.target in _VIEWS:
        own = own.args[0]  # in whatever shape it is seen
    flat = rows.emit(aten.reshape.default, own, [math.prod(shape)])
    if flat.meta["val"].dtype == torch.uint8:
        flat = rows.emit(aten.ne.Scalar, flat, 0)
    whole = merged((n, d) for n, d in zip(shape, dims, strict=True))
    if whole is not None:
        flat = rows.emit(aten.logical_and.default, rows.full_mask(whole), flat)
    return rows.select(flat)


def _masked_scatter(rows: AllRows, node: fx.Node) -> None:
    """What a mask selects of one tensor is put where the same mask is true in another one."""
    x, mask, source = node.args[:3]
    assert isinstance(x, fx.Node)
    assert isinstance(mask, fx.Node)
    assert isinstance(source, fx.Node)
    shape = list(x.meta["val"].shape)
    there = merged((n, d) for n, d in zip(source.meta["val"].shape, rows.dims_of(source), strict=True))
    if len(rows.dims_of(mask)) > len(shape) or there != _selected(rows, mask, shape, rows.dims_of(x)):
        rows.refuse("it puts rows of one mask where another one is true")
    values = rows.emit(aten.reshape.default, source, shape)
    rows.become(aten.where.self, (mask, values, x), None, rows.dims_of(x))


def _masked_gather(rows: AllRows, node: fx.Node) -> None:
    """The gradient of what `_masked_scatter` puts: the same elements."""
    grad, mask, sizes = node.args[:3]
    assert isinstance(grad, fx.Node)
    assert isinstance(mask, fx.Node)
    dims = tuple(rows.dim_of_size(n) for n in sizes)  # type: ignore[union-attr]
    shape = rows.size(sizes)
    there = merged(zip(shape, dims, strict=True))
    if there != _selected(rows, mask, list(grad.meta["val"].shape), rows.dims_of(grad)):
        rows.refuse("it puts rows of one mask where another one is true")
    rows.become(aten.reshape.default, (grad, shape), None, dims)


def _flip(rows: AllRows, node: fx.Node) -> None:
    """Rows in the other order, and their mask."""
    x, along = node.args[:2]
    assert isinstance(x, fx.Node)
    dims = list(rows.dims_of(x))
    for d in {int(e) % len(dims) for e in along}:  # type: ignore[union-attr, arg-type]
        dim = dims[d]
        if dim is not None:
            if dim not in rows.flipped:
                other = rows.select(rows.emit(aten.flip.default, rows.full_mask(dim), [0]))
                rows.flipped[dim], rows.flipped[other] = other, dim
            dims[d] = rows.flipped[dim]
    rows.become(aten.flip.default, (x, along), None, tuple(dims))


def _enter(rows: AllRows, size: Any, dim: Dim) -> None:
    if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
        rows.enter(size, dim)


def _mask_of(rows: AllRows, x: fx.Node, indices: Sequence[Any]) -> tuple[int, int, Dim] | None:
    """Where a mask's dims begin among those of ``x``, how many these are, and what they are as one; None: no mask."""
    given = [i for i in indices if i is not None]
    first = next(d for d, i in enumerate(indices) if i is not None)
    shape = tuple(x.meta["val"].shape)
    if any(i.meta["val"].dtype in (torch.bool, torch.uint8) for i in given):
        if len(given) > 1:
            rows.refuse("a mask and other indices are used together: take what the mask selects first")
        mask = given[0]
        ndim = mask.meta["val"].ndim
        own, there = rows.dims_of(mask), rows.dims_of(x)[first : first + ndim]
        if own != there or not ndim:
            rows.refuse("a mask and what it selects of have other rows, or the mask has no dims")
        return first, ndim, _flat(rows, mask, own)
    told = [rows.coordinates.get(i) for i in given]
    if told[0] is None or indices[first : first + len(given)] != given:
        return None
    number, size, _ = told[0]
    wanted = [(number, size, d) for d in range(len(size))]
    if (
        told != wanted
        or shape[first : first + len(size)] != size
        or any(d is not None for d in rows.dims_of(x)[first : first + len(size)])
    ):
        return None
    return first, len(size), (Factor(math.prod(size), number),)


def _look_up(rows: AllRows, node: fx.Node, x: fx.Node, indices: list[Any]) -> None:
    """Rows by number, of a tensor that has all of them, or by their places among selected ones."""
    safe = [None if i is None else rows.index(i) for i in indices]
    for d, i in enumerate(indices):
        dim = rows.dims_of(x)[d]
        if i is not None and dim is not None and rows.places.get(i) != dim:
            rows.refuse("it numbers rows, of which a graph has others, too")
        if i is not None and dim is None and i in rows.places:
            rows.refuse("it looks up in another tensor by numbers of rows")
    node.args = (x, safe)
    rule, sizes = rule_of(rows, node)
    looked_up = {c for d, i in enumerate(indices) if i is not None for c in rule.inputs[0][d]}
    inputs = [rows.dims_of(a) for a in (x, *(i for i in safe if i is not None))]
    letters = by_letter(rule, sizes, inputs)
    if isinstance(letters, str):
        rows.refuse(letters)
    letters = {c: dim for c, dim in letters.items() if c not in looked_up}
    rows.become(node.target, node.args, None, outputs_by_letter(rule, sizes, letters)[0])


def _put(rows: AllRows, node: fx.Node) -> None:
    """``x[mask] = values`` and ``x[mask] += values``; by numbers of rows where these are added up."""
    x, indices, values, *rest = node.args
    assert isinstance(x, fx.Node)
    assert isinstance(values, fx.Node)
    indices, adds = list(indices), bool(rest and rest[0])  # type: ignore[arg-type]
    found = _mask_of(rows, x, indices)
    shape = list(x.meta["val"].shape)
    if found is not None:
        first, ndim, dim = found
        assert dim is not None
        flat = [*shape[:first], size_of(dim), *shape[first + ndim :]]
        dims = rows.dims_of(x)
        wanted = (*dims[:first], dim, *dims[first + ndim :])
        values = _broadcast(rows, values, flat, wanted)
        mask = rows.emit(aten.reshape.default, rows.full_mask(dim), _aligned(shape, first, ndim))
        values = rows.emit(aten.reshape.default, values, shape)
        if adds:
            zero = rows.emit(aten.scalar_tensor.default, 0, dtype=x.meta["val"].dtype)
            values = rows.emit(aten.where.self, mask, values, zero)
            rows.become(aten.add.Tensor, (x, values), None, dims)
        else:
            rows.become(aten.where.self, (mask, values, x), None, dims)
        return
    by_place = [i for d, i in enumerate(indices) if i is not None and rows.dims_of(x)[d] is not None]
    if any(rows.places.get(i) != rows.dims_of(x)[d] for d, i in enumerate(indices) if i in by_place):
        rows.refuse("it numbers rows, of which a graph has others, too")
    if not adds:
        rows.refuse("rows that two of them are written to would have the value of one that is left out")
    safe = [None if i is None else rows.index(i) for i in indices]
    taken = rows.emit(aten.index.Tensor, x, safe)
    used = [rows.dims_of(i) for i in safe if i is not None]
    rule, sizes = _rule_of_take(rows, taken)
    letters = by_letter(rule, sizes, [rows.dims_of(x), *used])
    if isinstance(letters, str):
        rows.refuse(letters)
    looked_up = {c for d, i in enumerate(indices) if i is not None for c in rule.inputs[0][d]}
    letters = {c: dim for c, dim in letters.items() if c not in looked_up}
    wanted = outputs_by_letter(rule, sizes, letters)[0]
    values = rows.filled(_broadcast(rows, values, list(taken.meta["val"].shape), wanted), 0)
    rows.graph.erase_node(taken)
    rows.become(aten.index_put.default, (x, safe, values, True), None, rows.dims_of(x))


def _rule_of_take(rows: AllRows, taken: fx.Node) -> Any:
    before = rows.node
    try:
        rows.node = taken
        return rule_of(rows, taken)
    finally:
        rows.node = before


def _aligned(shape: Sequence[int], first: int, ndim: int) -> list[int]:
    return [n if first <= d < first + ndim else 1 for d, n in enumerate(shape)]


def _broadcast(rows: AllRows, values: fx.Node, shape: Sequence[int], wanted: Dims) -> fx.Node:
    """Values in a shape; each of their dims has the same rows, or is one element for all."""
    own = rows.dims_of(values)
    skipped = len(shape) - len(own)
    if skipped < 0:
        rows.refuse("there are more dims of values than places for them")
    for d, dim in enumerate(own):
        n = values.meta["val"].shape[d]
        if dim != wanted[skipped + d] and not (dim is None and n == 1):
            rows.refuse("values are not of the rows that the mask selects")
    if tuple(values.meta["val"].shape) != tuple(shape):
        values = rows.emit(aten.expand.default, values, list(shape))
    rows.dims[values] = wanted
    return values


def _add_by_index(rows: AllRows, node: fx.Node) -> None:
    """``index_add`` and ``scatter_add`` into a tensor that has all rows: those left out add zeros to some row."""
    x, d, index, source = node.args[:4]
    assert isinstance(x, fx.Node)
    assert isinstance(d, int)
    assert isinstance(index, fx.Node)
    assert isinstance(source, fx.Node)
    d %= max(x.meta["val"].ndim, 1)
    if any(dim is not None for dim in rows.dims_of(x)) or index in rows.places or node.kwargs.get("alpha", 1) != 1:
        by_rule(rows, node)
        return
    if node.target is aten.index_add.default:
        blank = [None] * d
        node.args = (x, [*blank, index], source, True)
        node.kwargs = {}
        _put(rows, node)
        return
    dims = rows.dims_of(index)
    others = [e for e in range(len(dims)) if dims[e] is not None and e != d]
    if rows.dims_of(source) != dims or others or source.meta["val"].shape != index.meta["val"].shape:
        rows.refuse("an index and what is added have other rows")
    rows.become(node.target, (x, d, rows.index(index), rows.filled(source, 0)), None, rows.dims_of(x))


def _nonzero(rows: AllRows, node: fx.Node) -> None:
    """Where a mask is true: where all of its elements are."""
    mask = node.args[0]
    assert isinstance(mask, fx.Node)
    value = mask.meta["val"]
    if any(d is not None for d in rows.dims_of(mask)) or not value.ndim:
        rows.refuse("it numbers rows that another mask selects")
    own = mask if value.dtype == torch.bool else rows.emit(aten.ne.Scalar, mask, 0)
    dim = rows.select(rows.emit(aten.reshape.default, own, [value.numel()]))
    _enter(rows, node.meta["val"].shape[0], dim)
    places = rows.emit(aten.arange.default, value.numel(), dtype=torch.int64, device=value.device)
    columns, step = list[fx.Node](), 1
    for n in reversed(value.shape):
        column = rows.emit(aten.div.Tensor_mode, places, step, rounding_mode="floor") if step > 1 else places
        column = rows.emit(aten.remainder.Scalar, column, n)
        columns.insert(0, rows.emit(aten.unsqueeze.default, column, 1))
        step *= int(n)
    assert dim is not None
    number = dim[0].mask
    assert number is not None
    rows.become(aten.cat.default, (columns, 1), None, (dim, None))
    rows.coordinates[node] = number, tuple(value.shape), None


def _column(rows: AllRows, node: fx.Node) -> None:
    """``select`` and ``unbind``: of what ``nonzero`` gives, the places along each dim."""
    told = rows.coordinates.get(node.args[0])
    dim = node.args[1] if len(node.args) > 1 else 0
    by_rule(rows, node)
    if told is None or told[2] is not None or dim not in (1, -1):
        return
    if node.target is aten.select.int:
        rows.coordinates[node] = told[0], told[1], node.args[2] % len(told[1])  # type: ignore[operator]
    else:
        for i in range(len(told[1])):
            rows.coordinates[node, i] = told[0], told[1], i


def _slice(rows: AllRows, node: fx.Node) -> None:
    """A slice of all rows, or what was concatenated, of selected ones."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    d, start, end, step = [*node.args[1:], *[0, None, None, 1][len(node.args) - 1 :]]
    d = int(d) % x.meta["val"].ndim  # type: ignore[call-overload]
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


def _cat(rows: AllRows, node: fx.Node) -> None:
    """Selected rows behind others: their masks behind each other."""
    tensors: Any = node.args[0]
    d = int(node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % tensors[0].meta["val"].ndim  # type: ignore[call-overload, arg-type]
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


def _sum(rows: AllRows, node: fx.Node) -> None:
    """A sum over all dims, or a mean, which is divided by the number of selected elements."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    ndim, target = x.meta["val"].ndim, node.target
    given: Any = node.args[1] if target is aten.mean.dim and len(node.args) > 1 else None
    along = sorted(int(e) % ndim for e in given) if given and ndim else list(range(ndim))
    keep = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
    kwargs = {"dtype": node.kwargs["dtype"]} if node.kwargs.get("dtype") is not None else {}
    dims = tuple(None if e in along else dim for e, dim in enumerate(rows.dims_of(x)) if keep or e not in along)
    kept = rows.filled(x, 0, along)
    if target is aten.sum.default:
        rows.become(aten.sum.dim_IntList, (kept, along, keep), kwargs, dims)
        return
    total = rows.emit(aten.sum.dim_IntList, kept, along, keep, **kwargs)
    rows.become(aten.div.Tensor, (total, rows.count_of(x, along, total.meta["val"].dtype)), None, dims)


def _variance(rows: AllRows, node: fx.Node) -> None:
    """Squares of what differs from the mean, added up and divided by a number of selected elements."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    value, target = x.meta["val"], node.target
    given: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    along = sorted(int(e) % value.ndim for e in given) if given else list(range(value.ndim))
    keep, correction = bool(node.kwargs.get("keepdim", False)), node.kwargs.get("correction")
    correction = 1 if correction is None else correction
    if value.dtype not in (torch.float32, torch.float64):
        rows.refuse("its variance is of numbers of another precision: compute it in float32")
    dims = tuple(None if e in along else dim for e, dim in enumerate(rows.dims_of(x)) if keep or e not in along)
    if all(rows.dims_of(x)[e] is None for e in along):
        by_rule(rows, node)
        return
    count = rows.count_of(x, along, value.dtype)
    mean = rows.emit(aten.div.Tensor, rows.emit(aten.sum.dim_IntList, rows.filled(x, 0, along), along, True), count)
    centred = rows.emit(aten.sub.Tensor, x, mean)
    rows.dims[centred] = rows.dims_of(x)
    centred = rows.filled(centred, 0, along)
    squares = rows.emit(aten.sum.dim_IntList, rows.emit(aten.mul.Tensor, centred, centred), along, keep)
    degrees = rows.emit(aten.clamp_min.default, rows.emit(aten.sub.Scalar, count, correction), 0)
    if target is aten.std.correction:
        found = rows.emit(aten.div.Tensor, squares, degrees)
        rows.become(aten.sqrt.default, (found,), None, dims)
    else:
        rows.become(aten.div.Tensor, (squares, degrees), None, dims)


def _full(rows: AllRows, node: fx.Node) -> None:
    """A tensor of one value, of a size that counts rows, or like another one."""
    value = node.meta["val"]
    target: Any = node.target
    name = target._schema.name.split("::")[1]
    fill: Any = {"zeros": 0, "ones": 1, "empty": 0}.get(name.removeprefix("new_").removesuffix("_like"))
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


def _scalar(rows: AllRows, node: fx.Node) -> None:
    """A number of rows as a tensor."""
    made = rows.value(node.args[0], node.meta["val"].dtype)
    rows.become(aten.clone.default, (made,), None, ())


def _arange(rows: AllRows, node: fx.Node) -> None:
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


def _expand(rows: AllRows, node: fx.Node) -> None:
    """New elements along dims of size one."""
    x, sizes = node.args[:2]
    assert isinstance(x, fx.Node)
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


def _reshape(rows: AllRows, node: fx.Node) -> None:
    """A view: dims that are merged or split keep their masks."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    shape = rows.size(list(node.meta["val"].shape))
    dims = _regrouped(list(x.meta["val"].shape), rows.dims_of(x), shape)
    if dims is None:
        rows.refuse("it divides rows between dims")
    told = rows.places.get(x)
    rows.become(aten.reshape.default, (x, shape), None, dims)
    if told is not None:
        rows.places[node] = told


def _regrouped(before: list[int], dims: Dims, after: list[int]) -> Dims | None:
    """The dims of a reshape, or None."""
    whole = merged(zip(before, dims, strict=True))
    if whole is None:
        return (None,) * len(after)
    found = divided(whole, after)
    return None if found is None else tuple(found)


def _permute(rows: AllRows, node: fx.Node) -> None:
    """Dims in another order."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    order = list(range(x.meta["val"].ndim))
    if node.target is aten.t.default:
        order.reverse()
    elif order:
        a, b = (int(d) % len(order) for d in node.args[1:3])  # type: ignore[call-overload]
        order[a], order[b] = order[b], order[a]
    rows.become(aten.permute.default, (x, order), None, tuple(rows.dims_of(x)[d] for d in order))


def _same(rows: AllRows, node: fx.Node) -> None:
    """A copy, or the same tensor."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    node.meta["val"] = computed(node)
    rows.set_dims(node, [rows.dims_of(x)])
    for table in (rows.places, rows.coordinates):
        if x in table and node.meta["val"].dtype == x.meta["val"].dtype:
            table[node] = table[x]
    if x in rows.places and node not in rows.places:
        by_rule(rows, node)


def _extremum(rows: AllRows, node: fx.Node) -> None:
    """Of the largest or smallest along selected rows, where it is: a place."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    before = rows.dims_of(x)
    by_rule(rows, node)
    d: Any = node.args[1] if len(node.args) > 1 else None
    if d is None or before[d] is None:
        return
    if len(values_of(node)) > 1:
        rows.places[node, 1] = before[d]
    else:
        rows.places[node] = before[d]


CALLS: dict[Any, Call] = {
    aten.index.Tensor: _take, aten._unsafe_index.Tensor: _take, aten.nonzero.default: _nonzero,
    aten.index_put.default: _put, aten._unsafe_index_put.default: _put,
    aten.masked_select.default: _masked_select, aten.masked_scatter.default: _masked_scatter,
    aten.masked_scatter_backward.default: _masked_gather, aten.flip.default: _flip,
    aten._native_batch_norm_legit_functional.default: batch_norm.forward,
    aten.native_batch_norm_backward.default: batch_norm.backward,
    aten.index_add.default: _add_by_index, aten.scatter_add.default: _add_by_index,
    aten.select.int: _column, aten.unbind.int: _column, aten.slice.Tensor: _slice, aten.cat.default: _cat,
    aten.sum.default: _sum, aten.mean.default: _sum, aten.mean.dim: _sum,
    aten.var.correction: _variance, aten.std.correction: _variance,
    aten.arange.default: _arange, aten.arange.start: _arange, aten.arange.start_step: _arange,
    aten.expand.default: _expand, aten.scalar_tensor.default: _scalar,
    aten.t.default: _permute, aten.transpose.int: _permute,
    aten.max.dim: _extremum, aten.min.dim: _extremum, aten.argmax.default: _extremum, aten.argmin.default: _extremum,
    **dict.fromkeys(_VIEWS, _reshape),
    **dict.fromkeys(
        (
            aten.zeros.default, aten.ones.default, aten.full.default, aten.zeros_like.default, aten.ones_like.default,
            aten.full_like.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
            aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default,
        ),
        _full,
    ),
    **dict.fromkeys(
        (aten.detach.default, aten.alias.default, aten.clone.default, aten.lift_fresh_copy.default,
         aten._to_copy.default),
        _same,
    ),
}  # fmt: skip
"""By operator."""
