"""Rows that a slice leaves out and that come back are computed: shifts take the places of shorter dims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from autopar.compiler import plan, program_of
from autopar.ir.node_info import info
from autopar.search.options import Search
from autopar.verify.verify import verify
from tests.crossed import seeds

LENGTH, HIDDEN = 16, 4


class Call(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.linear = function, nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x)).tanh().square().mean()


def assigned(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1:] += x[:, :-1].exp()
    y[:, :-2] *= x[:, 2:] - x[:, 1:-1]
    return y


def differences(x: Tensor) -> Tensor:
    first = torch.cat([x[:, :1], x[:, 1:] - x[:, :-1]], 1)
    return first * F.pad(torch.diff(x, dim=1).abs(), (0, 0, 0, 1), value=2.0) + torch.diff(x, dim=1).square().mean()


def slopes(x: Tensor) -> Tensor:
    return torch.gradient(x, dim=1)[0]


def nothing_of_rows_in_vain(x: Tensor) -> Tensor:
    """Logarithms of zeros and quotients by them, in the rows that are left out."""
    zeros = torch.cat([torch.zeros_like(x[:, :1]), x[:, 1:].detach().abs()], 1)
    y = x.clone()
    y[:, 1:] = zeros[:, 1:].log() * x[:, :-1] / zeros[:, 1:]
    return y


def flags(x: Tensor) -> Tensor:
    counts, signs = (x > 0).long(), x > 0
    counts[:, 1:] += counts[:, :-1].clone()
    starts = torch.cat([torch.ones_like(signs[:, :1]), signs[:, 1:] != signs[:, :-1]], 1)
    return x * counts * starts


def turned(x: Tensor) -> Tensor:
    """Halves that change places, rows one by one, and short rows that something else reads: as they were."""
    y = torch.cat([-x[:, LENGTH // 2 :], x[:, : LENGTH // 2]], 1)
    for i in range(1, 3):
        y = torch.cat([y[:, :i], (y[:, i : i + 1] + y[:, i - 1 : i]).tanh(), y[:, i + 1 :]], 1)
    short = x[:, 1:] * x[:, :-1]
    return F.pad(short, (0, 0, 1, 0)) + y + (short @ short.mT).sum()


@pytest.mark.some(2)
@pytest.mark.parametrize("function", [assigned, differences, slopes, nothing_of_rows_in_vain, flags, turned])
def test_values(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, LENGTH, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for seed, axes in zip(seeds(2), ({"a": 2, "b": 2}, {"a": 4}), strict=False):
        report = verify(Call(function), (x,), axes, plan="random", seed=seed)
        assert report.max_error < 1e-10
    nodes = program_of(Call(function), (x,)).graph.graph.nodes
    found = Counter(str(n.target).removeprefix("aten.").split(".")[0] for n in nodes if n.op == "call_function")
    if function is turned:
        assert found["cat"] and found["slice_backward"]
        return
    assert not any(found[name] for name in ("slice_scatter", "slice_backward", "cat", "slice")), found
    axes = {"a": 4}
    made = plan(Call(function), (x,), cluster="h100", axes=axes, search=Search(roles={"a": "context"}))
    report = verify(Call(function), (x,), axes, plan=made)
    assert report.max_error < 1e-10
    kinds = [k.kind for n in report.program.graph.graph.nodes if (k := info(n).collective) is not None]
    assert "send" in kinds and "all_to_all" not in kinds
