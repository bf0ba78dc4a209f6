"""Contracts of the private parts of torch that autopar uses: when one breaks, this says which."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import linecache
import multiprocessing
import operator
import pickle
import threading
from collections.abc import Generator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from autopar import _torch_compat as compat
from autopar.runtime.state.whole_operators import WholeView, install_whole_operators

aten = torch.ops.aten


def test_every_name_has_a_contract() -> None:
    tested = {
        "BatchNorm", "BoxedCodeGen", "DTensorSpec", "FakeTensor", "FakeTensorMode", "LazyGraphModule", "OpOverload",
        "StridedShard", "TensorMeta",
        "TorchDispatchMode", "TracingContext", "aot_export_joint_with_descriptors", "attention_kernel",
        "below_autograd",
        "budget_partition",
        "checkpoint_replaced", "compiling", "context_parallel_internals",
        "convert_assigned", "default_partition", "dtensor_overloads",
        "flex_attention_as",
        "forget_fake_results", "forget_source_with",
        "get_decompositions", "hooks_of_all_modules", "inductor", "inductor_lacks", "interpreted",
        "interpreter_takes", "interpreting", "interrupt_gloo", "is_all_true", "is_boxed",
        "is_traced", "is_transformed", "local_shape_of",
        "masks_as_they_are", "new_fake_results", "number_of_groups", "operator_database", "pipeline_runtime",
        "put_around_collectives", "pytree_node", "recurrent_dropout", "redistributed",
        "reduce_found_inf_over_every_gradient",
        "refuse_items_of_unreduced", "refuse_to_pickle_parts", "run_beyond_dtensor",
        "said_by_kernel", "scaled_mm", "selective_policy", "set_group_timeout",
        "spec_in",
        "storage_id", "suggest_memory_format", "take_in_foreach", "torch_schedule", "traced_graph", "traced_node",
        "traced_root",
        "tracing", "without_modes", "without_ordered_effects",
    }  # fmt: skip
    assert set(compat.__all__) == tested


def test_sources_go_with_their_graphs() -> None:
    for kind in (fx.GraphModule, compat.LazyGraphModule):
        graph = fx.Graph()
        graph.output(graph.call_function(torch.neg, (graph.placeholder("x"),)))
        made = kind(nn.Module(), graph)
        compat.forget_source_with(made)
        assert made(torch.ones(1)).item() == -1
        file = type(made).forward.__code__.co_filename
        assert "torch.neg" in linecache.getline(file, 5) + linecache.getline(file, 6), linecache.getlines(file)
        del made, graph
        gc.collect()
        assert linecache.getlines(file) == []


def test_fake_results_are_forgotten() -> None:
    with compat.new_fake_results() as results, compat.FakeTensorMode():
        torch.ones(3, 1237).t() @ torch.ones(3, 1237)
    assert results and all(key in compat.FakeTensorMode.cache for key in results)
    with compat.new_fake_results() as again, compat.FakeTensorMode():
        torch.ones(3, 1237).t() @ torch.ones(3, 1237)
    assert again == []
    compat.forget_fake_results(results)
    assert not any(key in compat.FakeTensorMode.cache for key in results)


def test_storage_id() -> None:
    for device in ("cpu", "meta"):
        x = torch.empty(4, 4, device=device)
        assert {compat.storage_id(v) for v in (x, x[1:], x.t(), x.reshape(-1))} == {compat.storage_id(x)}
        others = [x.clone(), x.t().reshape(-1), torch.empty(4, 4, device=device)]
        assert len({compat.storage_id(v) for v in (x, *others)}) == 4


def test_tensors_of_transformed_functions() -> None:
    found: list[bool] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        found.append(compat.is_transformed(x))
        return x.sum()

    torch.func.vmap(function)(torch.ones(2, 3))
    torch.func.grad(function)(torch.ones(3))
    make_fx(function)(torch.ones(3))
    assert found == [True, True, False]


def test_the_kernel_that_torch_takes_for_attention() -> None:
    q, shared = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8)
    flash, formula = SDPBackend.FLASH_ATTENTION, SDPBackend.MATH
    with torch.no_grad():
        assert compat.attention_kernel(q, q, q, None, 0.0, True, False) == flash
        assert compat.attention_kernel(q, shared, shared, torch.zeros(3, 3), 0.0, False, True) == flash
        assert compat.attention_kernel(q, q, q[..., :4], None, 0.0, False, False) == formula
        assert compat.attention_kernel(q, q, q, None, 0.5, False, False) == formula
    assert not q.requires_grad


def test_batch_norm_has_one_forward_for_all_dims() -> None:
    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        assert kind.forward is compat.BatchNorm.forward
    module = nn.BatchNorm1d(2, momentum=None)
    assert (module.momentum, int(module.num_batches_tracked)) == (None, 0)
    with pytest.raises(ValueError, match="expected 2D or 3D"):
        module._check_input_dim(torch.ones(2))


def test_distributions_ask_whether_all_values_are_valid() -> None:
    asked = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        torch.distributions.Normal(torch.zeros(2), torch.ones(2), validate_args=True).log_prob(torch.zeros(2))
    assert asked.count(compat.is_all_true) == 3


def test_suggest_memory_format() -> None:
    image = torch.empty(2, 3, 4, 5)
    assert compat.suggest_memory_format(image) is torch.contiguous_format
    assert compat.suggest_memory_format(image.to(memory_format=torch.channels_last)) is torch.channels_last
    assert compat.suggest_memory_format(image.transpose(2, 3)) is torch.contiguous_format
    volume = torch.empty(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d)
    assert compat.suggest_memory_format(volume) is torch.channels_last_3d


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


def test_decompositions() -> None:
    table = compat.get_decompositions([aten.nll_loss_forward])
    assert aten.nll_loss_forward.default in table


def test_operator_overloads() -> None:
    """Discovery asks an operator whether it writes to its arguments, and whether it is random."""
    assert isinstance(aten.add.Tensor, compat.OpOverload)
    assert aten.add_.Tensor._schema.is_mutable
    assert not aten.add.Tensor._schema.is_mutable
    assert torch.Tag.nondeterministic_seeded in aten.bernoulli.default.tags


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_is_replaced_under_every_name(reentrant: bool) -> None:
    """One is imported, one is bound by `partial`; afterwards torch's own is back."""
    calls: list[str] = []

    def first(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        calls.append("reentrant")
        return function(*args)

    def other(function: Any, preserve: bool, context_fn: Any, *rest: Any, **kwargs: Any) -> Generator[None]:
        assert len(context_fn()) == 2
        calls.append("other")
        yield
        calls.append("left")

    bound, x = functools.partial(checkpoint, use_reentrant=reentrant), torch.ones(2, requires_grad=True)
    with compat.checkpoint_replaced(first, other):
        assert torch.equal(bound(torch.exp, x), x.exp())
        assert torch.equal(checkpoint_sequential([torch.exp, torch.exp], 2, x, reentrant), x.exp().exp())
    assert calls == (["reentrant"] * 2 if reentrant else ["other", "left"] * 2)
    bound(torch.exp, x).sum().backward()
    assert torch.equal(x.grad, x.detach().exp())


def test_selective_policy() -> None:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    assert compat.selective_policy(create_selective_checkpoint_contexts(policy)[0]) is policy
    of_list = compat.selective_policy(create_selective_checkpoint_contexts([aten.mm.default])[0])
    assert of_list(None, aten.mm.default) is CheckpointPolicy.MUST_SAVE
    assert of_list(None, aten.add.Tensor) is CheckpointPolicy.PREFER_RECOMPUTE
    assert compat.selective_policy(contextlib.nullcontext()) is None


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


def test_operator_database() -> None:
    pytest.importorskip("expecttest")
    database = {op.formatted_name: op for op in compat.operator_database()}
    op = database["mm"]
    assert torch.float64 in op.supported_dtypes("cpu")
    assert torch.float64 in op.supported_backward_dtypes("cpu")
    sample = next(iter(op.sample_inputs("cpu", torch.float64, requires_grad=True)))
    assert sample.input.requires_grad
    assert torch.equal(op.op(sample.input, *sample.args, **sample.kwargs), sample.input @ sample.args[0])


def test_dtensor_overloads() -> None:
    known = compat.dtensor_overloads()
    assert {"aten.mm.default", "aten.add.Tensor", "aten.sum.dim_IntList"} <= known
    assert "docs.none.default" not in known


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


def test_code_of_a_list() -> None:
    """Whether a graph's code takes a list."""
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    assert not compat.is_boxed(graph)
    graph.set_codegen(compat.BoxedCodeGen())
    assert compat.is_boxed(graph)


def test_below_autograd() -> None:
    x = torch.ones(2, requires_grad=True)
    assert (x * 2).requires_grad
    with compat.below_autograd():
        assert not (x * 2).requires_grad
    assert (x * 2).requires_grad


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
    graph.output((summed, normed, flat, scalar))
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


@pytest.fixture(scope="module")
def fake_group() -> object:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_dtensor_spec_can_be_replaced_in_place(fake_group: object) -> None:
    """`lay_out` gives a parameter another local tensor and spec; the object stays."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    x = nn.Parameter(DTensor.from_local(torch.ones(4, 2), mesh, [Replicate()], run_check=False))
    meta = compat.TensorMeta(torch.Size((4, 2)), (2, 1), torch.float32)
    spec = compat.DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)
    x._local_tensor, x._spec = torch.zeros(2, 2), spec
    assert x.placements == (Shard(0),)
    assert tuple(x.shape) == (4, 2)
    assert tuple(x.to_local().shape) == (2, 2)


def test_strided_shard() -> None:
    placement = compat.StridedShard(0, split_factor=3)
    assert placement.dim == 0
    assert placement.split_factor == 3
    assert isinstance(placement, compat.StridedShard)


def test_a_strided_shard_that_is_no_order_of_splits_is_whole_again(fake_group: object) -> None:
    """Torch 2.11 fails where ``split_factor`` is no size of a mesh axis; the others compute what they would anyway."""
    mesh = init_device_mesh("cpu", (2,))
    whole, placement = torch.arange(6.0), compat.StridedShard(0, split_factor=3)
    meta = compat.TensorMeta(whole.shape, whole.stride(), whole.dtype)
    spec = compat.spec_in(mesh, [placement], meta)
    assert spec.placements == (placement,)
    tensor = DTensor(whole[::2].clone(), spec, requires_grad=False)  # type: ignore[no-untyped-call]
    found = compat.redistributed(tensor, mesh, [Replicate()])
    # The fake group's gather leaves zeros or copies; the shape and the placements are the planner's.
    assert (found.placements, tuple(found.to_local().shape)) == ((Replicate(),), (6,))


def test_group_timeout(fake_group: object) -> None:
    assert callable(compat.set_group_timeout)


def test_names_of_groups_that_only_their_ranks_make(fake_group: object) -> None:
    """Why processes that have made other numbers of groups would wait for each other under different names."""
    made = compat.number_of_groups()
    first, second = (dist.new_group([0], backend="fake", use_local_synchronization=True) for _ in range(2))
    assert compat.number_of_groups() == made + 2 and first.group_name != second.group_name
    name = hashlib.sha1(f"0_{made}".encode(), usedforsecurity=False).hexdigest()
    assert first.group_name == name


def _wait_in_vain(rank: int, store: str, ended: Any) -> None:
    """Wait for a message that nobody sends, in two ways, until another thread ends the wait."""
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(store, 2))
    group = dist.group.WORLD
    dist.barrier()
    if rank == 0:
        threading.Timer(0.5, compat.interrupt_gloo, (group,)).start()
        with pytest.raises(RuntimeError):
            dist.recv(torch.empty(1), src=1)
        with pytest.raises(RuntimeError):  # and none is waited for again
            dist.all_reduce(torch.ones(1))
        ended.put(True)
    else:
        ended.get(timeout=60)


@pytest.mark.distributed
def test_waits_of_gloo_end(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ended, one = context.Queue(), str(tmp_path / "store")
    processes = [context.Process(target=_wait_in_vain, args=(r, one, ended), daemon=True) for r in range(2)]
    for process in processes:
        process.start()
    try:
        processes[1].join(120)
        assert processes[1].exitcode == 0
    finally:
        for process in processes:
            process.kill()


def test_what_is_put_around_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of DTensors and of checkpoints go through these names, which torch looks up when it calls them."""
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.checkpoint.utils import _DistWrapper

    own = ("gather_object", "scatter_object", "broadcast_object", "all_gather_object", "barrier")
    for owner, name in [(functional, "wait_tensor"), *((_DistWrapper, name) for name in own)]:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, getattr(original, "__wrapped__", original))
    entered: list[str] = []

    @contextlib.contextmanager
    def around(what: str) -> Generator[None]:
        entered.append(what)
        yield

    for _ in range(2):
        compat.put_around_collectives(around)
    waited = functional.AsyncCollectiveTensor(torch.ones(2)) + 1
    assert float(waited.sum()) == 4 and entered == ["an operator of DTensors"]
    alone = _DistWrapper(None, False, 0)
    assert alone.all_reduce("a step", lambda: 2, sum) == 2
    assert entered[1:] == ["torch.distributed.checkpoint"] * 2


