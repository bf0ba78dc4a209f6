"""Plans whose recomputation was decided anew, by the peak of their own graph, on real processes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import make, slow_devices
from tests.distributed.steps import TOLERANCE, follow

STEPS = 3


def train(rank: int, name: str, seed: int) -> tuple[float, bool]:
    """The largest difference of any loss, gradient or parameter in some steps, and whether the plan was changed."""
    from autopar.compiler import program_of
    from autopar.parallelize import parallelize
    from tests.search.budget.test_repair import lean_random_plan

    (plain, batches), (model, _) = make(name), make(name)
    program = program_of(model, batches(0))
    plan, found = lean_random_plan(program, {"a": 2, "b": 2}, slow_devices(), seed)
    parallel: Any = parallelize(model, mesh_of(2, 2), plan=found, timeout=WAIT)
    worst = follow(parallel, plain, [batches(step) for step in range(STEPS)])
    return worst, found.recompute != plan.recompute


@pytest.mark.parametrize(("name", "seed"), [("gpt2", 1), pytest.param("gpt2", 2, marks=pytest.mark.deep)])
def test_three_steps_of_adamw_equal_one_device(ranks: Ranks, name: str, seed: int) -> None:
    for worst, changed in ranks.run(train, name, seed):
        assert changed
        assert worst < TOLERANCE
