"""Gradients of batch tensors on four ranks: plain tensors, DTensors, and each rank's own rows."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import slow_devices
from tests.distributed.steps import TOLERANCE
from tests.reports.test_input_gradients import ROWS, adversarial, networks, tensors, ways

pytestmark = pytest.mark.distributed


def parallel(model: nn.Module, sizes: tuple[int, ...], seed: int | None, **options: Any) -> Any:
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    search = Search() if seed is None else Search(recipe="random", seed=seed)
    return parallelize(model, mesh_of(*sizes), search=search, cluster=slow_devices(), timeout=WAIT, **options)


def asked(rank: int, sizes: tuple[int, ...], seed: int | None) -> dict[str, float]:
    return ways(lambda model: parallel(model, sizes, seed))


def against_each_other(rank: int, sizes: tuple[int, ...], seed: int | None) -> dict[str, float]:
    return {"adversarial": adversarial(lambda model: parallel(model, sizes, seed))}


DEEP = [pytest.param(*case, marks=pytest.mark.deep) for case in (((4,), None), ((2, 2), 2))]


@pytest.mark.parametrize("work", [asked, pytest.param(against_each_other, marks=pytest.mark.deep)])
@pytest.mark.parametrize(("sizes", "seed"), [((2, 2), 1), *DEEP])
def test_on_ranks(ranks: Ranks, work: Any, sizes: tuple[int, ...], seed: int | None) -> None:
    for found in ranks.run(work, sizes, seed):
        assert max(found.values()) < TOLERANCE, found


def own_rows(rank: int) -> tuple[float, float]:
    """Rows of the gradient that a rank gets for its rows, and a DTensor for a DTensor."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    _, plain = networks()
    batch = tensors(0)
    whole = batch["x"].requires_grad_()
    plain(whole, batch["real"]).backward()
    assert whole.grad is not None
    example = (batch["x"].detach().requires_grad_(), batch["real"])
    model = parallel(networks()[1], (4,), None, inputs="local", batch=example)
    per = ROWS // model.data_world_size
    rows = slice(model.data_rank * per, model.data_rank * per + per)
    mine = batch["x"].detach()[rows].clone().requires_grad_()
    model(mine, batch["real"][rows]).backward()
    assert mine.grad is not None and not isinstance(mine.grad, DTensor)
    error = float((mine.grad - whole.grad[rows]).abs().max())
    spread = distribute_tensor(batch["x"].detach(), mesh_of(4), [Shard(0)]).requires_grad_()
    model = parallel(networks()[1], (4,), None)
    model(spread, batch["real"]).backward()
    assert isinstance(spread.grad, DTensor) and spread.grad.placements == spread.placements
    return error, float((spread.grad.full_tensor() - whole.grad).abs().max())


@pytest.mark.slow
def test_own_rows_and_tensors_on_the_mesh(ranks: Ranks) -> None:
    for found in ranks.run(own_rows):
        assert max(found) < TOLERANCE, found
