"""`autopar.rules.shapes.kernel_shapes`: what is known of an operator is what it would compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar._torch_compat import OpOverload, storage_id
from autopar.rules.shapes import kernel_shapes

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, list | tuple):
        return type(found) is type(expected) and all(map(same, found, expected))
    return (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)


@pytest.mark.parametrize(
    ("target", "args", "kwargs"),
    [
        (aten.mm.default, (meta(3, 4), meta(4, 5)), {}),
        (aten.add.Tensor, (meta(3, 4).t(), meta(4, 3)), {"alpha": 2}),
        (aten.native_layer_norm.default, (meta(2, 8), [8], meta(8), meta(8), 1e-5), {}),
        (aten.split.Tensor, (meta(8, 4), 2), {}),
        (aten.view.default, (meta(8, 4), [4, 8]), {}),
        (aten._to_copy.default, (meta(2, 3),), {"dtype": torch.bfloat16}),
        (torch.ops._c10d_functional.wait_tensor.default, (meta(4),), {}),
        (aten.cat.default, ([meta(2, 3), meta(4, 3)],), {}),
    ],
)
def test_what_is_known_is_what_would_be_computed(target: OpOverload, args: Any, kwargs: Any) -> None:
    """Twice: the second answer is from memory, or is computed where results lie in memory of the arguments."""
    expected = target(*args, **kwargs)
    ids = {storage_id(a) for a in args if isinstance(a, torch.Tensor)}
    for _ in range(2):
        found = kernel_shapes.make(target, args, kwargs)
        assert same(found, expected)
        for x, y in zip(*(v if isinstance(v, list | tuple) else [v] for v in (found, expected)), strict=True):
            assert (storage_id(x) in ids) == (storage_id(y) in ids)
            assert x.untyped_storage().nbytes() == y.untyped_storage().nbytes()


def test_arguments_that_differ_are_told_apart() -> None:
    for dtype in (torch.float32, torch.float64):
        for kept in (False, True):
            assert kernel_shapes.make(aten.sum.dim_IntList, (meta(2, 3, dtype=dtype), [1], kept), {}).dtype is dtype
    assert kernel_shapes.make(aten.sum.dim_IntList, (meta(2, 3), [1], True), {}).shape == (2, 1)
    assert kernel_shapes.make(aten.sum.dim_IntList, (meta(2, 3), [1], 0), {}).shape == (2,)
    first, second = (kernel_shapes.make(aten.neg.default, (meta(2),), {}) for _ in range(2))
    assert storage_id(first) != storage_id(second)


def test_an_operator_without_a_meta_kernel_is_called_on_zeros() -> None:
    found = kernel_shapes.make(aten.geqrf.default, (meta(2, 5, 3),), {})
    assert same(found, tuple(torch.geqrf(torch.rand(2, 5, 3))))
    assert all(t.is_meta for t in found)
