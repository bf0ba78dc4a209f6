"""The module that `autopar migrate` prints, on four processes: steps of its optimizer and clipping are one device's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.launch import Ranks
from tests.distributed.models import make
from tests.distributed.steps import TOLERANCE, largest

pytestmark = pytest.mark.distributed


def train(rank: int, script: str) -> tuple[float, dict[str, int], list[str]]:
    """How far three steps are from one device's, the axes, and the placements of a parameter."""
    import os

    names: dict[str, Any] = {}
    os.environ["WORLD_SIZE"] = "4"
    exec(compile(script, "migrated.py", "exec"), names)
    (model, batch), (plain, _) = make("mlp"), make("mlp")
    parallel = names["distribute"](model, batch(0, 8))
    models = (parallel, plain)
    optimizers = [names["optimizer_of"](m) for m in models]
    worst = []
    for step in range(3):
        whole = batch(step, 8)
        parts = {name: t.chunk(parallel.data_world_size)[parallel.data_rank] for name, t in whole.items()}
        losses = [m(**given)["loss"] for m, given in zip(models, (parts, whole), strict=True)]
        for loss in losses:
            loss.backward()
        worst.append(float((losses[0] - losses[1]).detach().abs()))
        gradients = parallel.full_gradients()
        worst += [float((gradients[n] - p.grad).abs().max()) for n, p in plain.named_parameters()]
        for each, optimizer in zip(models, optimizers, strict=True):
            names["update"](each, optimizer)
        state = parallel.full_state_dict()
        worst += [float((state[n] - value).abs().max()) for n, value in plain.state_dict().items()]
    placements = [str(p) for p in parallel.plan.parameters["up.weight"]]
    return largest(worst), names["axes"], placements


@pytest.mark.slow
def test_steps_are_those_of_one_device(ranks: Ranks, tmp_path: Path) -> None:
    from autopar.cli.migrate import migrate

    (tmp_path / "ds.json").write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 2,
                "zero_optimization": {"stage": 3},
                "tensor_parallel": {"autotp_size": 2},
                "gradient_clipping": 0.01,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
            }
        )
    )
    results: list[Any] = ranks.run(train, migrate(tmp_path / "ds.json").script)
    for worst, axes, placements in results:
        assert worst < TOLERANCE
        assert axes == {"data": 2, "tensor": 2}
        assert placements == ["S(1.0)", "S(0.0)"] or placements == ["S(0.0)", "S(0.0)"]


def test_clipping_is_that_of_the_module() -> None:
    # The norm that the test above clips to is smaller than that of the gradients, or it would show nothing.
    model, batch = make("mlp")
    model(**batch(0, 8))["loss"].backward()
    assert float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])) > 0.01
    assert all(p.dtype == torch.float64 for p in model.parameters())
