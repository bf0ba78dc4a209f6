"""Collectives of a block travel together on four ranks, in stages too: steps of AdamW equal one device's."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.distributed.launch import Ranks, mesh_of

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-6
"""Transformers' models compute their loss in float32, whatever their parameters are."""


def steps(rank: int, recipe: str, cluster: str, **config: Any) -> tuple[float, bool, int]:
    """The largest difference of gradients and parameters, whether the plan overlaps, and coalesced reductions.

    Args:
        rank: of the process.
        recipe: of the layouts.
        cluster: on GPUs reductions are coalesced, on CPUs packed.
        config: of the model.
    """
    from autopar.parallelize import parallelize
    from autopar.search.options import Search
    from tests import models

    (model, batch), (plain, _) = (models.llama(layers=2, **config) for _ in range(2))
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
    [pytest.param(*case, marks=pytest.mark.deep) for case in (("fsdp", "h100"), ("hsdp", "h100"), ("hsdp", "cpu"))],
)
def test_blocks_travel_together(ranks: Ranks, recipe: str, cluster: str) -> None:
    for worst, overlaps, coalesced in ranks.run(steps, recipe, cluster):
        assert worst < TOLERANCE
        assert overlaps
        assert (coalesced > 0) == (cluster == "h100")


def delayed_steps(rank: int) -> tuple[float, bool, int, int]:
    """What `steps` gives under `fsdp` with a large vocabulary, and in how many graphs gradients were delayed."""
    from importlib import import_module

    passes = [import_module(f"autopar.passes.collectives.{n}") for n in ("delay_gradients", "bucket_collectives")]
    (delaying, bucketing), delayed = passes, []

    def reorder(*arguments: Any) -> Any:
        delayed.append(rank)
        return import_module("autopar.sharding.graph_order").reorder(*arguments)

    with (
        patch.object(delaying, "reorder", reorder),
        # As large heads are sent: alone.
        patch.object(bucketing, "SMALLEST", 1),
        patch.object(bucketing, "LARGEST", 2**12),
    ):
        found = steps(rank, "fsdp", "h100", vocab_size=1024)
    return *found, len(delayed)


@pytest.mark.slow
def test_a_gradient_that_waits_for_the_gathered_head_to_be_freed(ranks: Ranks) -> None:
    for worst, overlaps, coalesced, delayed in ranks.run(delayed_steps):
        assert worst < TOLERANCE
        assert overlaps
        assert coalesced
        assert delayed


def steps_in_stages(rank: int, schedule: str, cluster: str, layers: int) -> tuple[float, bool, list[str]]:
    """The largest difference, whether the plan overlaps, and the collectives that this rank issues in a step."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from autopar.parallelize import parallelize
    from autopar.search.options import Search
    from tests import models

    issued: list[str] = []

    class Issued(TorchDispatchMode):
        """Writes down what is issued to the devices of the stage."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "_c10d_functional" in str(func) and "wait" not in str(func):
                tensors = args[0] if isinstance(args[0], list) else [args[0]]
                issued.append(f"{func} {[tuple(t.shape) for t in tensors]}")
            return func(*args, **(kwargs or {}))

    (model, batch), (plain, _) = (models.llama(layers=layers, batch=8) for _ in range(2))
    model, plain = model.double(), plain.double()
    pins = {"stages": 2, "stage_axis": "a", "microbatches": 4, "schedule": schedule}
    pins["virtual"] = 2 if schedule == "zbv" else 1
    module = parallelize(model, mesh_of(2, 2), batch, cluster=cluster, search=Search(recipe="fsdp", pins=pins))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-3) for m in (module, plain)]
    worst = 0.0
    for step in range(2):
        with Issued() if step else nullcontext():
            loss = module(**batch).loss
        loss.backward()
        plain(**batch).loss.backward()
        expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        worst = max(worst, _difference(module.full_gradients(), expected))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    worst = max(worst, _difference(module.full_state_dict(), plain.state_dict()))
    return worst, module.plan.overlap, issued


@pytest.mark.parametrize(
    ("schedule", "cluster", "layers"),
    [
        ("zb-h1", "h100", 2),
        *(pytest.param(*c, 4, marks=pytest.mark.deep) for c in (("zb-h1", "h100"), ("1f1b", "cpu"), ("zbv", "h100"))),
    ],
)
def test_stages_overlap_in_one_order(ranks: Ranks, schedule: str, cluster: str, layers: int) -> None:
    found = ranks.run(steps_in_stages, schedule, cluster, layers)
    for worst, overlaps, issued in found:
        assert worst < TOLERANCE
        assert overlaps
        assert issued
    # The devices of a stage, on the last axis, issue the same in the same order; those of the other stage need not.
    orders = [issued for _, _, issued in found]
    assert orders[0] == orders[1]
    assert orders[2] == orders[3]
