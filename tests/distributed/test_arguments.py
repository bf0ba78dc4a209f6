"""Arguments, floats and several losses on four ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import mlp_batch, slow_devices

pytestmark = pytest.mark.distributed


class Annealed(nn.Module):
    """Two losses, weighted by a float, and named arguments beside positional ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, /, y: torch.Tensor, *, alpha: float = 1.0, **more: Any) -> dict[str, Any]:
        h = torch.relu(self.up(x)) * (1 - alpha)
        out = self.down(h)
        loss = (out - y - alpha * more["shift"]).square().mean() + out.abs().mean() * alpha
        return {"losses": {"fit": loss, "small": h.square().mean() / (1 + alpha)}, "alpha": alpha}


def annealed(rank: int, microbatches: int) -> tuple[float, int, str]:
    """How far losses and gradients are off, how many graphs there are, and the error of a wrong call."""
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    torch.manual_seed(0)
    reference = Annealed().double()
    torch.manual_seed(0)
    pins = {"batch.0": ("S(0)", "S(0)"), "up.weight": ("S(0)", "R"), "microbatches": microbatches}
    loss = "losses.fit" if microbatches > 1 else None
    model = parallelize(
        Annealed().double(), mesh_of(2, 2), loss=loss, search=Search(pins=pins), cluster=slow_devices(), timeout=WAIT
    )
    worst = 0.0
    for step in range(4):
        x, y, alpha = *mlp_batch(step).values(), 0.3 / (step + 1)
        found, expected = (m(x, y=y, alpha=alpha, shift=x) for m in (model, reference))
        assert found["alpha"] == alpha
        for m, out in ((model, found), (reference, expected)):
            m.zero_grad()
            (out["losses"]["fit"] + (0 if loss else alpha * out["losses"]["small"])).backward()
        for name in ("fit", "small"):
            worst = max(worst, float((found["losses"][name] - expected["losses"][name]).detach().abs()))
        gradients = model.full_gradients()
        worst = max(worst, *(float((gradients[n] - p.grad).abs().max()) for n, p in reference.named_parameters()))
    with pytest.raises(TypeError) as error:
        model(x, alpha=0.5)
    return worst, len(model._autopar.cache), str(error.value)


@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.deep), 2])
def test_annealed_losses(ranks: Ranks, microbatches: int) -> None:
    for worst, graphs, error in ranks.run(annealed, microbatches):
        assert worst < 1e-12
        assert graphs == 1
        assert error == "Annealed.forward() missing 1 required positional argument: 'y'"
