"""Ranks that disagree or die: the others say so, and none hangs."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import mlp, mlp_batch

pytestmark = pytest.mark.distributed


def disagreements(rank: int) -> list[str]:
    from torch import nn

    from autopar.errors import InfeasibleError, RankError
    from autopar.parallelize import parallelize

    mesh = mesh_of(2)
    found = []
    model = parallelize(mlp(), mesh, timeout=WAIT)
    with pytest.raises(RankError) as batches:
        model(**mlp_batch(rank))
    found.append(str(batches.value))
    assert model(**mlp_batch(0))["loss"].ndim == 0  # and goes on
    with pytest.raises(RankError) as models:
        parallelize(nn.Linear(8, 8 if rank else 4), mesh, (torch.randn(4, 8),), timeout=WAIT)
    found.append(str(models.value))
    torch.manual_seed(rank)
    with pytest.raises(RankError) as weights:
        parallelize(nn.Linear(8, 8), mesh, (torch.zeros(4, 8),), timeout=WAIT)
    found.append(str(weights.value))

    def lazy_rank(output: torch.Tensor, batch: object) -> torch.Tensor:
        if rank == 1:
            raise RuntimeError("only here")
        return output.sum()

    torch.manual_seed(0)
    with pytest.raises(Exception, match="only here") as other:
        parallelize(nn.Linear(8, 8), mesh, (torch.zeros(4, 8),), loss_fn=lazy_rank, timeout=WAIT)
    found.append(f"{type(other.value).__name__}: {other.value}")
    with pytest.raises(InfeasibleError) as memory:
        parallelize(mlp(), mesh, mlp_batch(0), memory="1KiB", timeout=WAIT)
    found.append(str(memory.value))
    return found


def test_disagreements(two_ranks: Ranks) -> None:
    for rank, (batch, model, weights, other, memory) in enumerate(two_ranks.run(disagreements)):
        assert 'inputs="local"' in batch
        assert "the model differs" in model and "build the same model" in model
        assert "torch.manual_seed" in weights
        assert other.startswith("CaptureError" if rank == 1 else "RankError: rank 1 failed")
        assert "memory" in memory


@pytest.mark.parametrize("seed", [0, 1])
def test_a_loop_over_a_set_of_strings(seed: int) -> None:
    """It is in another order in each process, whose hashes differ, as PEFT's over ``adapter_names``."""
    from types import SimpleNamespace

    from autopar.errors import RankError
    from autopar.runtime.agreement.same_program import require_same_program

    context: Any = SimpleNamespace(gather=lambda own, what: [own, (own[0], "f1", own[2], own[3] + seed)])
    program: Any = SimpleNamespace(fingerprint="f0")
    with pytest.raises(RankError, match="the captured model differs: rank 1 has f1") as error:
        require_same_program(program, [([4, 8], torch.float32)], "weights", context)
    assert ("PYTHONHASHSEED=0" in str(error.value)) == (seed == 1)


def left_out(rank: int, recipe: str) -> list[str]:
    """An optimizer's step that one rank leaves out, as after a look at its own loss."""
    import autopar
    from autopar.errors import RankError

    found = []
    for whole in (False, True):  # what was before is no matter of another model
        model = autopar.parallelize(mlp(), mesh_of(2), timeout=WAIT, search=autopar.Search(recipe=recipe))
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(2):
            model(**mlp_batch(step))["loss"].backward()
            if step == 0 or rank == 0:
                optimizer.step()
            optimizer.zero_grad()
        for _ in range(2):  # whoever goes on is told again
            with pytest.raises(RankError) as error:
                model.full_state_dict() if whole else model(**mlp_batch(2))
            found.append(str(error.value))
    return found


@pytest.mark.some(1)
@pytest.mark.parametrize("recipe", ["ddp", "fsdp"])
def test_a_step_that_one_rank_leaves_out(two_ranks: Ranks, recipe: str) -> None:
    for found in two_ranks.run(left_out, recipe):
        for said in found:
            assert "the number of optimizer steps differs: rank 1 has 1, rank 0 has 2" in said


def dying(rank: int) -> tuple[str, float]:
    from autopar.parallelize import parallelize

    model = parallelize(mlp(), mesh_of(2), timeout=WAIT)
    loss = model(**mlp_batch(0))["loss"]
    loss.backward()
    model = parallelize(mlp(), mesh_of(2), timeout=20)  # what is waited for from now on
    if rank == 1:
        os._exit(1)
    start = time.monotonic()
    try:
        model(**mlp_batch(0, rows=4))["loss"].backward()
    except Exception as e:
        return f"{type(e).__name__}: {e}", time.monotonic() - start
    return "", time.monotonic() - start


def test_a_dead_rank_ends_the_other_within_the_timeout(two_ranks: Ranks) -> None:
    message, seconds = two_ranks.run(dying, silent=(1,))[0]
    two_ranks.close()
    assert message.startswith("RankError: no answer"), message
    assert seconds < WAIT
