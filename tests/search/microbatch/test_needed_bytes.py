"""What plans need where memory does not matter, in closed form, and the numbers of microbatches that are tried."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.compiler import program_of
from autopar.ir.program import Program
from autopar.search.microbatch.needed_bytes import HELD, needed_bytes, slowdown
from autopar.search.options import Search
from autopar.search.pipeline.shape import PipelineShape
from autopar.search.pipeline.space import counts

WIDTH, LAYERS = 8, 3


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def captured(rows: int) -> Program:
    return program_of(Deep(), (torch.randn(rows, WIDTH),))


def test_bytes_are_those_of_the_model() -> None:
    needed = needed_bytes(captured(64), "adamw")
    weights, outputs = LAYERS * WIDTH * WIDTH * 4, LAYERS * 64 * WIDTH * 4  # of each layer the tanh is saved, once
    assert needed.parameters == weights
    assert needed.state == pytest.approx(4 * weights, rel=0.05)  # the optimizer's counts of steps are in it
    assert needed.saved == outputs
    # In one microbatch nothing is held; in more, weights and gradients are, of a stage.
    assert needed.of_device(1, 4, 1, 1.0) == (needed.state + outputs) / 4
    assert needed.of_device(2, 4, 8, 1.5) == needed.state / 8 + HELD * weights + 1.5 * outputs / 32


def test_less_memory_is_slower() -> None:
    assert slowdown(3.0, 4.0) == 1.0
    assert 1.0 < slowdown(8.0, 4.0) < slowdown(16.0, 4.0)
    assert slowdown(8.0, 4.0, split=True) > slowdown(8.0, 4.0)


@pytest.mark.parametrize(
    ("rows", "devices", "inside", "expected"),
    [
        (64, 2, {"a": 2}, [2, 4, 8, 16, 32]),
        # 120 microbatches of 128 samples, and not 64 or 128 of 240 or 120, where 128 devices share one.
        (15360, 16, {"node": 16, "gpu": 8}, [20, 40, 120, 240, 480]),
        (30, 4, {"a": 2}, [5, 15]),
        (6, 4, {"a": 4}, [6]),
        (3, 4, {"a": 2}, [3]),
    ],
)
def test_devices_share_the_samples_of_a_microbatch(
    rows: int, devices: int, inside: dict[str, int], expected: list[int]
) -> None:
    shape = PipelineShape((("p", devices), *inside.items()), "p", devices)
    assert counts(captured(rows), Search(), shape)[: len(expected)] == expected
