"""Graphs run whatever strides their kernels make: those that a trace has seen are not those of every run."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import autopar


class FusedProjection(nn.Module):
    """Queries, keys and values of one projection, as in vision transformers; what attention makes is viewed."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(rows, tokens, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        made = functional.scaled_dot_product_attention(q, k, v)
        return self.out(made.transpose(1, 2).reshape(rows, tokens, width)).square().mean()


def test_the_captured_graph_of_fused_attention_runs() -> None:
    torch.manual_seed(0)
    model = FusedProjection().double()
    report = autopar.verify(model, (torch.randn(4, 6, 16, dtype=torch.float64),), {"a": 2}, plan="random")
    assert report.max_error < 1e-12