def test_overflow_is_looked_for_in_gradients_of_every_layout(fake_group: object) -> None:
    """Torch lets a handler take the place of its own, which reduces over the axes that split the first gradient."""
    unscale = aten._amp_foreach_non_finite_check_and_unscale_.default
    assert callable(DTensor._op_dispatcher._custom_op_handlers[unscale])
    compat.reduce_found_inf_over_every_gradient()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    gradients = [DTensor.from_local(torch.ones(2), mesh, [p], run_check=False) for p in (Replicate(), Shard(0))]
    for value, expected in ((4.0, 0.0), (float("inf"), 1.0)):
        gradients[1].to_local().fill_(value)
        found = torch.zeros(1)
        unscale(gradients, found, torch.full((1,), 0.5))
        assert float(found) == expected
    assert gradients[0].to_local().tolist() == [0.25, 0.25]


def test_classes_of_tensors_in_foreach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has two lists of exact classes: of parameters that optimizers take in lists, and of what norms are of."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for module in (optimizer, _foreach_utils):
        monkeypatch.setattr(module, "_foreach_supported_types", [*module._foreach_supported_types])
    monkeypatch.setattr(optimizer, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])

    class Held(torch.Tensor):
        pass

    held = [torch.ones(2).as_subclass(Held), nn.Parameter(torch.ones(2))]
    for known in (False, True, True):
        assert optimizer._default_to_fused_or_foreach(held, False) == (False, known)
        assert optimizer._default_to_fused_or_foreach(held, False, use_fused=True) == (known, False)
        assert _foreach_utils._has_foreach_support(held[:1], torch.device("cpu")) == known
        compat.take_in_foreach(Held)
    assert _foreach_utils._foreach_supported_types.count(Held) == 1


