"""`torch.compile` around a parallel model: its own graphs run, and nothing that chooses them is traced."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.parallelize import parallelize


@pytest.mark.slow
def test_torch_compile_around_a_parallel_model() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    model = parallelize(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double(), None)
    model.load_state_dict(plain.state_dict())
    compiled = torch.compile(model, backend="eager")
    for seed in range(2):
        batch = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        losses = [m(batch).square().mean() for m in (plain, compiled)]
        torch.testing.assert_close(losses[1], losses[0])
        for loss in losses:
            loss.backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)
