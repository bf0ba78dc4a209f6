"""Pipelines of deep models of which three blocks are captured: the figures are those of the whole model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cluster import Cluster, Link
from autopar.compiler import program_of, solve
from autopar.errors import InfeasibleError
from autopar.search.options import Search

BLOCKS, WIDTH = 7, 16
AXES = {"pp": 2, "inner": 2}
MACHINE = Cluster("pairs", Cluster.preset("cpu").device, (Link("fast", 1e9, 1e-6), Link("slow", 1e6, 1e-6)), (2,))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


def example() -> tuple[nn.Module, tuple[Tensor]]:
    return Deep(), (torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0)),)


@pytest.mark.parametrize(
    ("schedule", "virtual", "recompute", "recipe"),
    [
        pytest.param("zb-h1", 1, "none", None, marks=pytest.mark.deep),
        ("1f1b", 1, "none", "megatron"),
        pytest.param("interleaved", 2, "none", None, marks=pytest.mark.deep),
        pytest.param("1f1b", 1, "search", None, marks=pytest.mark.deep),
    ],
)
def test_figures_are_those_of_the_whole_model(schedule: str, virtual: int, recompute: str, recipe: str | None) -> None:
    model, batch = example()
    pins = {"virtual": virtual, "microbatches": 4, "schedule": schedule, "stage_axis": "pp", "recompute": recompute}
    memory = None
    if recompute == "search":  # so little that some blocks keep less than others
        ample = autopar.plan(model, batch, cluster=MACHINE, axes=AXES, search=Search(pins={"stages": 2, **pins}))
        memory = 0.93 * sum(ample.predicted.peak_bytes.values())
    short = autopar.plan(
        model,
        batch,
        cluster=MACHINE,
        axes=AXES,
        memory=memory,
        search=Search(pins={"stages": 2, **pins}, recipe=recipe),
    )
    assert short.scatter or recipe != "megatron"  # whose devices have the same
    assert bool(short.recompute) == (recompute == "search")
    report = autopar.verify(model, batch, AXES, plan=short)
    assert report.max_error < 1e-10, report.worst
    if memory is not None:
        assert sum(short.predicted.peak_bytes.values()) <= memory
        return
    cuts = [s.modules[0] for s in short.stages[1:]]
    whole = solve(program_of(model, batch), AXES, MACHINE, search=Search(pins={"stages": cuts, **pins}, recipe=recipe))
    assert short.predicted.step_seconds == pytest.approx(whole.predicted.step_seconds, rel=1e-3)
    needed = (sum(p.predicted.peak_bytes.values()) for p in (short, whole))
    assert next(needed) == pytest.approx(next(needed), rel=0.02)
    assert short.parameters == whole.parameters
    assert short.scatter == whole.scatter
    assert sum(len(s.modules) for s in short.stages) == BLOCKS + 2


def test_each_stage_has_a_block() -> None:
    model, batch = example()
    search = Search(pins={"stages": 8, "microbatches": 8})
    with pytest.raises(InfeasibleError, match="blocks has 7 blocks; ask for fewer stages"):
        autopar.plan(model, batch, cluster=MACHINE, axes={"pp": 8}, search=search)
