"""Blocks of full tensors under layouts."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from autopar._torch_compat import StridedShard
from autopar.ir import layout as lay
from autopar.ir.layout import Factor, Layout, Partial, Split, TensorType, local_shape
from autopar.runtime.dtensor import block_ranges, from_placements, local_block, to_placements
from autopar.runtime.state.materialize import _type_of_hull
from autopar.sharding.candidates import layouts

TYPE = TensorType("float32", ((Factor("three", 2), Factor("heads", 4), Factor("head", 2)), (Factor("hidden", 8),)))
SIZES = (2, 2)
WHOLE = lay.Replicate()
LAYOUTS = [v for v in layouts(TYPE, SIZES) if not any(isinstance(p, Partial) for p in v)]
FULL = torch.arange(128.0).reshape(16, 8)


def test_a_leading_factor_is_a_shard_and_another_one_a_strided_shard() -> None:
    assert to_placements(TYPE, (Split(0, 0), Split(1, 0))) == (Shard(0), Shard(1))
    assert to_placements(TYPE, (WHOLE, Split(0, 1))) == (Replicate(), StridedShard(0, split_factor=2))
    assert from_placements(TYPE, (StridedShard(0, split_factor=8), Replicate()), SIZES) == (Split(0, 2), WHOLE)
    assert from_placements(TYPE, (Shard(-1), Replicate()), SIZES) == (Split(1, 0), WHOLE)


def test_a_shard_across_factors_has_no_layout() -> None:
    assert from_placements(TYPE, (Shard(0), Shard(0)), SIZES) is None  # factor 2 of 2 x 4 x 2 cannot be cut in four
    assert from_placements(TYPE, (StridedShard(0, split_factor=4), Replicate()), SIZES) is None


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_blocks_cover_the_tensor(layout: Layout) -> None:
    seen = torch.zeros_like(FULL)
    for coordinates in itertools.product(range(2), range(2)):
        block = local_block(FULL, TYPE, layout, SIZES, coordinates)
        assert block.shape == local_shape(TYPE, layout, SIZES)
        assert block.is_contiguous()
        seen.view(-1)[block.long().reshape(-1)] += 1
        ranges, rest = block_ranges(TYPE, layout, SIZES, coordinates)
        again = local_block(FULL[ranges], _type_of_hull(TYPE, ranges), rest, SIZES, coordinates)
        assert torch.equal(again, block)
    copies = 4 // max(1, round(FULL.numel() / local_block(FULL, TYPE, layout, SIZES, (0, 0)).numel()))
    assert torch.equal(seen, torch.full_like(FULL, copies))


def test_a_part_does_not_keep_the_whole_alive() -> None:
    block = local_block(FULL, TYPE, (Split(0, 0), WHOLE), SIZES, (0, 0))
    assert block.untyped_storage().nbytes() == block.numel() * 4
