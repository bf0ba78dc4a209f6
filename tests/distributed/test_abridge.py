"""A plan that was made from three blocks of a deep model trains the whole model on four ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import slow_devices
from tests.distributed.steps import TOLERANCE, follow

pytestmark = pytest.mark.distributed

STEPS = 3


def doubled() -> tuple[Any, dict[str, torch.Tensor]]:
    from tests.capture.test_repeat import deep

    model, batch = deep(5)
    return model.double(), {"x": batch["x"].double(), "target": batch["target"]}


def train(rank: int, path: str) -> float:
    """The largest difference of any loss, gradient, parameter or buffer in some steps of AdamW."""
    from autopar.parallelize import parallelize

    plain, batch = doubled()
    parallel: Any = parallelize(doubled()[0], mesh_of(2, 2), plan=path, timeout=WAIT)
    return follow(parallel, plain, STEPS * [batch])


@pytest.mark.deep
def test_three_steps_of_adamw_equal_one_device(ranks: Ranks, tmp_path: Path) -> None:
    from autopar.compiler import program_to_plan, solve

    program = program_to_plan(*doubled())
    assert program.repeat is not None
    plan = solve(program, {"a": 2, "b": 2}, slow_devices())
    assert sum(plan.predicted.communication_bytes.values()) > 0
    plan.save(tmp_path / "plan.json")
    assert max(ranks.run(train, str(tmp_path / "plan.json"))) < TOLERANCE
