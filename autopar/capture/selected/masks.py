"""Operators that select rows, put them back, look them up, or say where they are."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopar.capture.selected.by_rule import by_rule, rank, rule_of
from autopar.capture.selected.dims import (
    Dim,
    Dims,
    Factor,
    Selected,
    by_letter,
    merged,
    outputs_by_letter,
    size_of,
)
from autopar.capture.selected.graph import AllRows, arguments, is_symbolic_size

aten = torch.ops.aten

VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.squeeze.default, aten.flatten.using_ints, aten.unflatten.int, aten._reshape_alias.default,
    aten.view_copy.default,
}  # fmt: skip
"""Operators that give the same elements in another shape."""


def take(rows: AllRows, node: fx.Node) -> None:
    """``x[mask]``, or ``x[i, j]`` with what ``nonzero`` gives, is ``x`` with the dims of the mask as one."""
    x, indices = arguments(node)[:2]
    indices = list(indices)
    found = _mask_of(rows, x, indices)
    if found is None:
        _look_up(rows, node, x, indices)
        return
    first, ndim, dim = found
    assert dim is not None
    size = node.meta["val"].shape[first]
    shape = list(x.meta["val"].shape)
    dims = rows.dims_of(x)
    if not is_symbolic_size(size):
        flat = rows.emit(aten.reshape.default, x, [*shape[:first], size_of(dim), *shape[first + ndim :]])
        places = _places(rows, dim, int(size))
        own = (*dims[:first], None, *dims[first + ndim :])
        rows.become(aten.index.Tensor, (flat, [*[None] * first, places]), None, own)
        return
    _enter(rows, size, dim)
    made = [*shape[:first], size_of(dim), *shape[first + ndim :]]
    rows.become(aten.reshape.default, (x, made), None, (*dims[:first], dim, *dims[first + ndim :]))


def masked_select(rows: AllRows, node: fx.Node) -> None:
    """All elements of both, which are broadcast, as one dim."""
    x, mask = arguments(node)[:2]
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
    while all(d is None for d in dims) and own.target in VIEWS:
        own = own.args[0]  # in whatever shape it is seen
    flat = rows.emit(aten.reshape.default, own, [math.prod(shape)])
    if flat.meta["val"].dtype == torch.uint8:
        flat = rows.emit(aten.ne.Scalar, flat, 0)
    whole = merged((n, d) for n, d in zip(shape, dims, strict=True))
    if whole is not None:
        flat = rows.emit(aten.logical_and.default, rows.full_mask(whole), flat)
    return rows.select(flat)


def masked_scatter(rows: AllRows, node: fx.Node) -> None:
    """What a mask selects of one tensor is put where the same mask is true in another one."""
    x, mask, source = arguments(node)[:3]
    shape = list(x.meta["val"].shape)
    there = merged((n, d) for n, d in zip(source.meta["val"].shape, rows.dims_of(source), strict=True))
    if len(rows.dims_of(mask)) > len(shape) or there != _selected(rows, mask, shape, rows.dims_of(x)):
        rows.refuse("it puts rows of one mask where another one is true")
    values = rows.emit(aten.reshape.default, source, shape)
    rows.become(aten.where.self, (mask, values, x), None, rows.dims_of(x))


def masked_gather(rows: AllRows, node: fx.Node) -> None:
    """The gradient of what `masked_scatter` puts: the same elements."""
    grad, mask, shape = arguments(node)[:3]
    dims = tuple(rows.dim_of_size(n) for n in shape)
    shape = rows.size(shape)
    there = merged(zip(shape, dims, strict=True))
    if there != _selected(rows, mask, list(grad.meta["val"].shape), rows.dims_of(grad)):
        rows.refuse("it puts rows of one mask where another one is true")
    rows.become(aten.reshape.default, (grad, shape), None, dims)


def _places(rows: AllRows, dim: Selected, size: int) -> fx.Node:
    """Where the elements are that a mask selects, whose number is known: a check of the step is that there are so many.

    Args:
        rows: the graph.
        dim: what is selected.
        size: how many elements that is.
    """
    (factor,) = dim
    if factor.mask is not None:
        rows.fixed[factor.mask] = size
    order = rows.emit(aten.sort.stable, rows.full_mask(dim), stable=True, dim=0, descending=True)
    return rows.emit(aten.slice.Tensor, rows.emit(operator.getitem, order, 1), 0, 0, size)


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
    _require_places(rows, x, indices)
    if _is_pick(rows, x, indices):
        found = rows.emit(aten.gather.default, x, 1, _shown(rows, indices[1]))
        rows.become(aten.reshape.default, (found, [x.meta["val"].shape[0]]), None, rows.dims_of(x)[:1])
        return
    safe = _safe(rows, x, indices)
    node.args = (x, safe)
    rule, sizes = rule_of(rows, node)
    looked_up = {c for d, i in enumerate(indices) if i is not None for c in rule.inputs[0][d]}
    inputs = [rows.dims_of(a) for a in (x, *(i for i in safe if i is not None))]
    letters = by_letter(rule, sizes, inputs)
    if isinstance(letters, str):
        rows.refuse(letters)
    letters = {c: dim for c, dim in letters.items() if c not in looked_up}
    rows.become(node.target, (x, safe), None, outputs_by_letter(rule, sizes, letters)[0])


def put(rows: AllRows, node: fx.Node) -> None:
    """``x[mask] = values`` and ``x[mask] += values``; by numbers of rows where these are added up."""
    x, indices, values, *rest = arguments(node)
    indices, adds = list(indices), bool(rest and rest[0])
    found = _mask_of(rows, x, indices)
    shape = list(x.meta["val"].shape)
    if found is not None:
        first, ndim, dim = found
        assert dim is not None
        flat = [*shape[:first], size_of(dim), *shape[first + ndim :]]
        dims = rows.dims_of(x)
        wanted = (*dims[:first], dim, *dims[first + ndim :])
        known = rows.known(dim)
        if all(d is None for d in (*dims, *rows.dims_of(values))) and known is None:
            rows.become(node.target, (x, indices, values, adds), None, dims)  # as many values as the model says
            return
        if known is not None and values.meta["val"].ndim == len(flat):
            places = _places(rows, dim, known)
            there = rows.emit(aten.reshape.default, x, flat)
            index = [*[None] * first, places]
            put_ = rows.emit(aten.index_put.default, there, index, values, adds)
            rows.become(aten.reshape.default, (put_, shape), None, dims)
            return
        values = _broadcast(rows, values, flat, wanted)
        mask = rows.emit(aten.reshape.default, rows.full_mask(dim), _aligned(shape, first, ndim))
        values = rows.emit(aten.reshape.default, values, shape)
        if adds:
            like = x.meta["val"]
            zero = rows.emit(aten.scalar_tensor.default, 0, dtype=like.dtype, device=like.device)
            values = rows.emit(aten.where.self, mask, values, zero)
            rows.become(aten.add.Tensor, (x, values), None, dims)
        else:
            rows.become(aten.where.self, (mask, values, x), None, dims)
        return
    _require_places(rows, x, indices)
    if not adds:
        rows.refuse("rows that two of them are written to would have the value of one that is left out")
    if _is_pick(rows, x, indices) and values.meta["val"].ndim == 1:
        source = rows.emit(aten.unsqueeze.default, values, 1)
        rows.become(aten.scatter_add.default, (x, 1, _shown(rows, indices[1]), source), None, rows.dims_of(x))
        return
    safe = _safe(rows, x, indices)
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


def _require_places(rows: AllRows, x: fx.Node, indices: Sequence[Any]) -> None:
    """Selected rows are looked up by their places alone: a number is that of another row where all are there."""
    for d, i in enumerate(indices):
        dim = rows.dims_of(x)[d]
        if i is not None and dim is not None and rows.places.get(i) != dim:
            rows.refuse("it numbers rows, of which a graph has others, too")


def _safe(rows: AllRows, x: fx.Node, indices: Sequence[Any]) -> list[Any]:
    """Indices that all name an element of a tensor."""
    there = rows.dims_of(x)
    found: list[Any] = []
    for d, i in enumerate(indices):
        own = rank(rows, i) if i in rows.places and there[d] is None else i
        found.append(None if i is None else rows.index(own))
    return found


def _is_pick(rows: AllRows, x: fx.Node, indices: Sequence[Any]) -> bool:
    """``x[arange(n), labels]``: of each row one element."""
    if len(indices) != 2 or len(rows.dims_of(x)) != 2 or None in indices or rows.dims_of(x)[1] is not None:
        return False
    own, there = rows.dims_of(indices[1]), rows.dims_of(x)[:1]
    return own == there == rows.dims_of(indices[0]) and rows.places.get(indices[0]) == there[0] is not None


def _shown(rows: AllRows, index: fx.Node) -> fx.Node:
    return rows.emit(aten.unsqueeze.default, rows.index(index), 1)


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


def index_select(rows: AllRows, node: fx.Node) -> None:
    """Rows by number."""
    x, d, index = arguments(node)[:3]
    if x.meta["val"].ndim and index.meta["val"].ndim and rows.dims_of(x)[d] is None:
        node.args = (x, [*[None] * (d % x.meta["val"].ndim), index])
        node.target = aten.index.Tensor
        take(rows, node)
    else:
        by_rule(rows, node)


def add_by_index(rows: AllRows, node: fx.Node) -> None:
    """``index_add``, ``index_copy`` and ``scatter_add`` into a tensor of all rows: those left out add zeros to some."""
    x, d, index, source = arguments(node)[:4]
    d %= max(x.meta["val"].ndim, 1)
    if any(dim is not None for dim in rows.dims_of(x)) or index in rows.places or node.kwargs.get("alpha", 1) != 1:
        by_rule(rows, node)
        return
    if node.target in (aten.index_add.default, aten.index_copy.default):
        blank = [None] * d
        node.args = (x, [*blank, index], source, node.target is aten.index_add.default)
        node.kwargs = {}
        put(rows, node)
        return
    dims = rows.dims_of(index)
    others = [e for e in range(len(dims)) if dims[e] is not None and e != d]
    if rows.dims_of(source) != dims or others or source.meta["val"].shape != index.meta["val"].shape:
        rows.refuse("an index and what is added have other rows")
    rows.become(node.target, (x, d, rows.index(index), rows.filled(source, 0)), None, rows.dims_of(x))


def nonzero(rows: AllRows, node: fx.Node) -> None:
    """Where a mask is true: where all of its elements are."""
    mask: fx.Node = arguments(node)[0]
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


def column(rows: AllRows, node: fx.Node) -> None:
    """``select`` and ``unbind``: of what ``nonzero`` gives, the places along each dim."""
    told = rows.coordinates.get(node.args[0])
    dim = node.args[1] if len(node.args) > 1 else 0
    by_rule(rows, node)
    if told is None or told[2] is not None or dim not in (1, -1):
        return
    if node.target is aten.select.int:
        rows.coordinates[node] = told[0], told[1], arguments(node)[2] % len(told[1])
    else:
        for i in range(len(told[1])):
            rows.coordinates[node, i] = told[0], told[1], i
