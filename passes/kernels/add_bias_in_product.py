"""add_bias_in_product: a product and the bias that is added to it are one kernel, as `torch.nn.Linear` runs them.

Before::

    mm = aten.mm(x, w); y = aten.add(mm, bias)

After::

    y = aten.addmm(bias, x, w)

Rules know products and additions, which devices may split apart: where a product's sum over devices comes between the
two, and where the bias is no vector, both stay. In bfloat16 the sum is rounded once then, as in eager mode.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from autopar.ir.graph import is_backward
from autopar.ir.node_info import info, set_info
from autopar.ir.ops.collectives import c10d
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.rules.shapes.known_strides import VIEWS

aten = torch.ops.aten


def add_bias_in_product(program: Program, plan: Plan) -> Program:
    """Join each matrix product with the addition of a vector to it."""
    graph = program.graph.graph
    position = {n: i for i, n in enumerate(graph.nodes)}
    found = [n for n in graph.nodes if _is_joined(n) and _follows(n, position)]
    for node in found:
        product, bias = node.args
        own, other = info(product), info(node)
        node.target, node.args = aten.addmm.default, (bias, *product.args)
        layouts = (other.input_layouts[1], *own.input_layouts)
        set_info(node, replace(other, operator=own.operator, strategy=own.strategy, input_layouts=layouts, added=other))
        graph.erase_node(product)
    if found:
        program.graph.recompile()
    return program


def adds_bias(node: fx.Node) -> bool:
    """Whether a node adds a vector to a product that nothing else reads, in the same pass."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    product, bias = node.args
    if not isinstance(product, fx.Node) or not isinstance(bias, fx.Node) or product.target is not aten.mm.default:
        return False
    total, vector = node.meta["val"], bias.meta["val"]
    if len(product.users) != 1 or vector.shape != total.shape[1:] or is_backward(product) != is_backward(node):
        return False
    same: bool = vector.dtype == product.meta["val"].dtype == total.dtype
    return same


def _is_joined(node: fx.Node) -> bool:
    """Whether a node of a rewritten graph adds a bias in the same part of the step, and is an operator of the plan."""
    if not adds_bias(node):
        return False
    own, other = info(node.all_input_nodes[0]), info(node)
    if own.operator is None or other.operator is None or own.takes_as_made or other.takes_as_made:
        return False
    return (own.stage, own.hoisted) == (other.stage, other.hoisted)


def _follows(node: fx.Node, position: Mapping[fx.Node, int]) -> bool:
    """Whether nothing runs between a product and its addition, and the bias is there when the product's matrices are.

    A product that waited for a bias that comes later would be late, and its matrices would be there for longer.
    """
    product, step = node.args[0], node.prev
    assert isinstance(product, fx.Node)
    while step is not product:
        if step.target is c10d.wait_tensor.default:
            # Those of one bucket arrive together.
            if min(position[w] for w in _waits(step)) > position[product]:
                return False
        elif step.target not in VIEWS and step.target is not operator.getitem:
            return False
        step = step.prev
    return True


def _waits(wait: fx.Node) -> list[fx.Node]:
    """All waits for the collective of one of them, which may be a bucket."""
    (source,) = wait.all_input_nodes
    if source.target is operator.getitem:
        source = source.all_input_nodes[0]
    return [w for n in (source, *source.users) for w in n.users if w.target is c10d.wait_tensor.default]
