"""Activations and optimizer state on the host, on four ranks: training is that of one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import make, slow_devices
from tests.distributed.steps import TOLERANCE, adamw, largest, step_apart

pytestmark = pytest.mark.distributed

STEPS = 3


def linked() -> Any:
    found = slow_devices()
    return replace(found, device=replace(found.device, host_bandwidth=1e12))


def train(rank: int, microbatches: int) -> tuple[float, int, int]:
    """Largest difference of a step, tensors that are sent, and those of the optimizer on the host in the end."""
    from autopar.ir.ops.host import to_host
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    (model, batch), (plain, _) = make("mlp"), make("mlp")
    search = Search(recipe="random", seed=5, pins={"offload": "search", "microbatches": microbatches})
    parallel: Any = parallelize(model, mesh_of(2, 2), search=search, cluster=linked(), timeout=WAIT)
    optimizers = [adamw(m) for m in (parallel, plain)]
    apart = []
    for step in range(STEPS):
        apart.append(step_apart(parallel, plain, optimizers, batch(step), clip=0.5))
        if step == 0:  # what is saved is what is loaded
            optimizers[0].load_state_dict(optimizers[0].state_dict())
    sent = sum(n.target is to_host for n in parallel.forward_graph.graph.nodes)
    return largest(apart), sent, len(parallel._autopar.offloaded.on_host)


@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.deep), 2])
def test_three_steps_of_adamw_equal_one_device(ranks: Ranks, microbatches: int) -> None:
    for worst, sent, held in ranks.run(train, microbatches):
        assert worst < TOLERANCE
        assert sent > 0
        assert held > 0
