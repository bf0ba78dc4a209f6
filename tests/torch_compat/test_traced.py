"""Contracts: tracing, fake tensors and graphs."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from autopar import _torch_compat as compat

aten = torch.ops.aten


def test_tensors_of_transformed_functions() -> None:
    found: list[bool] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        found.append(compat.is_transformed(x))
        assert compat.is_transforming() == compat.is_transformed(x)
        return x.sum()

    torch.func.vmap(function)(torch.ones(2, 3))
    torch.func.grad(function)(torch.ones(3))
    make_fx(function)(torch.ones(3))
    assert found == [True, True, False]


def test_whether_a_graph_is_traced() -> None:
    found: list[bool] = []

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            found.append(compat.is_tracing())
            return (x.sin(),)

    with compat.FakeTensorMode(), contextlib.ExitStack() as stack:
        assert not compat.is_tracing()
        compat.aot_export_joint_with_descriptors(stack, Model(), (torch.ones(2),), decompositions={})
    assert len(found) > 1
    assert all(found)


def test_modes() -> None:
    class Function(TorchFunctionMode):
        pass

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return torch.ops.aten.neg.default(*args)

    assert not compat.function_modes()
    with torch.device("cpu"), Function() as mode:
        assert compat.function_modes() == [mode]
    x = torch.ones(2)
    with Dispatch():
        with compat.without_users_modes():
            assert torch.equal(x.sin(), torch.sin(x))
        negative = x.sin()
    assert torch.equal(negative, -x)
    with compat.FakeTensorMode(), compat.without_users_modes():
        assert isinstance(torch.ones(2), compat.FakeTensor)


def test_torchs_trackers_are_left_out() -> None:
    with FlopCounterMode(display=False):
        before = compat.hooks_of_all_modules()
        with compat.without_trackers():
            assert not compat.hooks_of_all_modules()
        assert compat.hooks_of_all_modules() == before
        assert before


def test_a_lazy_graph_module_follows_its_graph() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.relu, (x,)))
    module = compat.LazyGraphModule(nn.Module(), graph)
    value = torch.tensor([-1.0, 2.0])
    assert torch.equal(module(value), value.relu())
    next(n for n in graph.nodes if n.op == "call_function").target = torch.neg
    module.recompile()
    assert torch.equal(module(value), -value)
    assert "neg" in module.code


def joint() -> fx.GraphModule:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            self.steps.add_(1)
            return (self.inner(x).relu().sum(),)

    with compat.FakeTensorMode(allow_non_fake_inputs=True), contextlib.ExitStack() as stack:
        model, x = Model(), torch.empty(2, 4)
        exported = torch.export.export(model, (x,), strict=False).module(check_guards=False)
        table = compat.get_decompositions([aten.addmm])
        return compat.aot_export_joint_with_descriptors(
            stack, exported, (x,), decompositions=table, _record_nn_module_stack=True
        ).graph_module


def test_joint_export() -> None:
    graph = joint()
    assert isinstance(graph, compat.LazyGraphModule) and graph._needs_recompile()
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    kinds = [type(n.meta["desc"]).__name__ for n in placeholders]
    assert kinds == ["ParamAOTInput"] * 2 + ["BufferAOTInput", "PlainAOTInput", "TangentAOTInput"]
    assert placeholders[0].meta["desc"].target == "inner.weight"
    assert placeholders[3].meta["desc"].idx == 0
    assert placeholders[4].meta["desc"].output.idx == 0
    outputs = graph.graph.output_node().meta["desc"]
    assert [type(d).__name__ for d in outputs if d is not None] == [
        "InputMutationAOTOutput", "PlainAOTOutput", "GradAOTOutput", "GradAOTOutput"
    ]  # fmt: skip
    assert outputs[0].mutated_input.target == "steps"
    assert [d.grad_of.target for d in outputs if type(d).__name__ == "GradAOTOutput"] == ["inner.weight", "inner.bias"]
    tags = {n.meta.get("partitioner_tag") for n in graph.graph.nodes if n.op == "call_function"}
    assert "is_backward" in tags
    paths = [
        n.meta.get("nn_module_stack") or n.meta.get("fwd_nn_module_stack") for n in graph.graph.nodes if "mm" in n.name
    ]
    assert all(p and list(p.values())[-1][0].endswith("inner") for p in paths)
    assert not any("addmm" in str(n.target) for n in graph.graph.nodes)


def test_a_dispatch_mode_sees_operators_before_they_are_decomposed() -> None:
    """And the graph in which their parts are."""
    seen: list[tuple[str, list[str]]] = []

    class Mode(compat.TorchDispatchMode):
        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            graph = compat.traced_graph()
            seen.append((str(func), [str(n.target) for n in graph.nodes if n.op == "call_function"]))
            return out

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with Mode():
            return torch.addmm(a, b, b)

    table = {aten.addmm.default: lambda a, b, c: aten.add(aten.mm(b, c), a)}
    make_fx(function, decomposition_table=table)(torch.ones(2, 2), torch.ones(2, 2))
    assert seen == [("aten.addmm.default", ["aten.mm.default", "aten.add.Tensor"])]
    assert compat.traced_graph() is None


def test_fake_tensors() -> None:
    mode = compat.FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        x = torch.empty(3, 4)
        assert isinstance(x, compat.FakeTensor)
        assert tuple((x @ torch.ones(4, 2)).shape) == (3, 2)
    assert isinstance(mode.from_tensor(torch.ones(2)), compat.FakeTensor)


def test_tracing_context() -> None:
    mode = compat.FakeTensorMode()
    with compat.tracing(compat.TracingContext(mode)):
        found = compat.TracingContext.try_get()
        assert found is not None and found.fake_mode is mode
    assert compat.TracingContext.try_get() is None


def test_sizes_of_what_a_mask_selects() -> None:
    asked = []

    def answer(condition: Any) -> bool:
        asked.append(str(condition))
        return False

    with compat.FakeTensorMode(shape_env=compat.sizes_of_rows(answer), static_shapes=True):
        x, mask = torch.empty(4, 3), torch.empty(4, dtype=torch.bool)
        rows = x[mask]
        (symbol,) = rows.shape[0].node.expr.free_symbols
        assert rows.shape[1] == 3
        assert x[mask].shape[0].node.expr == symbol  # of the same mask as many
        assert torch.cat([rows, rows]).shape[0].node.expr == 2 * symbol
        assert not rows.shape[0] == 0
        assert asked == [f"Eq({symbol}, 0)"]
        with pytest.raises(Exception, match=r"data-dependent|_local_scalar_dense"):
            mask.sum().item()  # values have no symbols
        with pytest.raises(Exception, match=r"data-dependent|_local_scalar_dense"):
            int(rows.shape[0])
        with pytest.raises(compat.DynamicOutputShapeException):
            raise compat.DynamicOutputShapeException(torch.ops.aten.unique_dim.default)
