"""Torch's grouped products, whose kernels take rows of multiples of 16 bytes, and no float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from autopar.compiler import plan, program_of
from autopar.errors import CaptureError
from autopar.search.options import Search
from autopar.verify.verify import verify

AXES = {"a": 2, "b": 2}


class Experts(nn.Module):
    """Two grouped products; ``inner`` columns of a half float are 16 bytes, those of a part are not."""

    def __init__(self, inner: int = 8) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.gate = nn.Parameter(torch.randn(4, 16, generator=g))
        self.up = nn.Parameter(torch.randn(4, 16, inner, generator=g) / 4)
        self.down = nn.Parameter(torch.randn(4, inner, 16, generator=g) / 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        score, chosen = (tokens @ self.gate.T).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        ends = F.one_hot(chosen, 4).sum(0).cumsum(0).to(torch.int32)
        inner = F.silu(torch._grouped_mm(tokens[order], self.up, offs=ends))
        rows = torch._grouped_mm(inner, self.down, offs=ends) * score[order][:, None]
        loss: Tensor = torch.zeros_like(tokens).index_add(0, order, rows).float().square().mean()
        return loss


def batch(dtype: torch.dtype) -> tuple[Tensor]:
    return (torch.randn(4, 4, 16, generator=torch.Generator().manual_seed(1)).to(dtype),)


@pytest.mark.some(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("inner", [8, 16])
def test_rows_stay_multiples(dtype: torch.dtype, inner: int) -> None:
    """Weights are split as pinned; a product whose rows would be shorter has them whole."""
    model, given = Experts(inner).to(dtype), batch(dtype)
    pins = {"up": ("R", "S(2)"), "down": ("R", "S(1)")}
    found = plan(model, given, cluster="h100", axes=AXES, search=Search(pins=pins))
    # In their own dtype kernels run; float64 shows what rounding hides.
    assert verify(model, given, AXES, plan=found, dtype=dtype).max_error < 0.05
    assert verify(model, given, AXES, plan=found).max_error < 1e-12


@pytest.mark.some(1)
@pytest.mark.parametrize("seed", range(2))
def test_random_plans(seed: int) -> None:
    model, given = Experts().to(torch.bfloat16), batch(torch.bfloat16)
    options = {"plan": "random", "seed": seed, "random_strides": bool(seed)}
    assert verify(model, given, AXES, dtype=torch.bfloat16, **options).max_error < 0.05
    assert verify(model, given, AXES, **options).max_error < 1e-12


def test_float64_is_an_error_as_in_eager_mode() -> None:
    model, given = Experts().double(), batch(torch.float64)
    with pytest.raises(RuntimeError) as eager:
        model(*given)
    with pytest.raises(CaptureError) as captured:
        program_of(model, given)
    assert str(eager.value) in str(captured.value) and "torch._grouped_mm(" in str(captured.value)
