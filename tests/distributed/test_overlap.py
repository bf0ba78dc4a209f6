"""Collectives of a block travel together on four ranks: steps of AdamW, one after `no_sync`, equal one device's."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.launch import Ranks, mesh_of
from tests.distributed.steps import TOLERANCE

pytestmark = pytest.mark.distributed


def steps(rank: int, recipe: str, cluster: str) -> tuple[float, bool, int]:
    """The largest difference of gradients and parameters, whether the plan overlaps, and coalesced reductions.

    Args:
        rank: of the process.
        recipe: of the layouts.
        cluster: on GPUs reductions are coalesced, on CPUs packed.
    """
    from autopar.parallelize import parallelize
    from autopar.search.options import Search
    from tests import models

    (model, batch), (plain, _) = (models.llama(layers=2) for _ in range(2))
    model, plain = model.double(), plain.double()
    module = parallelize(model, mesh_of(2, 2), cluster=cluster, search=Search(recipe=recipe))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-3) for m in (module, plain)]
    worst = 0.0
    for step in range(2):
        if step:
            with module.no_sync():
                module(**batch).loss.backward()
            plain(**batch).loss.backward()
        module(**batch).loss.backward()
        plain(**batch).loss.backward()
        expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        worst = max(worst, _difference(module.full_gradients(), expected))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    worst = max(worst, _difference(module.full_state_dict(), plain.state_dict()))
    reductions = ("reduce_scatter_tensor_coalesced", "all_reduce_coalesced")
    coalesced = sum(any(r in str(n.target) for r in reductions) for n in module.backward_graph.graph.nodes)
    return worst, module.plan.overlap, coalesced


def _difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() >= expected.keys()
    return max(float((found[n].detach() - v.detach()).abs().max()) for n, v in expected.items())


@pytest.mark.parametrize(
    ("recipe", "cluster"),
    [("fsdp", "h100"), pytest.param("hsdp", "h100", marks=pytest.mark.deep), ("hsdp", "cpu")],
)
def test_blocks_travel_together(ranks: Ranks, recipe: str, cluster: str) -> None:
    for worst, overlaps, coalesced in ranks.run(steps, recipe, cluster):
        assert worst < TOLERANCE
        assert overlaps
        assert (coalesced > 0) == (cluster == "h100")
