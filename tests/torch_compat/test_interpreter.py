"""Contracts: code of graphs, and torch's interpreter of it."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from autopar import _torch_compat as compat

aten = torch.ops.aten


def test_code_of_a_list() -> None:
    """Whether a graph's code takes a list."""
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    assert not compat.is_boxed(graph)
    graph.set_codegen(compat.BoxedCodeGen())
    assert compat.is_boxed(graph)


def test_interpreted() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    parts = graph.call_function(aten.split.Tensor, (graph.call_function(aten.mul.Tensor, (x, 0.5)), 2))
    first, second = (graph.call_function(operator.getitem, (parts, i)) for i in range(2))
    joined = graph.call_function(aten.cat.default, ([second, first, y],))
    summed = graph.call_function(aten.sum.dim_IntList, (joined, [0], True), {"dtype": torch.float64})
    norm = graph.call_function(aten.native_layer_norm.default, (joined, [3], None, None, 1))
    normed = graph.call_function(operator.getitem, (norm, 0))
    flat = graph.call_function(aten.view.default, (normed, [-1]))
    scalar = graph.call_function(aten.reshape.default, (graph.call_function(aten.sum.default, (joined,)), []))
    rounded = graph.call_function(aten.div.Tensor_mode, (joined, 0.3), {"rounding_mode": "floor"})  # not div.Scalar
    graph.output((summed, normed, flat, scalar, rounded))
    calls = [n for n in graph.nodes if isinstance(n.target, compat.OpOverload)]
    assert all(compat.interpreter_takes(n) for n in calls)
    values = [torch.randn(4, 3), torch.randn(2, 3)]
    expected = fx.GraphModule({}, graph)(*values)
    for boxed in range(3):
        given = values[:boxed]
        with compat.interpreting():
            found = compat.interpreted(graph, boxed)(*([given] if boxed else ()), *values[boxed:])
        assert given == []
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, expected, strict=True))


def test_what_the_interpreter_does_not_take() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    # A bool where a number is asked for, a number where there is no operator on numbers, and a generator.
    for target, args in ((aten.full_like.default, (x, True)), (aten.atan2.default, (x, 2.0)),
                         (aten.bernoulli.default, (x, torch.Generator()))):  # fmt: skip
        assert not compat.interpreter_takes(graph.create_node("call_function", target, args))


def test_what_the_interpreter_has_not_is_a_type_error() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    # Where a tensor is asked for the interpreter is given a list of tensors, so that no overload fits.
    parts = graph.call_function(aten.split.Tensor, (x, 2))
    graph.output((graph.call_function(aten.sin.default, (parts,)),))
    with pytest.raises(TypeError, match="no schema"):
        compat.interpreted(graph, 0)


def test_said_by_kernel() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output((graph.call_function(aten.mm.default, (x, y)),))
    run = compat.interpreted(graph, 0)
    with compat.interpreting(), pytest.raises(RuntimeError) as found:
        run(torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(RuntimeError) as eager:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert str(found.value) != compat.said_by_kernel(found.value) == str(eager.value)


def test_boxed_code() -> None:
    """The caller's list is emptied, so that activations are freed as they are used."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(aten.neg.default, (x,)),))
    graph.set_codegen(compat.BoxedCodeGen())
    module = fx.GraphModule({}, graph)
    arguments = [torch.ones(2)]
    (result,) = module(arguments)
    assert arguments == []
    assert result.tolist() == [-1, -1]
