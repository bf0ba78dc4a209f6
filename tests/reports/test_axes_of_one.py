"""An axis of one device communicates nothing, whatever a recipe, a pin or chance says of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.compiler import program_of, rewrite, solve
from autopar.ir.node_info import info
from autopar.parallelize import parallelize
from autopar.search.formulation.recipes import RECIPES
from autopar.search.options import Search
from autopar.verify.verify import verify
from tests.crossed import crossed
from tests.distributed.models import mlp, mlp_batch

SEARCHES = [
    *(Search(recipe=name) for name in RECIPES),
    Search(recipe="random", seed=0),
    *(pytest.param(Search(recipe="random", seed=seed), marks=pytest.mark.deep) for seed in (1, 2)),
    Search(pins={"up.weight": "S(0)", "down.weight": "S(1)"}),
    Search(recipe="fsdp", pins={"microbatches": 2}),
]


@pytest.mark.some(3)
@pytest.mark.parametrize("search", SEARCHES, ids=str)
def test_on_one_device(search: Search) -> None:
    plain, model = mlp(), parallelize(mlp(), None, mlp_batch(0), search=search)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
    for step in range(2):
        expected, found = plain(**mlp_batch(step)), model(**mlp_batch(step))
        torch.testing.assert_close(found["out"], expected["out"], rtol=0, atol=1e-12)
        for out, m, optimizer in zip((expected, found), (plain, model), optimizers, strict=True):
            out["loss"].backward()
            optimizer.step()
            m.zero_grad()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.full_state_dict()[name], value, rtol=0, atol=1e-12)


@pytest.mark.some(1)
@pytest.mark.thorough  # what is predicted of random plans, too
@pytest.mark.parametrize(
    ("axes", "options"),
    crossed(
        [{"one": 1, "b": 4}, {"a": 4, "one": 1}, {"a": 2, "one": 1, "b": 2}],
        [{"recipe": "fsdp"}, {"recipe": "random", "seed": 3}, {"recipe": "zero1"}],
    ),
)
def test_no_collective_on_such_an_axis(axes: dict[str, int], options: dict[str, Any]) -> None:
    program = program_of(mlp(), mlp_batch(0))
    plan = solve(program, axes, "cpu", search=Search(**options))
    found = [
        info(n).collective.axis for n in rewrite(program, plan).graph.graph.nodes if info(n).collective is not None
    ]
    assert found and "one" not in found
    assert not plan.predicted.collectives["one"]
    assert max(verify(mlp(), mlp_batch(0), axes, plan=plan).errors.values()) < 1e-10
