"""Whole numbers that become floating ones: torch gives them its default dtype, in float64 too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar


class Bytes(nn.Module):
    """Keeps what it has seen in bytes, as tiny autoencoders of images do."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(4, 4)
        self.decode = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.sigmoid(self.encode(x))
        kept = (hidden.detach() * 255).round().byte() / 255.0
        return (self.decode(kept) + self.decode(hidden)).square().mean()


@pytest.mark.parametrize("microbatches", [1, 2])
def test_quotients_of_bytes_are_verified(microbatches: int) -> None:
    torch.manual_seed(0)
    report = autopar.verify(Bytes(), (torch.randn(4, 4),), {"a": 2}, plan="random", microbatches=microbatches)
    assert report.max_error < 1e-12
