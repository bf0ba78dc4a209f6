"""insert_contiguous: arguments get the strides that their kernels ask for.

Before::

    turned = aten.permute(x, [0, 2, 1])
    norm = aten.native_group_norm(turned, w, b, ...)      # reads the storage of x row by row

After::

    turned = aten.permute(x, [0, 2, 1])
    contiguous = aten.contiguous(turned)                  # a copy, or the tensor itself where it is contiguous already
    norm = aten.native_group_norm(contiguous, w, b, ...)

What kernels ask for is in their rules, `autopar.rules.rule.Rule.strides`. An argument that is known to have it stays as
it is, see `autopar.rules.shapes.known_strides`. Users of one value share a copy, those of each pass of the step and of
each stage one of their own, so that the copy is not saved besides the value.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import (
    copy_graph,
    inherit_origin,
    is_backward,
    is_operator,
    producer,
    replace_tensor_arguments,
    tensor_arguments,
)
from autopar.ir.node_info import graph_info, info, set_graph_info, set_info
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.rules.shapes.known_strides import has_strides, known_strides, needs_of, tensors_of
from autopar.rules.shapes.local_shapes import propagate
from autopar.rules.strides import copier


def insert_contiguous(program: Program, plan: Plan) -> Program:
    """Put a conditional copy before every argument that is not known to have the strides that its kernel asks for."""
    propagate(program, plan, everything=True)
    inserted = _insert(program.graph, known_strides(program.graph))
    if inserted:
        propagate(program, plan)
    # The copies' own storages are not known: `propagate` has only filled in their shapes.
    set_graph_info(program.graph, replace(graph_info(program.graph), storages_known=not inserted))
    return program


def insert_contiguous_everywhere(program: Program, plan: Plan) -> Program:
    """The same as if nothing were known, for graphs whose operators are made to give what strides one likes."""
    if _insert(program.graph, None):
        propagate(program, plan)
    return program


def with_contiguous(program: Program) -> Program:
    """A copy of a program on whole tensors that runs whatever the strides of its inputs."""
    graph = copy_graph(program.graph)
    _insert(graph, None)
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.view.default:  # of strides that it was traced with, such as attention's result
            node.target = torch.ops.aten.reshape.default
    graph.recompile()
    return replace(program, graph=graph)


def _insert(module: fx.GraphModule, known: Collection[fx.Node] | None) -> bool:
    """Insert the copies; whether there are any."""
    made: dict[Any, fx.Node] = {}
    for node in list(module.graph.nodes):
        if not is_operator(node):
            continue
        needs = needs_of(node)
        if not any(needs):
            continue
        arguments = []
        for value, need in zip(tensors_of(node), needs, strict=True):
            # One copy for each pass, stage and microbatch scope: shared between two, it would live from one to the
            # other.
            key = (value, need, is_backward(node), info(node).stage, info(node).hoisted)
            if not need or has_strides(value, need, known):
                arguments.append(value)
                continue
            if key not in made:
                made[key] = _copy(module.graph, value, need, node)
            arguments.append(made[key])
        remaining, tensors = iter(arguments), set(tensors_of(node))
        # Arguments that are no tensors, such as a device's coordinate, have no strides.
        values = [next(remaining) if a in tensors else a for a in tensor_arguments(node)]
        node.args, node.kwargs = replace_tensor_arguments(node, values)
    if made:
        module.recompile()
    return bool(made)


def _copy(graph: fx.Graph, value: fx.Node, need: str, user: fx.Node) -> fx.Node:
    target, more = copier(need)
    with graph.inserting_before(user):
        node = graph.call_function(target, (value, *more))
    inherit_origin(node, user)
    source, index = producer(value)
    if info(source).layouts:
        layout = info(source).layout(index)
        known = replace(info(node), types=(info(source).types[index],), layouts=(layout,), input_layouts=(layout,))
        set_info(node, replace(known, internal=False))
    return node
