"""Contracts: the partitioner and inductor."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autopar import _torch_compat as compat

aten = torch.ops.aten


def exponential() -> tuple[fx.GraphModule, compat.FakeTensorMode]:
    """A step that needs ``exp(x)`` in both passes."""
    graph = fx.Graph()
    mode = compat.FakeTensorMode()

    def made(node: fx.Node, *shape: int, backward: bool = False) -> fx.Node:
        with mode:
            node.meta["val"] = torch.empty(shape)
        node.meta["partitioner_tag"] = "is_backward" if backward else "is_forward"
        return node

    x = made(graph.placeholder("primals_1"), 2)
    tangent = made(graph.placeholder("tangents_1"), 2)
    y = made(graph.call_function(aten.exp.default, (x,)), 2)
    gradient = made(graph.call_function(aten.mul.Tensor, (tangent, y)), 2, backward=True)
    out = graph.output([y, gradient])
    out.meta["desc"] = [None, None]
    return fx.GraphModule({}, graph), mode


def test_partition() -> None:
    """Two graphs by the names of the placeholders; what the backward pass needs is saved."""
    module, mode = exponential()
    with compat.tracing(compat.TracingContext(mode)):
        forward, backward = compat.default_partition(module, (), num_fwd_outputs=1)
    assert all(isinstance(g, compat.LazyGraphModule) and g._needs_recompile() for g in (forward, backward))
    saved = forward(torch.zeros(2))
    assert len(saved) == 2
    assert torch.equal(backward(saved[1], torch.ones(2))[0], torch.ones(2))


def test_partition_within_a_budget() -> None:
    """Without any memory for activations it takes the input and computes again."""
    module, mode = exponential()
    with compat.tracing(compat.TracingContext(mode)):
        forward, backward = compat.budget_partition(module, 1, 0.0, "dp")
    x = torch.ones(2)
    assert torch.equal(forward(x)[1], x)
    assert aten.exp.default in {n.target for n in backward.graph.nodes}
    torch.testing.assert_close(backward(x, torch.ones(2))[0], x.exp())


@pytest.mark.slow
@pytest.mark.skipif(bool(compat.inductor_lacks(torch.device("cpu"))), reason="no C++ compiler")
def test_inductor() -> None:
    """Strides are those of the graph, views stay views, the list is emptied, and decompositions are asked for."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    summed = graph.call_function(aten.add.Tensor, (x, graph.call_function(aten.permute.default, (y, [1, 0]))))
    turned, cosine = graph.call_function(aten.permute.default, (x, [1, 0])), graph.call_function(aten.cos.default, (y,))
    graph.output((summed, turned, cosine))
    given = [torch.randn(3, 4, dtype=torch.float64).t(), torch.randn(3, 4, dtype=torch.float64)]
    found = compat.inductor(fx.GraphModule({}, graph), given, {aten.cos.default: lambda t: t.sin()})
    values = list(given)
    made, view, decomposed = found(values)
    assert values == []
    assert torch.equal(made, given[0] + given[1].t())
    assert made.stride() == (given[0] + given[1].t()).stride()
    assert view.data_ptr() == given[0].data_ptr()
    torch.testing.assert_close(decomposed, given[1].sin())


def test_what_inductor_lacks() -> None:
    """Without a C++ compiler the answer names one; without triton, it."""
    from torch._inductor import config
    from torch._inductor.cpp_builder import get_cpp_compiler

    get_cpp_compiler.cache_clear() if hasattr(get_cpp_compiler, "cache_clear") else None
    with config.patch({"cpp.cxx": ("/nowhere/c++",)}):
        assert "C++ compiler" in compat.inductor_lacks(torch.device("cpu"))
    if not torch.cuda.is_available():
        assert "triton" in compat.inductor_lacks(torch.device("cuda"))
