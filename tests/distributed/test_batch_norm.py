"""Batch norm on four ranks: parameters and running statistics after steps are those of one device.

In the last step the script leaves the statistics as they are, of averages over all batches, too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import slow_devices
from tests.strategies.test_batch_norm import Normal, batch_of

pytestmark = pytest.mark.distributed


def state_after(model: Any) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        if step == 2:
            model.norm.momentum, model.norm.track_running_stats = None, False
        batch = batch_of(step)
        model(x=batch["x"].double(), target=batch["target"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()


def train(rank: int) -> dict[str, float]:
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    expected = state_after(Normal().double())
    found = {}
    for label, sizes, search in (
        ("samples", (4,), Search(pins={"batch.*": "S(0)", "*.weight": "R", "*.bias": "R"})),
        ("random", (2, 2), Search(recipe="random", seed=1)),
    ):
        model = parallelize(Normal().double(), mesh_of(*sizes), search=search, cluster=slow_devices(), timeout=WAIT)
        state = state_after(model)
        assert state.keys() == expected.keys()
        found[label] = max(float((state[k] - v).abs().max()) for k, v in expected.items())
    return found


@pytest.mark.slow
def test_training_equals_one_device(ranks: Ranks) -> None:
    for found in ranks.run(train):
        assert max(found.values()) < 1e-10, found
