"""Activations and optimizer state on the host, on four ranks: training is that of one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import make, slow_devices
from tests.distributed.test_training import STEPS, TOLERANCE, reference

pytestmark = pytest.mark.distributed


def linked() -> Any:
    found = slow_devices()
    return replace(found, device=replace(found.device, host_bandwidth=1e12))


def train(rank: int, microbatches: int) -> tuple[float, int, int]:
    """Largest difference of parameters, tensors that are sent, and those of the optimizer on the host in the end."""
    from autopar.host import to_host
    from autopar.parallelize import parallelize
    from autopar.search.find import Search

    (model, batch), expected = make("mlp"), reference("mlp")
    search = Search(recipe="random", seed=5, pins={"offload": "search", "microbatches": microbatches})
    parallel: Any = parallelize(model, mesh_of(2, 2), search=search, cluster=linked(), timeout=WAIT)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    worst = 0.0
    for step in range(STEPS):
        parallel(**batch(step))["loss"].backward()
        torch.nn.utils.clip_grad_norm_(parallel.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:  # what is saved is what is loaded
            optimizer.load_state_dict(optimizer.state_dict())
        full = parallel.full_state_dict()
        worst = max(worst, *(float((full[k] - v).abs().max()) for k, v in expected[step].items()))
    sent = sum(n.target is to_host for n in parallel.forward_graph.graph.nodes)
    return worst, sent, len(parallel._away.held)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_three_steps_of_adamw_equal_one_device(ranks: Ranks, microbatches: int) -> None:
    for worst, sent, held in ranks.run(train, microbatches):
        assert worst < TOLERANCE
        assert sent > 0
        assert held > 0
