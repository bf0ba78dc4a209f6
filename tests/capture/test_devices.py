"""Operators that torch has for one kind of device are captured as what they are on all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.compiler import program_of
from autopar.verify.verify import verify
from tests.capture.test_attention import BOUND


class Normed(nn.Module):
    """A linear layer and an RMS norm, over one dim or two."""

    def __init__(self, dims: int, affine: bool, eps: float | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.norm = nn.RMSNorm([4, 8][-dims:], eps=eps, elementwise_affine=affine)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).pow(3).mean()


@pytest.mark.some(2)
@pytest.mark.parametrize(("dims", "affine", "eps"), [(1, True, None), (2, True, 1e-3), (1, False, 1e-5)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rms_norm_is_its_parts(dims: int, affine: bool, eps: float | None, dtype: torch.dtype) -> None:
    model, x = Normed(dims, affine, eps).to(dtype), torch.randn(2, 4, 8, dtype=dtype)
    program = capture(model, (x,))
    targets = {str(n.target) for n in program.graph.graph.nodes}
    assert "aten.rsqrt.default" in targets
    assert not any("rms_norm" in t for t in targets)
    # In its own dtype: a half precision model computes the norm in float32, and so does the graph.
    report = verify(model, (x,), {"a": 1}, dtype=torch.float64)
    assert max(report.max_error, report.capture_error) < (BOUND if dtype == torch.float64 else 0.05)


def test_batch_norm_of_cudnn_is_the_one_of_all_devices() -> None:
    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv1d(8, 8, 1), nn.BatchNorm1d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n, x = self.norm, self.conv(x)
            numbers = (n.running_mean, n.running_var, True, 0.1, 1e-5)
            return torch.ops.aten.cudnn_batch_norm(x, n.weight, n.bias, *numbers)[0].square().sum()

    targets = {str(n.target) for n in program_of(ByName(), (torch.randn(2, 8, 4),)).graph.graph.nodes}
    assert {"aten.native_batch_norm_backward.default"} <= targets
    assert not any("cudnn" in t for t in targets)
