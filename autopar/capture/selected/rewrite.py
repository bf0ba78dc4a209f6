"""`with_all_rows`: in the place of what a mask selects, a traced graph computes all rows.

How many rows ``x[mask]`` has depends on the batch. Traced, their number is a symbol ``u``, which no layout describes.
Here all rows are computed, also those that the mask leaves out. What these hold reaches nothing: where rows meet, as in
sums, products along them, or maxima, they hold what changes nothing (`autopar.rules.rule.padding_of`), gradients of
zero included, and a number of rows becomes the number of them that are selected.

Before::

    rows = aten.index.Tensor(x, [mask])               # [u, 8]
    loss = aten.mean.default(rows)

After::

    rows = aten.reshape.default(x, [24, 8])
    kept = aten.where.self(aten.unsqueeze.default(mask, -1), rows, 0)
    loss = aten.div.Tensor(aten.sum.dim_IntList(kept, [0, 1]), aten.mul.Scalar(aten.sum.default(mask), 8))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.capture.selected import batch_norm, masks, reductions, shapes
from autopar.capture.selected.by_rule import by_rule
from autopar.capture.selected.graph import AllRows, Call, is_symbolic, selects

aten = torch.ops.aten

CALLS: dict[Any, Call] = {
    aten.index.Tensor: masks.take, aten._unsafe_index.Tensor: masks.take, aten.nonzero.default: masks.nonzero,
    aten.index_put.default: masks.put, aten._unsafe_index_put.default: masks.put,
    aten.masked_select.default: masks.masked_select, aten.masked_scatter.default: masks.masked_scatter,
    aten.masked_scatter_backward.default: masks.masked_gather, aten.flip.default: shapes.flip,
    aten._native_batch_norm_legit_functional.default: batch_norm.forward,
    aten.native_batch_norm_backward.default: batch_norm.backward,
    aten.index_select.default: masks.index_select,
    aten.index_copy.default: masks.add_by_index, aten.index_add.default: masks.add_by_index,
    aten.scatter_add.default: masks.add_by_index,
    aten.select.int: masks.column, aten.unbind.int: masks.column, aten.slice.Tensor: shapes.slice_,
    aten.cat.default: shapes.cat,
    aten.sum.default: reductions.total, aten.mean.default: reductions.total, aten.mean.dim: reductions.total,
    aten.var.correction: reductions.variance, aten.std.correction: reductions.variance,
    aten.arange.default: shapes.arange, aten.arange.start: shapes.arange, aten.arange.start_step: shapes.arange,
    aten.expand.default: shapes.expand, aten.scalar_tensor.default: reductions.scalar,
    aten.eye.default: shapes.eye, aten.eye.m: shapes.eye,
    aten.triu.default: shapes.triangle, aten.tril.default: shapes.triangle,
    torch.ops.prims.var.default: reductions.variance, torch.ops.prims.sum.default: reductions.total,
    aten.ne.Scalar: shapes.compare, aten.where.self: shapes.where,
    aten.t.default: shapes.permute, aten.transpose.int: shapes.permute,
    aten.max.dim: reductions.extremum, aten.min.dim: reductions.extremum,
    aten.argmax.default: reductions.extremum, aten.argmin.default: reductions.extremum,
    **dict.fromkeys(masks.VIEWS, shapes.reshape),
    **dict.fromkeys(
        (
            aten.zeros.default, aten.ones.default, aten.full.default, aten.zeros_like.default, aten.ones_like.default,
            aten.full_like.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
            aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default,
            aten.empty_strided.default, aten.new_empty_strided.default,
        ),
        shapes.full,
    ),
    **dict.fromkeys(
        (aten.detach.default, aten.alias.default, aten.clone.default, aten.lift_fresh_copy.default,
         aten._to_copy.default),
        shapes.same,
    ),
}  # fmt: skip
"""By operator."""


def with_all_rows(graph: fx.Graph) -> None:
    """Rewrite a joint graph in place so that no size depends on the batch.

    Raises:
        CaptureError: selected rows go into something that is not known to be right with the others.
    """
    if any(is_symbolic(n.meta.get("val")) or selects(n) for n in graph.nodes):
        AllRows(graph).run(CALLS, by_rule)
