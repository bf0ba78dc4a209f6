"""Sums, means and variances of selected rows, their number, and where the largest is."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.capture.selected.by_rule import by_rule
from autopar.capture.selected.graph import AllRows, arguments
from autopar.ir.graph import values_of

aten = torch.ops.aten

_PRIMITIVE = torch.ops.prims.sum.default
"""A sum over some dims, as torch's decomposition of ``var_mean`` has it."""


def total(rows: AllRows, node: fx.Node) -> None:
    """A sum over all dims, or a mean, which is divided by the number of selected elements."""
    x: fx.Node = arguments(node)[0]
    ndim, target = x.meta["val"].ndim, node.target
    names_dims = target in (aten.mean.dim, _PRIMITIVE) and len(node.args) > 1
    given: Any = node.args[1] if names_dims else None
    along = sorted(int(e) % ndim for e in given) if given and ndim else list(range(ndim))
    keep = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
    kwargs = {"dtype": node.kwargs["dtype"]} if node.kwargs.get("dtype") is not None else {}
    dims = tuple(None if e in along else dim for e, dim in enumerate(rows.dims_of(x)) if keep or e not in along)
    kept = rows.filled(x, 0, along)
    if target in (aten.sum.default, _PRIMITIVE):
        rows.become(aten.sum.dim_IntList, (kept, along, keep), kwargs, dims)
        return
    total = rows.emit(aten.sum.dim_IntList, kept, along, keep, **kwargs)
    rows.become(aten.div.Tensor, (total, rows.count_of(x, along, total.meta["val"].dtype)), None, dims)


def variance(rows: AllRows, node: fx.Node) -> None:
    """Squares of what differs from the mean, added up and divided by a number of selected elements."""
    x: fx.Node = arguments(node)[0]
    value, target = x.meta["val"], node.target
    given: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    along = sorted(int(e) % value.ndim for e in given) if given else list(range(value.ndim))
    keep = bool(node.kwargs.get("keepdim", False))
    correction = node.args[2] if len(node.args) > 2 else node.kwargs.get("correction")
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


def scalar(rows: AllRows, node: fx.Node) -> None:
    """A number of rows as a tensor."""
    made = rows.value(node.args[0], node.meta["val"].dtype)
    rows.become(aten.clone.default, (made,), None, ())


def extremum(rows: AllRows, node: fx.Node) -> None:
    """Of the largest or smallest along selected rows, where it is: a place."""
    x: fx.Node = arguments(node)[0]
    before = rows.dims_of(x)
    by_rule(rows, node)
    d = arguments(node)[1] if len(node.args) > 1 else None
    if d is None or before[d] is None:
        return
    if len(values_of(node)) > 1:
        rows.places[node, 1] = before[d]
    else:
        rows.places[node] = before[d]
