"""State dicts by original name; tests/distributed/test_round_trip.py saves and loads them on several meshes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from autopar import checkpoint
from autopar.errors import AutoparError
from autopar.parallelize import parallelize


def trained(steps: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = parallelize(nn.Linear(4, 2), None, loss_fn=lambda output, batch: output.square().mean())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(3, 4)).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_fresh_model_goes_on_where_the_saved_one_was() -> None:
    model, optimizer = trained(2)
    state = copy.deepcopy(checkpoint.state_dict(model, optimizer))
    assert set(state["optimizer"]["state"]) == {"weight", "bias"}
    other, fresh = trained(0)
    checkpoint.load_state_dict(other, fresh, state)
    step(model, optimizer)
    step(other, fresh)
    assert torch.equal(model.weight, other.weight)


def test_making_the_state_changes_nothing() -> None:
    model, optimizer = trained(0)
    before = model.full_state_dict()
    state = checkpoint.state_dict(model, optimizer)
    assert all(torch.equal(v, before[k]) for k, v in model.full_state_dict().items())
    assert all(float(v["step"]) == 0 for v in state["optimizer"]["state"].values())
    assert model.weight.grad is None


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, _ = trained(0)
    with pytest.raises(AutoparError, match="does not have"):
        checkpoint.state_dict(model, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
