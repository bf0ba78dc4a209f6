"""localize_random: every device draws its own block only, from a seed that says which block it is.

Before (on a mesh of 4 devices along data and 2 along model)::

    mask = autopar.ir.ops.random("dropout", [0.1, 4], [2, 16], [0, 1], dtype=bool)          # [batch{data}, hidden]

After::

    block = axis_index("data")
    mask = seeded(autopar.ir.ops.random, 0, block, "dropout", [0.1, 4], [2, 16], [0, 1], dtype=bool)

The seed is made of the step's, the number of the operator (here 0) and the block's, so blocks are independent and
replicas are equal, whatever the devices' own generators. A copy that the backward pass recomputes has its original's
number, so it draws the same.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

from torch import fx

from autopar.ir.graph import inherit_origin
from autopar.ir.node_info import info, set_info
from autopar.ir.ops.collectives import axis_index
from autopar.ir.ops.random import seeded
from autopar.ir.plan import Plan
from autopar.ir.program import Program, draws
from autopar.rules.shapes.local_shapes import propagate
from autopar.sharding.candidates import REPLICATE


def localize_random(program: Program, plan: Plan) -> Program:
    """Give every random operator its number and its block's."""
    graph = program.graph.graph
    found = [n for n in graph.nodes if draws(n)]
    numbers: dict[str, int] = {}
    for node in found:
        # By the forward node's name: the copy's own differs.
        number = numbers.setdefault(info(node).recompute_of or node.name, len(numbers))
        with graph.inserting_before(node):
            block = _block(graph, node, plan)
        node.args = (node.target, number, block, *node.args)
        node.target = seeded
        if isinstance(block, fx.Node):
            # Input layouts are of tensor arguments, and the block's number, which is one now, has no layout.
            set_info(node, replace(info(node), input_layouts=()))
    if found:
        propagate(program, plan)
    return program


def _block(graph: fx.Graph, node: fx.Node, plan: Plan) -> Any:
    """Number of this device's block: the first axis that splits the output counts the most."""
    index: Any = 0
    for (name, size), strategy in zip(plan.axes, info(node).strategy, strict=True):
        if strategy == REPLICATE:
            continue
        here = _call(graph, node, axis_index, name)
        # A number in mixed radix: one digit for each axis, devices that draw one block have the same.
        if isinstance(index, fx.Node):
            index = _call(graph, node, operator.mul, index, size)
            here = _call(graph, node, operator.add, index, here)
        index = here
    return index


def _call(graph: fx.Graph, node: fx.Node, target: Any, *args: Any) -> fx.Node:
    made = graph.call_function(target, args)
    inherit_origin(made, node)
    return made
