"""Linear layers in float8 on four ranks: the steps of an eager model with such layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import make
from tests.distributed.test_precision import train
from tests.float8_layers import delayed, end_step, in_float8, past

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


SHARDED: dict[int, dict[str, Any]] = {1: {"recipe": "fsdp"}, 2: {"pins": {"stages": 2, "microbatches": 2}}}
DRAWN: dict[int, dict[str, Any]] = {
    1: {"recipe": "random", "seed": 0},
    2: {"recipe": "random", "seed": 1, "pins": {"microbatches": 2}},
}


def with_delayed_scaling(rank: int, cases: dict[int, dict[str, Any]]) -> dict[str, float]:
    """The same of scales of earlier steps, also fully sharded, in microbatches and in stages; and the histories."""
    from autopar import Float8, Precision, Search, parallelize

    wide, found = torch.float64, {}
    policy = Precision(wide, wide, wide, Float8("delayed", history=2))
    model, batch = make("mlp")
    for parts, options in cases.items():
        plain = delayed(copy.deepcopy(model), 2)
        expected = train(_InParts(plain, parts), batch)
        search = Search(inexact=("fp8",), **options)
        module = parallelize(copy.deepcopy(model), mesh_of(2, 2), precision=policy, search=search, timeout=WAIT)
        losses = train(module, batch)
        state = {**dict(plain.named_parameters()), **past(plain)}
        errors = [float((v - state[k]).abs().max()) for k, v in module.full_state_dict().items()]
        errors += [float((a - b).abs()) for a, b in zip(losses, expected, strict=True)]
        assert module.plan.microbatches == parts
        found[str(options)] = max(errors)
    return found


class _InParts(torch.nn.Module):
    """A model of plain layers whose call adds up the gradients of microbatches; the next call begins a step."""

    def __init__(self, plain: torch.nn.Module, parts: int) -> None:
        super().__init__()
        self.plain, self.parts = plain, parts

    def forward(self, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
        total = torch.zeros((), dtype=torch.float64, requires_grad=True)
        loss = total * 1.0
        for rows in zip(*(v.chunk(self.parts) for v in batch.values()), strict=True):
            own = self.plain(**dict(zip(batch, rows, strict=True)))["loss"] / self.parts
            own.backward()
            loss = loss + own.detach()
        end_step(self.plain)
        return {"loss": loss}


@pytest.mark.slow
@pytest.mark.parametrize("cases", [SHARDED, pytest.param(DRAWN, marks=pytest.mark.deep)], ids=["", "drawn"])
def test_delayed_scaling_has_the_steps_of_plain_layers_with_histories(ranks: Ranks, cases: dict[int, Any]) -> None:
    for found in ranks.run(with_delayed_scaling, cases):
        assert len(found) == 2 and max(found.values()) < 1e-9, found


@pytest.mark.parametrize(
    "cases",
    [
        {"rowwise": (1,)},
        pytest.param({"tensorwise": (0, 1), "rowwise": (0,)}, marks=pytest.mark.deep),
    ],
    ids=["", "others"],
)
def test_steps_of_the_eager_model(ranks: Ranks, cases: dict[str, tuple[int, ...]]) -> None:
    for found in ranks.run(with_float8, cases):
        assert len(found) == sum(map(len, cases.values())) and max(found.values()) < 1e-9, found
