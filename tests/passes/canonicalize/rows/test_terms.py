"""Windows of a padded sequence have gradients that are shifts, of no other length."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from autopar.compiler import program_of
from autopar.verify.verify import verify

aten = torch.ops.aten


class Blocks(nn.Module):
    """Blocks beside those before and behind them, as local attention sees them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        blocks = x.unflatten(1, (4, 2))
        wide = F.pad(blocks, (0, 0, 0, 0, 1, 1))
        loss: Tensor = self.mix(torch.cat([wide[:, i : i + 4] for i in range(3)], -1)).square().mean()
        return loss


def test_gradients_of_windows_are_as_long_as_the_sequence() -> None:
    batch = (torch.randn(2, 8, 4, dtype=torch.float64, requires_grad=True),)
    program = program_of(Blocks().double(), batch)
    lengths = {n.meta["val"].shape[1] for n in program.graph.graph.nodes if getattr(n.meta.get("val"), "ndim", 0) == 4}
    assert lengths == {4}
    pads = [n.args[1] for n in program.graph.graph.nodes if n.target is aten.constant_pad_nd.default]
    assert sorted(n[-2:] for n in pads) == [[-1, 1], [-1, 1], [1, -1], [1, -1]]
    assert verify(Blocks().double(), batch, {"a": 2, "b": 2}, plan="random").max_error < 1e-10


class Uncut(nn.Module):
    """A sum of which something else is read, and one with a term that has not been padded."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        wide, longer = F.pad(x, (1, 1)), F.pad(x[:, 1:], (0, 3))
        total = wide + longer
        return (total[:, 1:-1] * (wide + wide.roll(1, 1))[:, 1:-1]).sum() + total.square().sum()


def test_other_sums_stay() -> None:
    batch = (torch.randn(2, 8, dtype=torch.float64, requires_grad=True),)
    report = verify(Uncut(), batch, {"a": 2}, plan="random")
    assert report.max_error < 1e-10 and report.capture_error < 1e-10
