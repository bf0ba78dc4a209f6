"""Blocks of tensors, and the tensor from its blocks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from autopar.ir.layout import Factor, Partial, Replicate, Split, TensorType, local_shape
from autopar.ir.shards import assemble, block, block_ranges, coordinates
from autopar.sharding.candidates import layouts

dims = st.lists(st.lists(st.sampled_from([2, 3, 4, 8]), max_size=2), max_size=3)


def make_type(sizes: list[list[int]]) -> TensorType:
    return TensorType(
        "int64", tuple(tuple(Factor(f"f{d}{j}", n) for j, n in enumerate(dim)) for d, dim in enumerate(sizes))
    )


def numbers(type_: TensorType) -> torch.Tensor:
    return torch.arange(1, type_.numel + 1).reshape(type_.shape)


def test_coordinates_run_fastest_in_the_last_axis() -> None:
    assert list(coordinates((2, 3)))[:4] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert list(coordinates(())) == [()]


def test_later_axes_split_what_earlier_ones_left() -> None:
    type_ = make_type([[8, 2]])
    ranges = [block_ranges(type_, (Split(0), Split(0)), (2, 2), where)[0][0] for where in coordinates((2, 2))]
    assert ranges == [(0, 2), (2, 2), (4, 2), (6, 2)]


def test_block_of_a_factor_behind_another() -> None:
    """Heads in a fused projection: every second pair."""
    type_ = make_type([[3, 4], []])
    parts = [block(numbers(type_), type_, (Split(0, 1),), (2,), (i,)).flatten().tolist() for i in range(2)]
    assert parts == [[1, 2, 5, 6, 9, 10], [3, 4, 7, 8, 11, 12]]


@given(dims, st.lists(st.sampled_from([1, 2, 3, 4]), max_size=3), st.data())
def test_assemble_inverts_block(sizes: list[list[int]], axes: list[int], data: st.DataObject) -> None:
    type_ = make_type(sizes)
    assume(math.prod(axes) <= 16)
    layout = data.draw(st.sampled_from(layouts(type_, tuple(axes))))
    full = numbers(type_)
    parts = [block(full, type_, layout, axes, where) for where in coordinates(axes)]
    assert all(tuple(p.shape) == local_shape(type_, layout, axes) and p.is_contiguous() for p in parts)
    found, difference = assemble(parts, type_, layout, axes)
    assert torch.equal(found, full)
    assert difference == 0.0
    whole = sum(p.numel() for p in parts)  # every element is held by as many ranks as are not split
    assert whole == full.numel() * math.prod(n for p, n in zip(layout, axes, strict=True) if not isinstance(p, Split))


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float64, 0.5), (torch.int64, math.inf)])
def test_replicas_that_differ_are_seen(dtype: torch.dtype, expected: float) -> None:
    type_ = make_type([[4]])
    full = torch.zeros(4, dtype=dtype)
    parts = [block(full, type_, (Replicate(), Split(0)), (2, 2), where) for where in coordinates((2, 2))]
    parts[3] = parts[3] + (0.5 if dtype.is_floating_point else 1)
    assert assemble(parts, type_, (Replicate(), Split(0)), (2, 2))[1] == expected


def test_partial_terms_are_summed() -> None:
    type_ = make_type([[2]])
    parts = [torch.tensor([1, 2]), torch.tensor([10, 20])]
    assert assemble(parts, type_, (Partial(),), (2,))[0].tolist() == [11, 22]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64])
def test_unsigned_integers(dtype: torch.dtype) -> None:
    """Torch cannot add them up."""
    type_ = TensorType("uint64", ((Factor("n", 4),),))
    parts = [torch.tensor([1, 2], dtype=dtype), torch.tensor([3, 2**16 - 1], dtype=dtype)]
    assert assemble(parts, type_, (Split(0),), (2,))[0].tolist() == [1, 2, 3, 2**16 - 1]


def test_blocks_share_no_memory() -> None:
    type_ = make_type([[4]])
    full = numbers(type_)
    block(full, type_, (Replicate(),), (2,), (0,)).zero_()
    assert full.tolist() == [1, 2, 3, 4]
