"""Routing: what each device sorts of its own tokens serves as well as the order of all, whatever is done with rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.ops import routing
from autopar.ir.ops.routing import add_by_expert, collect, group_ends, route, sort_by_expert
from tests.strategies.stand_ins import grouped_mm

EXPERTS = 4


def computed(
    x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, k: int
) -> list[torch.Tensor]:
    """Tokens, and sums over all rows: a product of each expert, what is added by expert, and gradients of weights."""
    experts, order = sort_by_expert(ids, k, 3)
    ends = group_ends(experts, EXPERTS)
    rows = route(x, order, k)
    made = grouped_mm(rows, weight, ends)
    back = route(grad, order, k)
    sums = [ends, add_by_expert(made, experts, EXPERTS), grouped_mm(rows.T, back, ends)]
    return [collect(made * made, order, k, len(order)), route(ids, order, 1) - experts, *sums]


@given(st.integers(1, 3), st.sampled_from([1, 2, 4]), st.integers(0, 10**6), st.booleans())
def test_devices_sort_their_own(k: int, devices: int, seed: int, skewed: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(8, size, generator=g, dtype=torch.float64) for size in (3, 2))
    weight = torch.randn(EXPERTS, 3, 2, generator=g, dtype=torch.float64)
    ids = torch.randint(0, 1 if skewed else EXPERTS, (8 * k,), generator=g)
    whole = computed(x, ids, weight, grad, k)
    parts = [
        computed(*(t.chunk(devices)[i] for t in (x, ids)), weight, grad.chunk(devices)[i], k) for i in range(devices)
    ]
    for i, (expected, *found) in enumerate(zip(whole, *parts, strict=True)):
        torch.testing.assert_close(
            torch.cat(found) if i < 2 else torch.stack(found).sum(0).to(expected.dtype), expected
        )


@pytest.mark.parametrize("k", [1, 2])
def test_collect_is_the_transpose_of_route(k: int) -> None:
    order = torch.randperm(4 * k)
    x, rows = torch.randn(4, 3, dtype=torch.float64), torch.randn(4 * k, 3, dtype=torch.float64)
    torch.testing.assert_close((route(x, order, k) * rows).sum(), (x * collect(rows, order, k, 4 * k)).sum())


def test_experts_without_rows_end_where_they_begin() -> None:
    experts, _ = sort_by_expert(torch.tensor([2, 0, 2]), 1, 3)
    assert group_ends(experts, EXPERTS).tolist() == [1, 1, 3, 3]
    assert group_ends(experts[:0], EXPERTS).tolist() == [0] * EXPERTS


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("columns", [16, 12])
def test_products_of_groups(dtype: torch.dtype, columns: int) -> None:
    """By torch's kernel where it takes the numbers; the second expert has no rows, and a matrix may be transposed."""
    g = torch.Generator().manual_seed(0)
    rows, right = (torch.randn(11, n, generator=g).to(dtype) for n in (8, columns))
    weight = torch.randn(3, columns, 8, generator=g).to(dtype)
    ends = torch.tensor([4, 4, 11], dtype=torch.int32)
    experts = torch.tensor([0] * 4 + [2] * 7)
    tolerance = {"atol": 0.05, "rtol": 0.05} if dtype == torch.bfloat16 else {"atol": 1e-12, "rtol": 0.0}
    for matrices in (weight.mT, weight.mT.contiguous()):
        expected = torch.einsum("sk,skn->sn", rows.double(), matrices[experts].double())
        torch.testing.assert_close(routing.multiply_by_expert(rows, matrices, ends).double(), expected, **tolerance)
    outer = torch.einsum("sm,sn->smn", rows.double(), right.double())
    expected = torch.zeros(3, 8, columns, dtype=torch.float64).index_add(0, experts, outer)
    torch.testing.assert_close(routing.outer_by_expert(rows, right, ends).double(), expected, **tolerance)
