"""Shares of the batch on four ranks: three steps of AdamW equal one device's on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.steps import TOLERANCE, follow

pytestmark = pytest.mark.distributed


def train(rank: int, counts: list[int], inner: str) -> tuple[float, int]:
    """The largest difference in steps of two numbers of rows, and how many microbatches this rank has run."""
    from autopar.ir.ops.accumulate import GradientAccumulator
    from autopar.parallelize import parallelize
    from autopar.search.options import Search
    from tests.search.microbatch.test_shares import Net, batch_of

    torch.manual_seed(0)
    plain, model = Net().double(), Net().double()
    model.load_state_dict(plain.state_dict())
    pins = {"shares": {"a": counts}}
    search = Search(roles={"a": "data", "b": inner}, pins=pins)
    parallel: Any = parallelize(model, mesh_of(2, 2), search=search, timeout=WAIT)
    runs, enter = [0], GradientAccumulator.microbatch

    def counted(self: GradientAccumulator) -> Any:
        runs[0] += 1
        return enter(self)

    GradientAccumulator.microbatch = counted  # type: ignore[method-assign]
    try:
        batches = [dict(zip(("x", "weights"), (t.double() for t in batch_of(n)), strict=True)) for n in (24, 24, 48)]
        return follow(parallel, plain, batches, clip=0.1), runs[0]
    finally:
        GradientAccumulator.microbatch = enter  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("counts", "inner"), [([5, 1], "shard"), pytest.param([1, 3], "tensor", marks=pytest.mark.deep)]
)
def test_on_ranks(ranks: Ranks, counts: list[int], inner: str) -> None:
    for rank, (worst, runs) in enumerate(ranks.run(train, counts, inner)):
        assert worst < TOLERANCE
        assert runs == 3 * counts[rank // 2]