def test_what_is_assigned_to_a_dtensor_is_converted(fake_group: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Properties of a class of Python come before those of the class of tensors; others stay as torch's."""
    for name in ("data", "grad"):  # whatever has been put there before is back afterwards
        monkeypatch.setattr(DTensor, name, getattr(DTensor, name))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))

    def parameter(value: float) -> nn.Parameter:
        return nn.Parameter(DTensor.from_local(torch.full((2, 2), value), mesh, [Shard(0)], run_check=False))

    ours, other = parameter(0.0), parameter(0.0)

    def convert(tensor: object, value: torch.Tensor, what: str) -> torch.Tensor | None:
        return parameter(float(value[0, 0]) + len(what)).detach() if tensor is ours else None

    compat.convert_assigned(convert)
    ours.data = torch.ones(4, 2)
    assert float(ours.to_local()[0, 0]) == 5
    ours.grad = torch.ones(4, 2)
    assert isinstance(ours.grad, DTensor)
    assert float(ours.grad.to_local()[0, 0]) == 5
    ours.grad = None
    assert ours.grad is None
    other.data, other.grad = parameter(2.0).detach(), parameter(3.0).detach()
    assert float(other.grad.to_local()[0, 0]) == 3
    assert float(other.to_local()[0, 0]) == 2  # torch alone leaves 0: what `convert_assigned` is for


