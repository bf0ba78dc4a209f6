"""The role `context`: rows of images are a sequence, and what cannot be split along one is left to the search."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from autopar.compiler import plan, program_of
from autopar.errors import InfeasibleError
from autopar.ir.program import Program
from autopar.search.options import Search
from autopar.verify.verify import verify
from tests.distributed.models import slow_devices
from tests.search.formulation.test_batched_experts import MODELS, batch

AXES = {"a": 4}
CONTEXT = Search(recipe="context", padding=False)


class Windows(nn.Module):
    """Patches of images, attention in windows of them, a convolution, and attention of all of them."""

    def __init__(self, window: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.near = nn.Conv2d(3, 8, 2, 2), nn.Conv2d(8, 8, 3, padding=1)
        self.qkv, self.out, self.window = nn.Linear(8, 24), nn.Linear(8, 8), window

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image)
        x = x + self.near(x)
        samples, channels, rows, columns = x.shape
        w = self.window
        windows = x.view(samples, channels, rows // w, w, columns // w, w).permute(0, 2, 4, 3, 5, 1)
        x = self.attend(windows.reshape(-1, w * w, channels)).view(samples, rows // w, columns // w, w, w, channels)
        x = x.transpose(2, 3).reshape(samples, rows * columns, channels)
        return (x + self.attend(x)).square().mean()


def images(rows: int = 16) -> tuple[Tensor]:
    return (torch.randn(2, 3, rows, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64),)


@pytest.mark.slow
def test_rows_of_images_are_split() -> None:
    """A device has windows of its rows, and takes rows of neighbors for the convolution."""
    model = Windows().double()
    found = plan(model, images(), cluster="h100", axes=AXES, search=CONTEXT)
    assert str(found.batch["0"][0]) == "S(2.0)"
    assert found.predicted.collectives["a"]["send"] >= 2
    report = verify(model, images(), AXES, plan=found)
    assert report.max_error < 1e-12
    nodes = report.program.graph.graph.nodes
    made = {n.meta["val"].shape for n in nodes if n.target is torch.ops.aten.addmm.default}
    assert (2 * 8 * 4 // 4, 24) in made and (2 * 8 * 4, 24) not in made
    with pytest.raises(InfeasibleError, match=r"\(16 rows of batch tensor 0\) .* a=4: .* as 2 x 4 x 2"):
        plan(Windows(4).double(), images(), cluster="h100", axes=AXES, search=CONTEXT)


class Long(nn.Module):
    """A kernel that reaches over more positions than a device has."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.out = nn.Conv1d(8, 8, 11, padding=5, groups=8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.near(x.transpose(1, 2)).transpose(1, 2)).square().mean()


def test_a_kernel_that_is_longer_than_a_part() -> None:
    given = (torch.randn(2, 16, 8, dtype=torch.float64),)
    found = plan(Long().double(), given, cluster="h100", axes=AXES, search=CONTEXT)
    assert verify(Long().double(), given, AXES, plan=found).max_error < 1e-12


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["slots", "capacity"])
def test_what_has_no_positions_is_shared(name: str) -> None:
    """Slots of experts are behind the sequence: devices share them where that is worth its messages."""
    slow = slow_devices()
    cluster = replace(slow, links=tuple(replace(link, bandwidth=1e9) for link in slow.links))
    model = MODELS[name]().double()
    report = verify(model, batch(4), AXES, plan=plan(model, batch(4), cluster=cluster, axes=AXES, search=CONTEXT))
    assert report.max_error < 1e-12
    assert 4 * multiplied(report.program) <= multiplied(program_of(model, batch(4)))


def multiplied(program: Program) -> int:
    """How many pairs of numbers all batched products multiply."""
    products = [n for n in program.graph.graph.nodes if n.target is torch.ops.aten.bmm.default]
    return sum(n.meta["val"].numel() * n.all_input_nodes[0].meta["val"].shape[-1] for n in products)
