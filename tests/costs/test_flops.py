from itertools import product

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from autopar.costs.flops import (
    attention_backward_flops,
    attention_flops,
    conv_backward_flops,
    conv_flops,
    matmul_backward_flops,
    matmul_flops,
)


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
