"""Linear layers in float8 on four ranks: the steps of an eager model with such layers."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import make
from tests.distributed.test_precision import train
from tests.float8_layers import in_float8

pytestmark = pytest.mark.distributed


def with_float8(rank: int, cases: dict[str, tuple[int, ...]]) -> dict[str, float]:
    """Losses of three steps of AdamW and the parameters after them, against the eager model's; in float64.

    Bit by bit the same rounding on all ranks: one value that is rounded to its other neighbor would show.
    """
    from autopar import Float8, Precision, Search, parallelize

    found = {}
    for scaling, seeds in cases.items():
        wide = torch.float64
        policy = Precision(wide, wide, wide, Float8(scaling))
        model, batch = make("mlp")
        plain = in_float8(copy.deepcopy(model), scaling)
        expected = train(plain, batch)
        state = dict(plain.named_parameters())
        for seed in seeds:
            search = Search(recipe="random", seed=seed, inexact=("fp8",))
            parts = parallelize(copy.deepcopy(model), mesh_of(2, 2), precision=policy, search=search, timeout=WAIT)
            losses = train(parts, batch)
            errors = [float((v - state[k]).abs().max()) for k, v in parts.full_state_dict().items()]
            errors += [float((a - b).abs()) for a, b in zip(losses, expected, strict=True)]
            found[f"{scaling} {seed}"] = max(errors)
    return found


@pytest.mark.parametrize(
    "cases",
    [
        {"tensorwise": (0,), "rowwise": (1,)},
        pytest.param({"tensorwise": (1,), "rowwise": (0,)}, marks=pytest.mark.deep),
    ],
    ids=["", "others"],
)
def test_steps_of_the_eager_model(ranks: Ranks, cases: dict[str, tuple[int, ...]]) -> None:
    for found in ranks.run(with_float8, cases):
        assert len(found) == 2 and max(found.values()) < 1e-9, found
