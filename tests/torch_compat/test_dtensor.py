"""Contracts: `DTensor`, its specs, placements and operators."""

from __future__ import annotations

import copy
import pickle
from inspect import signature
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from autopar import _torch_compat as compat
from autopar.errors import AutoparError
from autopar.ir.layout import At
from autopar.runtime.state import parameters
from autopar.runtime.state.whole_operators import WholeView, install_whole_operators

aten = torch.ops.aten


def test_dtensor_overloads() -> None:
    known = compat.dtensor_overloads()
    assert {"aten.mm.default", "aten.add.Tensor", "aten.sum.dim_IntList"} <= known
    assert "docs.none.default" not in known


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


def test_modules_convert_by_the_name_that_is_replaced(fake_group: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """``Module.to`` finds ``torch.utils.swap_tensors`` when it is called, and swaps DTensors."""
    monkeypatch.setattr(torch.utils, "swap_tensors", torch.utils.swap_tensors)
    for name in ("data", "grad"):
        monkeypatch.setattr(DTensor, name, getattr(DTensor, name))
    compat.convert_assigned(lambda *_: None)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    layer = nn.Linear(2, 4, bias=False)
    layer.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)], run_check=False))
    layer.weight.kind, own = "ours", layer.weight  # type: ignore[attr-defined]
    for known in (True, False):
        compat.convert_in_place(lambda _, known=known: known)
        penalty = layer.weight.square()  # a graph that holds it
        layer.to(torch.float64 if known else torch.float32)
        assert layer.weight is own
        assert layer.weight.kind == "ours"
        assert layer.weight.to_local().dtype == layer.weight.dtype == (torch.float64 if known else torch.float32)
        del penalty


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
    kind = WholeView if compat.asks_subclasses(mesh) else DTensor
    assert (type(rows), type(split[:, :1]), loss.placements) == (kind, DTensor, (Replicate(),))
    if kind is DTensor:
        with pytest.raises(AutoparError, match=r"add_.Tensor would write to a view .* is a copy here"):
            rows[1:].add_(1)
    split[torch.ones(8, 2, dtype=torch.bool)] = 0
    assert split.to_local().sum() == 0
    assert torch.renorm(split, 2.0, 0, 1.0).placements == (Replicate(),)
    assert (split * torch.ones(8, 2)).placements == (Shard(0),)
    assert type(torch.ones(8, 2).mul_(split)) is torch.Tensor
    assert split.sum().placements == (Replicate(),)


def test_what_torch_does_not_handle_is_handled(fake_group: object) -> None:
    """Torch leaves an old shape to ``squeeze_``, copies gradients through no storage, and compiles fake parts."""
    install_whole_operators()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    split = DTensor.from_local(torch.ones(4, 2), mesh, [Shard(0)], run_check=False)
    vector = DTensor.from_local(torch.ones(1, 6), mesh, [Replicate()], run_check=False)
    assert (vector.squeeze_(0).shape, (vector * 2).shape, split.t_().shape) == ((6,), (6,), (2, 8))
    assert len(compat.overloads_of(["mul"])) > 2
    seen: list[Any] = []
    compat.handle_operators([torch.ops.aten.tan.default], lambda op, own: lambda *call: seen.append((op, own)))
    assert torch.tan(vector) is None and seen == [(torch.ops.aten.tan.default, None)]
    del DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten.tan.default]
    with compat.FakeTensorMode() as mode, pytest.raises(DataDependentOutputException):
        compat.leave_trace("op", [mode.from_tensor(torch.ones(2))])


