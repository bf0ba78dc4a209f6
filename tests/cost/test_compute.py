from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from autopar.cluster import Cluster, Device
from autopar.cost.compute import (
    attention_backward_flops,
    attention_flops,
    conv_backward_flops,
    conv_flops,
    matmul_backward_flops,
    matmul_flops,
    roofline,
)

DEVICE = Device("toy", {"float32": 100.0, "bfloat16": 400.0}, memory=1.0, bandwidth=10.0, launch=0.25, efficiency=0.5)
AMOUNTS = st.floats(0, 1e18)


def test_roofline_takes_the_slower_of_arithmetic_and_memory() -> None:
    assert float(roofline(100, 10, "float32", DEVICE)) == 2.25  # 100 / (100 0.5) + launch
    assert float(roofline(100, 50, "float32", DEVICE)) == 5.25  # 50 / 10 + launch
    assert float(roofline(100, 1, "bfloat16", DEVICE)) == 0.75


def test_only_a_kernel_with_nothing_to_do_is_free() -> None:
    np.testing.assert_array_equal(roofline([0, 0, 50], [0, 1, 0], "float32", DEVICE), [0, 0.35, 1.25])


def test_roofline_broadcasts() -> None:
    flops, moved = np.array([[0.0], [1e3]]), np.array([0.0, 5.0, 1e6])
    table = roofline(flops, moved, "float32", DEVICE)
    expected = [[float(roofline(f, b, "float32", DEVICE)) for b in moved] for f in flops[:, 0]]
    np.testing.assert_array_equal(table, expected)


@given(flops=AMOUNTS, moved=AMOUNTS, share=st.integers(1, 64))
def test_splitting_work_saves_at_most_its_share(flops: float, moved: float, share: int) -> None:
    device = Cluster.preset("h100").device
    whole = float(roofline(flops, moved, "bfloat16", device))
    part = float(roofline(flops / share, moved / share, "bfloat16", device))
    assert part <= whole * (1 + 1e-12) <= part * share * (1 + 1e-9)


def test_integers_count_at_the_rate_of_float32() -> None:
    assert roofline(100, 0, "int64", DEVICE) == roofline(100, 0, "float32", DEVICE)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="device toy states no peak for float64"):
        roofline(1, 1, "float64", DEVICE)
    with pytest.raises(ValueError, match="negative amount of work: -1 operations"):
        roofline(-1, 1, "float32", DEVICE)


def counted(function: object, *args: torch.Tensor) -> tuple[int, int]:
    """Operations that torch's own counter finds, forward and backward."""
    with FlopCounterMode(display=False) as forward:
        out = function(*args)  # type: ignore[operator]
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def test_matmul_agrees_with_torch() -> None:
    a, b = torch.randn(3, 5, requires_grad=True), torch.randn(5, 7, requires_grad=True)
    assert counted(torch.mm, a, b) == (matmul_flops(3, 5, 7), matmul_backward_flops(3, 5, 7))
    a, b = torch.randn(2, 3, 5, requires_grad=True), torch.randn(2, 5, 7, requires_grad=True)
    assert counted(torch.bmm, a, b) == (matmul_flops(3, 5, 7, batch=2), matmul_backward_flops(3, 5, 7, batch=2))


def test_convolution_agrees_with_torch() -> None:
    layer = torch.nn.Conv2d(4, 6, kernel_size=(3, 5), stride=2)
    x = torch.randn(2, 4, 11, 13, requires_grad=True)
    args = (2, 4, 6, (3, 5), layer(x).shape[2:])
    assert counted(layer, x) == (conv_flops(*args), conv_backward_flops(*args))


def test_groups_of_a_convolution_do_not_see_each_other() -> None:
    whole = conv_flops(2, 4, 6, (3,), (10,))
    assert conv_flops(2, 4, 6, (3,), (10,), groups=2) * 2 == whole
    assert conv_flops(1, 2, 3, (3,), (10,)) * 2 * 2 == conv_flops(2, 4, 6, (3,), (10,), groups=2)


def test_attention_is_its_products() -> None:
    b, h, q, k, d = 2, 3, 5, 7, 11
    scores, output = matmul_flops(q, d, k, batch=b * h), matmul_flops(q, k, d, batch=b * h)
    assert attention_flops(b, h, q, k, d) == scores + output
    # again the scores, then the gradients of probabilities, values, queries and keys
    backward = scores + matmul_backward_flops(q, k, d, batch=b * h) + matmul_backward_flops(q, d, k, batch=b * h)
    assert attention_backward_flops(b, h, q, k, d) == backward


def test_values_of_another_size() -> None:
    b, h, q, k, d, e = 2, 3, 5, 7, 11, 4
    scores, output = matmul_flops(q, d, k, batch=b * h), matmul_flops(q, k, e, batch=b * h)
    assert attention_flops(b, h, q, k, d, d_value=e) == scores + output
    backward = scores + matmul_backward_flops(q, k, e, batch=b * h) + matmul_backward_flops(q, d, k, batch=b * h)
    assert attention_backward_flops(b, h, q, k, d, d_value=e) == backward


@pytest.mark.parametrize(("q", "k"), [(1, 1), (4, 4), (3, 8), (8, 3)])
def test_a_causal_mask_leaves_the_pairs_of_torch(q: int, k: int) -> None:
    pairs = sum(j <= i for i, j in product(range(q), range(k)))
    assert pairs == int(torch.ones(q, k).tril().sum())
    assert attention_flops(2, 3, q, k, 5, causal=True) == 4 * 2 * 3 * pairs * 5
    assert attention_backward_flops(2, 3, q, k, 5, causal=True) == 10 * 2 * 3 * pairs * 5