def test_items_of_what_is_not_reduced_are_refused(fake_group: object) -> None:
    """Torch lets a handler take the place of its own ``item()``, which gives this rank's term."""
    compat.refuse_items_of_unreduced()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    split = DTensor.from_local(torch.ones(4, 2), mesh, [Shard(0)], run_check=False)
    with pytest.raises(RuntimeError, match="would be this rank's term"):
        DTensor.from_local(torch.ones(()), mesh, [Partial()], run_check=False).item()
    with pytest.raises(RuntimeError, match=r"call full_tensor\(\).tolist\(\)"):
        split.tolist()
    whole = DTensor.from_local(torch.ones(4, 2), mesh, [Replicate()], run_check=False)
    assert whole.sum().item() == 8
    assert float(whole.sum()) == 8


def test_what_torch_has_no_rule_for_is_handed_over(fake_group: object) -> None:
    """Torch asks attributes of its dispatcher, which may give the result of an operator instead of a decision."""
    install_whole_operators()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    split = DTensor.from_local(torch.ones(4, 2), mesh, [Shard(0)], run_check=False)
    rows, loss = split[:3], torch.nn.functional.mse_loss(split, split)
    assert (type(rows), type(split[:, :1]), loss.placements) == (WholeView, DTensor, (Replicate(),))
    split[torch.ones(8, 2, dtype=torch.bool)] = 0
    assert split.to_local().sum() == 0
    assert torch.renorm(split, 2.0, 0, 1.0).placements == (Replicate(),)
    assert (split * torch.ones(8, 2)).placements == (Shard(0),)
    assert type(torch.ones(8, 2).mul_(split)) is torch.Tensor
    assert split.sum().placements == (Replicate(),)


