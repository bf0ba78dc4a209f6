"""Contracts: operators, kernels and classes of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend

from autopar import _torch_compat as compat

aten = torch.ops.aten


def grouped(dtype: torch.dtype, a: tuple[int, ...], b: tuple[int, ...], turned: str = "", **options: Any) -> Any:
    """A grouped product of matrices, some of them column-major."""
    first, second = (torch.ones(t, dtype=dtype) for t in (a, b))
    first, second = (t.mT.contiguous().mT if c in turned else t for c, t in (("a", first), ("b", second)))
    ends = torch.tensor([2, 5, 8], dtype=torch.int32) if 2 in (len(a), len(b)) else None
    return torch.ops.aten._grouped_mm(first, second, **{"offs": ends, **options})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64])
@pytest.mark.parametrize(
    ("a", "b", "options"),
    [
        ((8, 16), (3, 16, 24), {}),
        ((8, 16), (3, 16, 6), {}),
        ((8, 16), (3, 16, 6), {"turned": "b"}),
        ((8, 4), (3, 4, 24), {}),
        ((16, 8), (8, 24), {"turned": "a"}),
        ((3, 8, 16), (16, 8), {"turned": "b"}),
        ((3, 8, 16), (3, 16, 24), {}),
        ((3, 8, 16), (2, 16, 24), {}),
        ((3, 8, 16), (3, 16, 24), {"offs": torch.tensor([2, 5, 8], dtype=torch.int32)}),
        ((8, 16), (3, 16, 24), {"offs": torch.tensor([2, 5, 8])}),
        ((8, 16), (3, 16, 24), {"offs": None}),
        ((8, 16), (3, 8, 24), {}),
        ((8, 16), (3, 16, 24), {"bias": torch.ones(3, 24)}),
        ((8, 16), (3, 16, 24), {"out_dtype": torch.float16}),
    ],
)
def test_fake_grouped_products(dtype: torch.dtype, a: Any, b: Any, options: dict[str, Any]) -> None:
    """Kernels and fake tensors agree on dtypes, strides and errors; torch's own take bfloat16 alone."""

    def said() -> Any:
        try:
            found = grouped(dtype, a, b, **options)
        except RuntimeError as e:
            return str(e)
        return found.shape, found.stride(), found.dtype

    with compat.FakeTensorMode(allow_non_fake_inputs=True):
        fake = said()
    assert fake == said()


def test_storage_id() -> None:
    for device in ("cpu", "meta"):
        x = torch.empty(4, 4, device=device)
        assert {compat.storage_id(v) for v in (x, x[1:], x.t(), x.reshape(-1))} == {compat.storage_id(x)}
        others = [x.clone(), x.t().reshape(-1), torch.empty(4, 4, device=device)]
        assert len({compat.storage_id(v) for v in (x, *others)}) == 4


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

    class Own(torch.Tensor):
        """As a traced tensor is."""

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        torch.distributions.Normal(torch.zeros(2), torch.ones(2), validate_args=True).log_prob(torch.zeros(2))
        torch._check_tensor_all(torch.ones(2, dtype=torch.bool))
        torch._assert(torch.ones((), dtype=torch.bool).as_subclass(Own), "")
    assert asked.count(compat.asserts) == 1
    assert asked.count(compat.is_all_true) == 3
    assert asked.count(compat.are_all_true) == 1


def test_suggest_memory_format() -> None:
    image = torch.empty(2, 3, 4, 5)
    assert compat.suggest_memory_format(image) is torch.contiguous_format
    assert compat.suggest_memory_format(image.to(memory_format=torch.channels_last)) is torch.channels_last
    assert compat.suggest_memory_format(image.transpose(2, 3)) is torch.contiguous_format
    volume = torch.empty(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d)
    assert compat.suggest_memory_format(volume) is torch.channels_last_3d


def test_decompositions() -> None:
    table = compat.get_decompositions([aten.nll_loss_forward])
    assert aten.nll_loss_forward.default in table


def test_operator_overloads() -> None:
    """Discovery asks an operator whether it writes to its arguments, and whether it is random."""
    assert isinstance(aten.add.Tensor, compat.OpOverload)
    assert aten.add_.Tensor._schema.is_mutable
    assert not aten.add.Tensor._schema.is_mutable
    assert torch.Tag.nondeterministic_seeded in aten.bernoulli.default.tags


def test_operator_database() -> None:
    pytest.importorskip("expecttest")
    database = {op.formatted_name: op for op in compat.operator_database()}
    op = database["mm"]
    assert torch.float64 in op.supported_dtypes("cpu")
    assert torch.float64 in op.supported_backward_dtypes("cpu")
    sample = next(iter(op.sample_inputs("cpu", torch.float64, requires_grad=True)))
    assert sample.input.requires_grad
    assert torch.equal(op.op(sample.input, *sample.args, **sample.kwargs), sample.input @ sample.args[0])


def test_module_database() -> None:
    pytest.importorskip("expecttest")
    info = next(m for m in compat.module_database() if m.name == "nn.Linear")
    assert torch.float64 in info.supported_dtypes("cpu")
    sample = info.module_inputs_func(
        info, device="cpu", dtype=torch.float64, requires_grad=True, training=True
    )[0]  # fmt: skip
    layer = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).double()
    assert layer(*sample.forward_input.args, **sample.forward_input.kwargs).requires_grad


def test_below_autograd() -> None:
    x = torch.ones(2, requires_grad=True)
    assert (x * 2).requires_grad
    with compat.below_autograd():
        assert not (x * 2).requires_grad
    assert (x * 2).requires_grad


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
    # Into rows of a larger tensor, as chunks of products are.
    whole = torch.full((40, 16), -1.0, dtype=dtype)
    rows = whole.narrow(0, 4, 32)
    assert compat.scaled_mm(left, right.t(), scales[0], scales[1].t(), dtype, rows).data_ptr() == rows.data_ptr()
    assert torch.equal(rows, found)
    assert bool((whole[:4] == -1).all() and (whole[36:] == -1).all())


def test_arguments_of_operators() -> None:
    a, b = torch.ones(2), torch.zeros(2)
    assert [t is v for t, v in zip(compat.tensors_in(([a, 1], {"x": b})), (a, b), strict=True)] == [True, True]
    assert torch.equal(compat.map_tensors(torch.neg, ((a, "text"),))[0][0], -a)
    assert [t is a for t in compat.written_by(aten.add_.Tensor, (a, b), {})] == [True]
    assert [t is a for t in compat.written_by(aten.add.out, (b, b), {"out": a})] == [True]
    assert [t is b for t in compat.written_by(aten._foreach_mul_.Scalar, ([b], 2.0), {})] == [True]
    assert compat.written_by(aten.add.Tensor, (a, b), {}) == []


@torch.library.custom_op("autopar_contracts::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_functions_of_a_custom_operator() -> None:
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2

    assert compat.traced_functions(scaled) == compat.traced_functions(len) == []
    scaled.register_autograd(backward)
    assert compat.traced_functions(scaled) == [backward]
