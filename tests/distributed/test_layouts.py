"""Every boundary layout on a 2x2 mesh: blocks, full tensors, redistribution to plain shards and back."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.launch import Ranks, mesh_of

pytestmark = pytest.mark.distributed


def every_layout(rank: int) -> int:
    from autopar.ir.layout import Factor, Partial, TensorType, divides
    from autopar.runtime.dtensor import (
        from_local,
        from_placements,
        full_tensor,
        local_block,
        part_of,
        redistribute,
        to_local,
        to_placements,
    )  # fmt: skip
    from autopar.runtime.mesh import mesh_context
    from autopar.runtime.state.state_dict import plain_shards
    from autopar.search.formulation.pins import is_boundary_layout
    from autopar.sharding.candidates import layouts

    context = mesh_context(mesh_of(2, 2), 30)
    type_ = TensorType("float64", ((Factor("three", 4), Factor("heads", 4), Factor("head", 2)), (Factor("hidden", 8),)))
    full = torch.arange(256, dtype=torch.float64).reshape(32, 8)
    count = 0
    for layout in layouts(type_, context.sizes):
        if not is_boundary_layout(type_, layout, context.sizes) or any(isinstance(p, Partial) for p in layout):
            continue
        assert divides(type_, layout, context.sizes)
        placements = to_placements(type_, layout)
        assert from_placements(type_, placements, context.sizes) == layout
        block = local_block(full, type_, layout, context.sizes, context.coordinates)
        tensor = from_local(block, context, full.shape, placements)
        assert torch.equal(full_tensor(tensor), full), layout
        plain = redistribute(tensor, context, plain_shards(placements))
        assert torch.equal(full_tensor(plain), full), f"{layout} to plain shards"
        back = redistribute(plain, context, placements)
        assert torch.equal(to_local(back), block), f"{layout} back from plain shards"
        assert torch.equal(part_of(plain, type_, layout, context), block)
        count += 1
    return count


def test_every_boundary_layout(ranks: Ranks) -> None:
    counts = ranks.run(every_layout)
    assert min(counts) > 15
