"""apply_precision: parameters have one dtype, and are computed with in another.

Before (captured with everything in the dtype to compute in)::

    w: bf16[ffn, hidden];  mm = aten.mm(x, w);  ...;  gradient of w = aten.mm(a, b)             # bf16

After::

    w: f32[ffn, hidden];  cast = aten._to_copy(w, dtype=bf16);  mm = aten.mm(x, cast);  ...
    b = aten.mm(a, b)  # its terms are added in f32;  gradient of w = aten._to_copy(b, dtype=f32)

It runs before the canonical form: the search then finds by itself that a parameter is cheaper to gather after the
cast. A partial gradient is added up in ``reduce`` wherever a plan does it: see `TensorType.reduce`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import copy_graph
from autopar.ir.node_info import info, set_info
from autopar.ir.precision import Precision
from autopar.ir.program import Program

aten = torch.ops.aten

_LINEAR = {
    aten.add.Tensor, aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default, aten.reshape.default,
    aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default,
    aten.sum.dim_IntList, aten._to_copy.default, aten.cat.default, aten.slice_backward.default,
}  # fmt: skip
"""Operators through which the terms of a gradient pass before they are added."""


def apply_precision(program: Program, precision: Precision, batch: list[torch.dtype]) -> Program:
    """Put casts between master weights and what is computed with.

    Args:
        program: captured with floating parameters and batch tensors in ``precision.compute``; not canonical yet.
        precision: the policy.
        batch: dtypes of the batch tensors as they are passed in.
    """
    program = replace(program, graph=copy_graph(program.graph))
    graph = program.graph.graph
    last = program.placeholders[-1]
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        # Buffers and tangents have the dtype that the trace gave them.
        given = batch[int(spec.name)] if spec.kind == "batch" else precision.master
        value = node.meta["val"]
        if spec.kind in ("parameter", "batch") and value.is_floating_point() and value.dtype != given:
            with graph.inserting_after(last):
                last = _cast_input(graph, node, given)
    output = program.output_node
    finals = []
    for made, final in zip(program.outputs, program.output_values, strict=True):
        if made.kind == "gradient" and final is not None:
            _mark(final, precision.reduce, {output})
            # Where it is made: after the last operator, gradients of all layers would be live at once, whole.
            with graph.inserting_after(final if final.op == "call_function" else last):
                final = _cast_gradient(graph, final, precision.master)
        finals.append(final)
    output.args = (finals,)
    program.graph.recompile()
    return program


def _cast_input(graph: fx.Graph, node: fx.Node, given: torch.dtype) -> fx.Node:
    """Give a placeholder the dtype of what is passed in; its users use its cast."""
    # Before the cast is one of them.
    users = list(node.users)
    cast = graph.call_function(aten._to_copy.default, (node,), {"dtype": node.meta["val"].dtype})
    for user in users:
        user.replace_input_with(node, cast)
    # With a module, so that the search ties the casts of repeated layers.
    cast.meta = {"val": node.meta["val"], "partitioner_tag": "is_forward", **_module(users)}
    with node.meta["val"].fake_mode:
        node.meta["val"] = node.meta["val"].to(given)
    return cast


def _module(users: list[fx.Node]) -> dict[str, Any]:
    """Module of the first operator that uses a value: casts of repeated layers must be told apart like the rest."""
    keys = ("nn_module_stack", "stack_trace")
    return next(({k: u.meta[k] for k in keys if k in u.meta} for u in users if "nn_module_stack" in u.meta), {})


def _cast_gradient(graph: fx.Graph, value: fx.Node, master: torch.dtype) -> fx.Node:
    if value.meta["val"].dtype == master:
        return value
    cast = graph.call_function(aten._to_copy.default, (value,), {"dtype": master})
    keys = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace")
    cast.meta = {"partitioner_tag": "is_backward", **{k: value.meta[k] for k in keys if k in value.meta}}
    with value.meta["val"].fake_mode:
        cast.meta["val"] = value.meta["val"].to(master)
    return cast


def _mark(value: fx.Node, reduce: torch.dtype, known: set[fx.Node]) -> None:
    """The value, and what it is a linear function of, are added up in ``reduce``, unless others read them."""
    pending = [value]
    while pending:
        node = pending.pop()
        if any(user not in known for user in node.users) or node.op != "call_function":
            continue
        known.add(node)
        made = node.meta.get("val")
        # Only where it adds precision: a float64 gradient is not rounded for the sum.
        if isinstance(made, torch.Tensor) and made.is_floating_point() and made.dtype.itemsize < reduce.itemsize:
            set_info(node, replace(info(node), reduce_dtype=reduce))
        if node.target in _LINEAR:
            pending += [a for a in node.all_input_nodes if a not in known]