def test_parts_are_not_pickled(fake_group: object) -> None:
    own = DTensor.__reduce_ex__
    compat.refuse_to_pickle_parts(lambda tensor: ValueError(str(tensor.placements)))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    with pytest.raises(ValueError, match="Shard"):
        pickle.dumps(DTensor.from_local(torch.ones(4, 2), mesh, [Shard(0)], run_check=False))
    whole = DTensor.from_local(torch.ones(4, 2), mesh, [Replicate()], run_check=False)
    assert type(pickle.loads(pickle.dumps(whole))) is torch.Tensor
    DTensor.__reduce_ex__ = own  # type: ignore[method-assign]


def test_local_shapes(fake_group: object) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    assert compat.local_shape_of((5, 2), mesh, (Shard(0),)) == (3, 2)
    assert compat.local_shape_of((6, 2), mesh, (compat.StridedShard(0, split_factor=3),)) == (3, 2)
    assert compat.local_shape_of((5, 2), mesh, (Replicate(),)) == (5, 2)


def test_schedules() -> None:
    first, second = compat.torch_schedule("LoopedBFS", 2, 1, 1)
    assert first == [(0, "F", 0), (0, "B", 0)]
    assert second == [(1, "F", 0), (1, "B", 0)]
    kinds = {kind for row in compat.torch_schedule("DualPipeV", 2, 4, 2) for _, kind, _ in row}
    assert kinds == {"F", "B", "I", "W"}


def test_the_runtime_of_pipelines_calls_a_stage() -> None:
    """Both stages of a pipeline of one device; what a neighbor sends is handed over."""
    calls: list[tuple[str, int]] = []

    class Stage:
        num_stages, group_rank, group_size, submod, has_backward = 2, 0, 1, None, True

        def __init__(self, index: int) -> None:
            self.stage_index, self.is_first, self.is_last = index, index == 0, index == 1

        def forward_one_chunk(self, n: int, *_: object, **__: object) -> list[int]:
            calls.append(("F", self.stage_index))
            return [n]

        def set_local_fwd_input(self, outputs: list[int], n: int) -> None:
            assert outputs == [n]
            calls.append(("handed", self.stage_index))

        def backward_one_chunk(self, n: int, *, full_backward: bool, **_: object) -> None:
            calls.append(("B" if full_backward else "I", self.stage_index))

        def backward_weight_one_chunk(self, n: int, **_: object) -> None:
            calls.append(("W", self.stage_index))

        def get_local_bwd_output(self, n: int) -> list[int]:
            return [n]

        def set_local_bwd_input(self, outputs: list[int], n: int) -> None:
            calls.append(("back", self.stage_index))

    rows = [[(0, "F", 0), (1, "F", 0), (1, "I", 0), (0, "B", 0), (1, "W", 0)]]
    compat.pipeline_runtime([Stage(0), Stage(1)], rows, [0, 0], 1)()
    assert calls == [("F", 0), ("handed", 1), ("F", 1), ("I", 1), ("back", 0), ("B", 0), ("W", 1)]


