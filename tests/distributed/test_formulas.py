"""Functions that are traced by their formulas, in training on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.capture.test_formulas import CALLS, CLASSES, ROWS, Call
from tests.distributed.launch import WAIT, Ranks, mesh_of

pytestmark = pytest.mark.distributed

NAMES = (
    *("labels behind the first -1", "covariance", "weighted covariance", "correlation"),
    *("variances", "variance of a row", "dims of a scalar"),
)


class All(nn.Module):
    """All of them in one loss, each with other weights for its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.ModuleDict({str(i): Call(CALLS[name]) for i, name in enumerate(NAMES)})

    def forward(self, x: Tensor) -> Tensor:
        found = [call(x) for call in self.calls.values()]
        return torch.stack([(y * torch.arange(1, y.numel() + 1).view(y.shape)).sum() for y in found]).sum()


def steps(model: nn.Module) -> list[Tensor]:
    """Losses of two steps, and the parameters after them."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1e-3), []
    for step in range(2):
        x = torch.randn(ROWS, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        losses.append(model(x))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    state: Any = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()  # type: ignore[operator]
    return [*losses, *state.values()]


def train(rank: int) -> float:
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    expected = steps(All())
    found = steps(parallelize(All(), mesh_of(2), search=Search(recipe="random", seed=1), timeout=WAIT))
    return max(float((a - b).detach().abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.slow
def test_steps_are_those_of_one_device(two_ranks: Ranks) -> None:
    assert max(two_ranks.run(train)) < 1e-9
