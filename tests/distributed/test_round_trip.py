"""Saved under one plan and mesh, loaded under another: the same parameters, optimizer state and next step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import make

pytestmark = pytest.mark.distributed


def round_trip(rank: int, folder: str) -> float:
    import torch.distributed.checkpoint as dcp

    from autopar import checkpoint
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    strided = {"*.c_attn.weight": ("S(1.1)",), "*.c_attn.bias": ("S(0.1)",), "*.c_fc.weight": ("S(0)",)}
    square = {"*.c_attn.weight": ("S(0)", "S(1.1)"), "*.wte.weight": ("S(1)", "S(0)")}
    models: list[Any] = []
    for mesh, pins in ((mesh_of(4), strided), (mesh_of(2, 2), square)):
        model, batch = make("gpt2")
        parallel = parallelize(model, mesh, batch(0), search=Search(pins=pins), timeout=WAIT)
        models.append((parallel, torch.optim.AdamW(parallel.parameters(), lr=1e-2)))

    def train(model: Any, optimizer: torch.optim.Optimizer, step: int) -> dict[str, torch.Tensor]:
        model(**batch(step))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        return model.full_state_dict()

    for step in range(2):
        train(*models[0], step)
    worst = 0.0
    for source, target in (models, models[::-1]):
        expected = source[0].full_state_dict()
        folder += "x"
        dcp.save(checkpoint.state_dict(*source), checkpoint_id=folder)
        state = checkpoint.state_dict(*target)
        dcp.load(state, checkpoint_id=folder)
        checkpoint.load_state_dict(*target, state)
        found = target[0].full_state_dict()
        worst = max(worst, *(float((found[k] - v).abs().max()) for k, v in expected.items()))
        train(*target, 2)
        expected, found = train(*source, 2), target[0].full_state_dict()
        worst = max(worst, *(float((found[k] - v).abs().max()) for k, v in expected.items()))
        train(*target, 3)
    return worst


@pytest.mark.deep  # test_checkpoint_files.py has the same through files of our own
def test_checkpoint_round_trip(ranks: Ranks, tmp_path: Path) -> None:
    assert max(ranks.run(round_trip, str(tmp_path / "saved"))) < 1e-9
