"""A rank that is killed within a pipeline's schedule ends the others; training goes on from the last checkpoint."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import WAIT, Ranks, mesh_of

pytestmark = [pytest.mark.distributed, pytest.mark.deep]

KILLED, TIMEOUT = 3, 20
STEPS, SAVED, FATAL = 5, 2, 3
"""Steps of the whole run; those behind which it is saved, and in which a rank is killed."""


def batch_of(step: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    return {k: torch.randn(8, 3, 8, 8, generator=g, dtype=torch.float64) for k in ("x", "y")}


def step_of(model: Any, optimizer: torch.optim.Optimizer, step: int) -> float:
    loss = model(**batch_of(step))["loss"]
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def parallel_unet() -> tuple[Any, torch.optim.Optimizer]:
    from autopar.parallelize import parallelize
    from autopar.search.options import Search
    from tests.pipeline.models import Unet

    # Of data ranks every one needs every other in each step.
    search = Search(roles={"b": "data"}, pins={"stages": 2, "microbatches": 4})
    model = parallelize(Unet().double(), mesh_of(2, 2), batch_of(0), search=search, timeout=TIMEOUT)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def killed(rank: int, folder: str) -> tuple[list[float], str, float]:
    """Losses until a rank is killed, and the error of the others and when it came."""
    import torch.distributed.checkpoint as dcp

    import autopar.checkpoint

    model, optimizer = parallel_unet()
    losses = []
    for step in range(FATAL):
        losses.append(step_of(model, optimizer, step))
        if step + 1 == SAVED:
            dcp.save(autopar.checkpoint.state_dict(model, optimizer), checkpoint_id=folder)
    if rank == KILLED:
        left = iter([None])  # the first backward goes well
        piece = model._autopar.latest.step.stage_graphs.microbatch_graph(1, "B").graph
        forward = piece.forward
        piece.forward = lambda values: (
            forward(values) if next(left, 0) is None else os.kill(os.getpid(), signal.SIGKILL)
        )
    start = time.monotonic()
    try:
        step_of(model, optimizer, FATAL)
    except Exception as e:
        return losses, f"{type(e).__name__}: {e}", time.monotonic() - start
    return losses, "", time.monotonic() - start


def resumed(rank: int, folder: str) -> list[float]:
    import torch.distributed.checkpoint as dcp

    import autopar.checkpoint

    model, optimizer = parallel_unet()
    state = autopar.checkpoint.state_dict(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    autopar.checkpoint.load_state_dict(model, optimizer, state)
    return [step_of(model, optimizer, step) for step in range(SAVED, STEPS)]


def test_a_killed_rank_and_the_run_after_it(tmp_path: Path) -> None:
    from tests.pipeline.models import Unet

    plain = Unet().double()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    expected = [step_of(plain, optimizer, step) for step in range(STEPS)]
    ranks = Ranks()
    try:
        results = ranks.run(killed, str(tmp_path / "saved"), silent=(KILLED,), timeout=4 * WAIT)
    finally:
        ranks.close()
    for rank, result in enumerate(results):
        if rank == KILLED:
            continue
        losses, error, seconds = result
        assert losses == pytest.approx(expected[:FATAL], abs=1e-12)
        assert error.startswith("RankError: ") and "a rank died" in error, (rank, error)
        assert seconds < TIMEOUT + 10
    ranks = Ranks()
    try:
        for losses in ranks.run(resumed, str(tmp_path / "saved"), timeout=4 * WAIT):
            assert losses == pytest.approx(expected[SAVED:], abs=1e-12)
    finally:
        ranks.close()
