"""Compiled graphs on four ranks: training is that of one device, and collectives stay what they were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autopar._torch_compat import inductor_lacks
from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import make, slow_devices
from tests.distributed.steps import TOLERANCE, follow

pytestmark = pytest.mark.distributed

PIPELINE = {"stages": 2, "microbatches": 2}


def as_it_is(graph: fx.GraphModule, values: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """A backend that compiles nothing."""
    return graph.forward


def aot_eager(graph: fx.GraphModule, values: list[Tensor]) -> Any:
    """Torch's own backend that traces, as compilers do, and runs the result."""
    from torch._dynamo.backends.debugging import aot_eager as backend

    return backend(graph, values)


def train(rank: int, backend: Any, pins: dict[str, Any]) -> tuple[float, int]:
    """Largest difference of three steps, and how many regions were compiled."""
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    (model, batch), (plain, _) = make("mlp"), make("mlp")
    search = Search(pins=pins) if "stages" in pins else Search(recipe="random", seed=3, pins=pins)
    parallel: Any = parallelize(
        model, mesh_of(2, 2), search=search, cluster=slow_devices(), timeout=WAIT, compile=backend
    )
    worst = follow(parallel, plain, [batch(i) for i in range(3)], clip=0.5)
    return worst, parallel._autopar.options.compiler.compilations


@pytest.mark.parametrize(
    ("backend", "pins"),
    [
        pytest.param(as_it_is, {}, marks=pytest.mark.deep),
        pytest.param(aot_eager, {"microbatches": 2}, marks=pytest.mark.deep),
        (aot_eager, PIPELINE),
        pytest.param("inductor", {}, marks=pytest.mark.deep),
        pytest.param("inductor", PIPELINE, marks=pytest.mark.deep),
    ],
    ids=["flat", "microbatches", "pipeline", "inductor", "inductor-pipeline"],
)
def test_three_steps_equal_one_device(ranks: Ranks, backend: Any, pins: dict[str, Any]) -> None:
    if backend == "inductor" and inductor_lacks(torch.device("cpu")):
        pytest.skip("no C++ compiler")
    for worst, compiled in ranks.run(train, backend, pins):
        assert worst < TOLERANCE
        assert compiled > 0