def test_classes_registered_with_pytrees() -> None:
    class Pair:
        def __init__(self, a: Any, b: Any) -> None:
            self.a, self.b = a, b

    assert compat.pytree_node(Pair) is None
    torch.utils._pytree.register_pytree_node(Pair, lambda p: ([p.a], p.b), lambda children, b: Pair(*children, b))
    node = compat.pytree_node(Pair)
    children, context = node.flatten_fn(Pair(1, 2))
    assert (list(children), context) == ([1], 2)
    assert vars(node.unflatten_fn([3], context)) == {"a": 3, "b": 2}


def test_hooks_of_all_modules() -> None:
    def hook(*_: Any) -> None:
        """Nothing."""

    for name in ("forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"):
        assert compat.hooks_of_all_modules() == []
        handle = getattr(torch.nn.modules.module, f"register_module_{name}")(hook)
        assert compat.hooks_of_all_modules() == [hook]
        handle.remove()


def test_dropout_between_recurrent_layers() -> None:
    """That torch's decomposition has none says when ours is not needed any more."""
    model, gru = torch.nn.GRU(2, 2, 3, dropout=0.5), aten.gru.input
    rest = [list(model.parameters()), True, 3, 0.5, True, False, False]

    def draws() -> bool:
        before = torch.get_rng_state()
        compat.get_decompositions([gru])[gru](torch.ones(2, 2, 2), torch.zeros(3, 2, 2), *rest)
        return not torch.equal(before, torch.get_rng_state())

    assert not draws()
    with compat.recurrent_dropout():
        assert draws()


def test_masks_as_they_are() -> None:
    causal = torch.nn.Transformer.generate_square_subsequent_mask(3)
    detect = torch.nn.modules.transformer._detect_is_causal_mask
    with compat.masks_as_they_are():
        found = torch.nn.modules.transformer._detect_is_causal_mask
        assert [found(causal), found(causal, None, 3), found(causal, is_causal=True), found(None)] == [
            False, False, True, False,
        ]  # fmt: skip
    assert torch.nn.modules.transformer._detect_is_causal_mask is detect and detect(causal)


def test_flex_attention_as() -> None:
    """Also where its name was imported to, and where it is compiled; its signature is torch's."""
    from torch.nn.attention.flex_attention import flex_attention

    calls: list[Any] = []
    with compat.flex_attention_as(lambda *args, **kwargs: calls.append((args, kwargs))):
        flex_attention("q", "k", "v", scale=2.0)  # type: ignore[call-overload]
    assert calls == [(("q", "k", "v", None, None, 2.0, False, False, None), {"return_aux": None})]
    q = torch.ones(1, 1, 4, 8)
    assert torch.equal(flex_attention(q, q, q), q)


@pytest.mark.parametrize(
    # With scales of rows kernels of GPUs write bfloat16 alone.
    ("rowwise", "dtype"), [(False, torch.bfloat16), (False, torch.float32), (True, torch.bfloat16)],
)  # fmt: skip
def test_scaled_mm(rowwise: bool, dtype: torch.dtype) -> None:
    """On the CPU, which has it too: scales of both kinds, formats mixed; what our own product gives without it."""
    from autopar.ir.ops.float8 import product, quantize, scale

    a, b = (torch.randn(n, 48, generator=torch.Generator().manual_seed(n)) for n in (32, 16))
    dims = [1] if rowwise else [0, 1]
    scales = scale(a, dims, "e5m2"), scale(b, dims, "e4m3")
    values = quantize(a, scales[0], "e5m2"), quantize(b, scales[1], "e4m3")
    left, right = values[0].view(torch.float8_e5m2), values[1].view(torch.float8_e4m3fn)
    found = compat.scaled_mm(left, right.t(), scales[0], scales[1].t(), dtype)
    expected = product(*values, *scales, "e5m2", "e4m3", dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_context_parallel_internals() -> None:
    """What `benchmarks/axes_beside.py` takes of it, and that kernels of a CPU are not in its table, as it says."""
    rings = compat.context_parallel_internals()
    for ring, own in ((rings._templated_ring_attention, ()), (rings._templated_ring_attention_backward, ("grad_out",))):
        assert {"group", "seq_dim", "op", "query", "key", "value", "is_causal", *own} <= {*signature(ring).parameters}
    assert callable(rings.set_rotate_method)
    assert torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default not in rings.custom_ops
