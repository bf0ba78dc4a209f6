"""Models that random ones were shrunk to: each was silently wrong or ended in a raw error once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autopar


class Normed(nn.Module):
    """Batch norm between transposed views: the kernel's result has other strides than a fake tensor's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)
        return self.last(h).logsumexp(-1).mean()


def test_verify_runs_the_captured_graph_whatever_strides_kernels_give() -> None:
    torch.manual_seed(0)
    report = autopar.verify(Normed().double(), (torch.randn(2, 2, 2, dtype=torch.float64),), {"a": 2}, plan="random")
    assert max(report.max_error, report.capture_error) < 1e-7  # the gradient of the bias is zero but for rounding