def test_what_is_assigned_to_a_parametrized_weight(fake_group: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch asks one function for it."""
    install_whole_operators()
    monkeypatch.setattr(nn.utils.parametrize, "_maybe_set", nn.utils.parametrize._maybe_set)
    compat.assign_in_parametrizations()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    parameter = nn.Parameter(DTensor.from_local(torch.ones(4, 2), mesh, [Replicate()], run_check=False))
    with torch.no_grad():
        nn.utils.parametrize._maybe_set(parameter, torch.full((4, 2), 3.0))
    assert parameter.to_local().sum() == 24


def test_tensors_that_operators_are_given_to_write() -> None:
    sort, stack = torch.ops.aten.sort.values, torch.ops.aten.stack.out
    first, second = torch.ones(2), torch.ones(2)
    assert compat.written_tensors(sort) == ["values", "indices"]
    assert compat.written_tensors(torch.ops.aten._foreach_add.List_out) == []
    assert len(compat.read_of(stack, [first, second], {"out": second})) == 1
    writing = compat.operators_where(lambda s: any(a.is_out for a in s.arguments))
    assert {sort, stack} < {*writing} and torch.ops.aten.mul.Tensor not in writing


def test_views_under_inference_mode(fake_group: object) -> None:
    """Torch fails, or reads the sizes of a whole tensor as those of a part."""
    install_whole_operators()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    split = DTensor.from_local(torch.ones(4, 2), mesh, [Shard(0)], run_check=False)
    with torch.inference_mode():
        with compat.normal_views(torch.ops.aten.view.default, (split,)):
            assert not torch.is_inference_mode_enabled()
        with compat.normal_views(torch.ops.aten.mul.Tensor, (split, 2)):
            assert torch.is_inference_mode_enabled()
        assert (split.view(-1).placements, split.unflatten(0, (4, -1)).shape) == ((Shard(0),), (4, 2, 2))
        split.t().zero_()
        assert (split * 2).view(-1).is_inference()
    assert split.to_local().sum() == 0
    # Outside of it, views are torch's own, which are faster.
    handled: Any = DTensor._op_dispatcher._custom_op_handlers
    assert torch.ops.aten.view.default not in handled
    with torch.inference_mode(), torch.inference_mode(False), torch.inference_mode():
        assert torch.ops.aten.view.default in handled
    assert torch.ops.aten.view.default not in handled and torch.ops.aten.as_strided.default in handled


def test_copies_of_parameters_have_no_gradients(fake_group: object) -> None:
    own = DTensor.__deepcopy__
    compat.copy_parameters_alone()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    parameter = nn.Parameter(DTensor.from_local(torch.ones(4, 2), mesh, [Shard(0)], run_check=False))
    parameter.sum().backward()
    first, second = copy.deepcopy([parameter, parameter])
    assert first is second and first.grad is None and parameter.grad is not None
    assert isinstance(first, nn.Parameter) and first.requires_grad and first.placements == (Shard(0),)
    assert first.to_local().data_ptr() != parameter.to_local().data_ptr()
    DTensor.__deepcopy__ = own  # type: ignore[method-assign]


def test_other_dispatchers_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = SimpleNamespace(_random_ops=())
    monkeypatch.setattr(DTensor, "_op_dispatcher", dispatcher)
    compat.run_beyond_dtensor(lambda *_: None, lambda *_: None)
    assert vars(dispatcher) == {"_random_ops": ()}


def test_whether_a_backward_pass_is_under_way() -> None:
    told: list[int] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: told.append(torch._C._current_graph_task_id()))
    assert torch._C._current_graph_task_id() == -1
    x.sum().backward()
    assert told[0] >= 0


def test_subclasses_of_dtensor_are_asked(fake_group: object) -> None:
    """What tensors of one pipeline stage live by; torch 2.11 alone does not."""
    asked = compat.asks_subclasses(init_device_mesh("cpu", (2,), mesh_dim_names=("a",)))
    assert asked or torch.__version__.startswith("2.11.")


def test_stages_need_subclasses_that_are_asked(fake_group: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "asks_subclasses", lambda mesh: False)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    tensor, none = DTensor.from_local(torch.ones(4, 2), mesh, [Replicate()], run_check=False), cast(Any, None)
    with pytest.raises(AutoparError, match=r"pipeline stages with torch .* install torch 2.12 or newer"):
        parameters.lay_out(tensor, torch.ones(4, 2), none, (At(0),), none)
    assert tensor.placements == (Replicate(),)


def test_read_only() -> None:
    memory = torch.zeros(3, 2)
    found = compat.read_only(memory, lambda op: ValueError(str(op)))
    assert type(found + 1) is torch.Tensor
    for view in (found, found[1:], found.view(-1), *found.chunk(2)):
        with pytest.raises(ValueError, match="mul_"):
            view.mul_(2)
    assert found.data_ptr() == memory.data_ptr()


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


def test_context_parallel_internals() -> None:
    """What `benchmarks/axes_beside.py` takes of it, and that kernels of a CPU are not in its table, as it says."""
    rings = compat.context_parallel_internals()
    for ring, own in ((rings._templated_ring_attention, ()), (rings._templated_ring_attention_backward, ("grad_out",))):
        assert {"group", "seq_dim", "op", "query", "key", "value", "is_causal", *own} <= {*signature(ring).parameters}
    assert callable(rings.set_rotate_method)
    assert torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default not in rings.custom_ops
