"""Axis names become process groups, axis indices become numbers."""

import operator

import torch
from torch import fx

from autopar.ir.ops.collectives import GROUP_ARGUMENT, axis_index, c10d
from autopar.runtime.step.bind import bind


def graph() -> fx.GraphModule:
    made = fx.Graph()
    x = made.placeholder("x")
    index = made.call_function(axis_index, ("b",))
    start = made.call_function(operator.mul, (index, 4))
    start = made.call_function(operator.add, (start, 1))
    part = made.call_function(torch.ops.aten.slice.Tensor, (x, 0, start, 8))
    pair = made.call_function(torch.ops.aten.split.Tensor, (part, 1))
    first = made.call_function(operator.getitem, (pair, 0))
    total = made.call_function(c10d.all_reduce.default, (first, "sum", "a"))
    made.output([made.call_function(c10d.wait_tensor.default, (total,)), None])
    for node in made.nodes:
        node.meta["val"] = node.name
    return fx.GraphModule({}, made)


def test_groups_and_indices_are_put_in() -> None:
    before = graph()
    text = str(before.graph)
    bound = bind(before, {"a": "17", "b": "18"}, {"a": 0, "b": 1})
    nodes = {n.target: n for n in bound.graph.nodes if n.op == "call_function"}
    assert axis_index not in nodes
    assert operator.mul not in nodes
    assert operator.add not in nodes
    assert nodes[torch.ops.aten.slice.Tensor].args[2] == 5
    assert nodes[c10d.all_reduce.default].args[GROUP_ARGUMENT[c10d.all_reduce.default]] == "17"
    assert nodes[operator.getitem].meta["val"] == "getitem"
    bound.graph.lint()
    assert str(before.graph) == text, "the graph that is given must not change"
