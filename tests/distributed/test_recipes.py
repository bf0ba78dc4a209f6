"""Recipes on four processes: parameters after steps of AdamW are those of one device, and a short batch is no error."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import make
from tests.distributed.steps import TOLERANCE, follow

pytestmark = pytest.mark.distributed

# transformers casts logits to float32 for the loss, in float64 too: over a split vocabulary the sum rounds elsewhere.
ROUNDS = {("tied", "megatron-sequence"): 1e-5}

ROWS = (8, 8, 6)
"""Of each step's batch; four ranks cannot share the last one's."""


def train(rank: int, name: str, recipe: str, sizes: tuple[int, ...]) -> tuple[float, dict[str, list[str]]]:
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    (model, batch), (plain, _) = make(name), make(name)
    parallel = parallelize(model, mesh_of(*sizes), batch(0, ROWS[0]), search=Search(recipe=recipe), timeout=WAIT)
    layouts = {k: [str(p) for p in v] for k, v in parallel.plan.parameters.items()}
    worst = follow(parallel, plain, [batch(step, rows) for step, rows in enumerate(ROWS)])
    return worst, layouts


@pytest.mark.parametrize(
    ("name", "recipe", "sizes", "parameter", "lies"),
    [
        pytest.param("mlp", "fsdp", (4,), "up.weight", ["S(0.0)"], marks=pytest.mark.deep),
        pytest.param("mlp", "zero1", (4,), "up.weight", ["S(0.0)"], marks=pytest.mark.deep),
        pytest.param("gpt2", "zero2", (4,), "transformer.h.0.mlp.c_fc.weight", ["S(0.0)"], marks=pytest.mark.deep),
        pytest.param("gpt2", "context", (4,), "transformer.h.0.mlp.c_fc.weight", ["S(0.0)"], marks=pytest.mark.deep),
        ("mlp", "megatron", (2, 2), "up.weight", ["R", "S(0.0)"]),
        pytest.param(
            "gpt2", "megatron", (2, 2), "transformer.h.0.attn.c_attn.weight", ["R", "S(1.1)"], marks=pytest.mark.deep
        ),
        pytest.param("tied", "hsdp", (2, 2), "model.norm.weight", ["R", "S(0.0)"], marks=pytest.mark.deep),
        pytest.param("tied", "megatron-sequence", (4,), "model.norm.weight", ["R"], marks=pytest.mark.deep),
    ],
)
def test_steps_equal_one_device(
    ranks: Ranks, name: str, recipe: str, sizes: tuple[int, ...], parameter: str, lies: list[str]
) -> None:
    results: list[Any] = ranks.run(train, name, recipe, sizes)
    for worst, layouts in results:
        assert worst < ROUNDS.get((name, recipe), TOLERANCE)
        assert layouts[parameter] == lies
