"""Plans whose recomputation was decided anew, by the peak of their own graph, on real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autopar.compiler import program_of
from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import make, slow_devices
from tests.distributed.steps import TOLERANCE, follow
from tests.search.budget.test_repair import lean_random_plan

STEPS = 3


def train(rank: int, name: str, plan: str) -> float:
    """The largest difference of any loss, gradient or parameter in some steps."""
    from autopar.parallelize import parallelize

    (plain, batches), (model, _) = make(name), make(name)
    parallel: Any = parallelize(model, mesh_of(2, 2), plan=plan, timeout=WAIT)
    return follow(parallel, plain, [batches(step) for step in range(STEPS)])


@pytest.mark.parametrize(("name", "seed"), [pytest.param("gpt2", s, marks=pytest.mark.deep) for s in (1, 2)])
def test_three_steps_of_adamw_equal_one_device(ranks: Ranks, tmp_path: Path, name: str, seed: int) -> None:
    model, batches = make(name)
    plan, found = lean_random_plan(program_of(model, batches(0)), {"a": 2, "b": 2}, slow_devices(), seed)
    assert found.recompute != plan.recompute
    found.save(tmp_path / "plan.json")
    assert max(ranks.run(train, name, str(tmp_path / "plan.json"))) < TOLERANCE
