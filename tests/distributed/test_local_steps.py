"""Workers that train apart on four ranks: two workers of two devices each, or four of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import mlp, mlp_batch
from tests.low_communication.cases import CASES, OPTIMIZERS
from tests.low_communication.reference import largest_difference, run

pytestmark = pytest.mark.distributed

STEPS = 13
SHARDED, TENSOR = {"a": "local", "b": "shard"}, {"a": "local", "b": "tensor"}


def searching(roles: dict[str, str], **more: Any) -> Any:
    from autopar.search.options import Search

    return Search(roles=roles, inexact=("local",), **more)


def part(step: int, worker: int, workers: int) -> dict[str, torch.Tensor]:
    rows = 8 // workers
    return {k: v[worker * rows : (worker + 1) * rows] for k, v in mlp_batch(step).items()}


def against_reference(
    rank: int, sizes: tuple[int, ...], roles: dict[str, str], optimizer: str, cases: list[str], pins: dict[str, Any]
) -> dict[str, float]:
    import autopar

    workers = sizes[0]
    worker = rank // (4 // workers)
    found, plan = {}, None
    for case in cases:
        given, algorithm = CASES[case]
        search = searching(roles, pins=pins)
        model = autopar.parallelize(mlp(), mesh_of(*sizes), mlp_batch(0), search=search, plan=plan, timeout=WAIT)
        plan = model.plan
        own = OPTIMIZERS[optimizer](model)
        local = autopar.LocalSteps(model, own, **given)
        expected = run(mlp(), OPTIMIZERS[optimizer], lambda s, w: part(s, w, workers), workers, STEPS, algorithm)
        error = 0.0
        for step in range(STEPS):
            own.zero_grad()
            model(**mlp_batch(step))["loss"].backward()
            own.step()
            error = max(error, largest_difference(model.full_state_dict(), expected[step][worker]))
        found[case] = error
        local.synchronize()
        after = model._autopar.context.everyone.gather(str(model.full_state_dict()), "after synchronize()")
        assert len(set(after)) == 1
        assert model.data_world_size == workers * model._autopar.data_world_size
    return found


def check(found: list[dict[str, float]], cases: list[str]) -> None:
    for own in found:
        assert list(own) == cases
        assert max(own.values()) < 1e-12, own


QUICK = ["post-local", "DiLoCo", "streaming, long delay"]


@pytest.mark.parametrize(
    ("roles", "optimizer", "cases"),
    [
        (SHARDED, "AdamW", QUICK),
        (TENSOR, "SGD", ["streaming"]),
        pytest.param(SHARDED, "SGD", list(CASES), marks=pytest.mark.deep),
        pytest.param(TENSOR, "AdamW", list(CASES), marks=pytest.mark.deep),
    ],
)
def test_equals_the_reference(ranks: Ranks, roles: dict[str, str], optimizer: str, cases: list[str]) -> None:
    check(ranks.run(against_reference, (2, 2), roles, optimizer, cases, {}), cases)


@pytest.mark.deep
def test_workers_of_one_device_and_of_pipelines(ranks: Ranks) -> None:
    cases = ["DiLoCo", "streaming"]
    check(ranks.run(against_reference, (4,), {"a": "local"}, "AdamW", cases, {}), cases)
    pins = {"stages": ["down"], "stage_axis": "b", "microbatches": 2, "schedule": "1f1b"}
    check(ranks.run(against_reference, (2, 2), {"a": "local"}, "AdamW", cases, pins), cases)
