"""A budget that parameters, gradients and optimizer state alone exceed is refused at once, with what would do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import InfeasibleError
from autopar.search.options import Search


def plan(memory: float, **pins: int) -> autopar.Plan:
    """Of a small net on 64 samples, whose activations take more than its state."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32))
    batch = {"x": torch.randn(64, 32)}
    return autopar.plan(
        Squared(net), batch, cluster="cpu", axes={"a": 2}, memory=memory, search=Search(pins=pins, cache=False)
    )


class Squared(nn.Module):
    """The mean square of what a net makes."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).square().mean()


def test_what_is_needed_is_that_of_many_microbatches_and_fits() -> None:
    state = 16 * (2 * 32 * 256 + 256 + 32) / 2
    with pytest.raises(InfeasibleError, match="are missing") as whole:
        plan(0.9 * state, microbatches=1)
    with pytest.raises(InfeasibleError, match="are missing") as many:
        plan(0.9 * state)
    assert whole.value.needed is not None
    assert many.value.needed is not None
    assert state < many.value.needed < whole.value.needed
    found = plan(many.value.needed)
    assert sum(found.predicted.peak_bytes.values()) <= many.value.needed
