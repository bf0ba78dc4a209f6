"""Compressed gradients on four ranks: two workers of two devices each, or four of one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import mlp, mlp_batch
from tests.low_communication.compressed_cases import CASES, OPTIMIZERS
from tests.low_communication.compressed_reference import run
from tests.low_communication.reference import largest_difference

pytestmark = pytest.mark.distributed

STEPS = 7
SHARDED, TENSOR, ALONE = {"a": "compressed", "b": "shard"}, {"a": "compressed", "b": "tensor"}, {"a": "compressed"}


def searching(roles: dict[str, str], **more: Any) -> Any:
    from autopar.search.options import Search

    return Search(roles=roles, inexact=("compressed",), **more)


def part(step: int, worker: int, workers: int) -> dict[str, torch.Tensor]:
    rows = 8 // workers
    return {k: v[worker * rows : (worker + 1) * rows] for k, v in mlp_batch(step).items()}


def made(sizes: tuple[int, ...], roles: dict[str, str], given: dict[str, Any], **more: Any) -> tuple[Any, Any, Any]:
    import autopar

    search = searching(roles, **more)
    model = autopar.parallelize(mlp(), mesh_of(*sizes), mlp_batch(0), search=search, timeout=WAIT)
    optimizer = OPTIMIZERS[given["method"]](model)
    return model, optimizer, autopar.CompressedGradients(model, optimizer, **given)


def trained(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(**mlp_batch(step))["loss"].backward()
        optimizer.step()


def cut_as(model: Any) -> Any:
    """Shards of whole parameters, as the devices of a worker have them: the rest of autopar is not asked how."""
    dims = {}
    for name, parameter in model.named_parameters():
        placement = parameter.placements[0] if hasattr(parameter, "placements") else None
        assert type(placement).__name__ in ("Shard", "Replicate", "NoneType")
        dims[name] = getattr(placement, "dim", None)

    def shards(name: str, tensor: np.ndarray) -> list[np.ndarray]:
        return [tensor] if dims[name] is None else np.array_split(tensor, 2, dims[name])

    return shards


def against_reference(
    rank: int, sizes: tuple[int, ...], roles: dict[str, str], cases: list[str], more: dict[str, Any]
) -> dict[str, tuple[float, bool]]:
    """Largest error, and whether the plan shards parameters."""
    found = {}
    for case in cases:
        given = CASES[case]
        model, optimizer, compressed = made(sizes, roles, given, **more)
        assert model.plan.worker_role == "compressed"
        workers, shards = sizes[0], cut_as(model)
        expected = run(
            mlp(), OPTIMIZERS[given["method"]], lambda s, w: part(s, w, workers), workers, STEPS, given, shards
        )
        error = 0.0
        for step in range(STEPS):
            predicted, before = compressed.predicted, compressed.bytes_sent
            trained(model, optimizer, range(step, step + 1))
            assert compressed.bytes_sent - before == predicted.sent_bytes
            error = max(error, largest_difference(model.full_state_dict(), expected[step]))
        assert 0 < compressed.error < 1
        cut = [name for name, p in mlp().named_parameters() if len(shards(name, p.detach().numpy())) > 1]
        found[case] = error, bool(cut)
    return found


def check(found: list[dict[str, tuple[float, bool]]], cases: list[str], sharded: bool | None) -> None:
    for own in found:
        assert list(own) == cases
        assert max(error for error, _ in own.values()) < 1e-12, own
        assert sharded is None or {cut for _, cut in own.values()} == {sharded}


QUICK = ["powersgd", "topk, late", "onebit"]


@pytest.mark.parametrize(
    ("sizes", "roles", "cases", "more", "sharded"),
    [
        ((2, 2), SHARDED, QUICK, {}, True),
        ((4,), ALONE, ["onebit"], {}, False),
        pytest.param((4,), ALONE, list(CASES), {}, False, marks=pytest.mark.deep),
        pytest.param((2, 2), SHARDED, list(CASES), {}, True, marks=pytest.mark.deep),
        pytest.param((2, 2), TENSOR, list(CASES), {}, True, marks=pytest.mark.deep),
        *(
            pytest.param((2, 2), ALONE, QUICK, {"recipe": "random", "seed": seed}, None, marks=pytest.mark.deep)
            for seed in range(4)
        ),
    ],
)
def test_equals_the_reference(
    ranks: Ranks, sizes: tuple[int, ...], roles: dict[str, str], cases: list[str], more: dict[str, Any], sharded: Any
) -> None:
    check(ranks.run(against_reference, sizes, roles, cases, more), cases, sharded)
