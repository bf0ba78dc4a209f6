"""fill_in_place: padding rows of what dies are filled where they are, all else goes through the whole tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn
from torch.nn import functional

from autopar.compiler import program_of, rewrite
from autopar.ir.ops.rows import fill_rows_
from autopar.memory.liveness import peak_memory
from autopar.passes import PASSES
from autopar.passes.kernels.fill_in_place import fill_in_place
from autopar.search.random_plan import random_plan
from autopar.sharding.dims import analyze
from autopar.verify.verify import compare, global_values
from tests.plans import follow_plan

aten = torch.ops.aten
WITHOUT = tuple(p for p in PASSES if p is not fill_in_place)


class Model(nn.Module):
    """A linear layer, and a function of it."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.f, self.function = nn.Linear(8, 12), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.f(x))


def filled(
    function: Callable[[torch.Tensor], torch.Tensor], seed: int | None = None, axes: Mapping[str, int] = {}
) -> tuple[int, int]:
    """How many fills are in place, and how many not, of split samples or under a random plan; results are equal."""
    torch.manual_seed(0)
    x, model = torch.randn(4, 8, 8, dtype=torch.float64), Model(function).double()
    program = program_of(model, (x,))
    plan = follow_plan(program, axes, batch={"0": "S(0)"} if axes else {})
    if seed is not None:
        plan = random_plan(program, analyze(program), {"a": 2, "b": 2}, plan.cluster, seed)
    local = rewrite(program, plan)
    values = global_values(program, model, (x,))
    assert compare(program, local, plan, values, torch.float64).max_error < 1e-12
    before, after = peak_memory(rewrite(program, plan, passes=WITHOUT), plan), peak_memory(local, plan)
    assert sum(after.values()) <= sum(before.values())
    targets = [n.target for n in local.graph.graph.nodes]
    return targets.count(fill_rows_), targets.count(aten.masked_fill.Scalar)


def cross_entropy(y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(y[:, :-1].flatten(0, 1), torch.arange(28).remainder(12), reduction="sum")


def rows_of(n: int, start: int) -> torch.Tensor:
    return torch.ops.aten.ge.Scalar(torch.arange(n), start)


def test_a_loss_of_all_tokens_but_the_last() -> None:
    assert filled(cross_entropy) == (5, 1)  # whether a label is ignored is a mask of its own
    assert filled(cross_entropy, axes={"a": 2}) == (5, 1)


Function = Callable[[torch.Tensor], torch.Tensor]


def fills(rows: Callable[[], torch.Tensor], flat: bool = False) -> Function:
    """Cosines, of which rows are filled; the backward pass reads neither."""

    def run(y: torch.Tensor) -> torch.Tensor:
        y = y.flatten(0, 1) if flat else y
        return (y.cos().masked_fill(rows(), 0.5) * 2).sum()

    return run


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("function", "in_place"),
    [
        (fills(lambda: rows_of(8, 5).reshape(8, 1)), 1),
        (fills(lambda: rows_of(8, 5).expand(4, 8).reshape(32, 1), flat=True), 1),
        (fills(lambda: rows_of(12, 5)), 1),
        # Each of eight rows four times, parts of several dims, and no rows at all.
        (fills(lambda: rows_of(8, 5).reshape(8, 1).expand(8, 4).reshape(32, 1), flat=True), 0),
        (fills(lambda: rows_of(96, 40).reshape(8, 12)), 0),
        (fills(lambda: rows_of(8, 9).reshape(8, 1)), 0),
        # What is read again, what the backward pass reads, and what is larger then.
        (lambda y: (y.masked_fill(rows_of(8, 5).reshape(8, 1), 0.5) * y).sum(), 0),
        (lambda y: (y.exp().masked_fill(rows_of(8, 5).reshape(8, 1), 0.5) * 2).sum(), 0),
        (lambda y: (y[:, :1].cos().masked_fill(rows_of(8, 5).reshape(8, 1), 0.5) * 2).sum(), 0),
    ],
)
def test_which_rows(function: Function, in_place: int) -> None:
    assert filled(function)[0] == in_place


@pytest.mark.some(2)
@pytest.mark.parametrize("seed", range(6))
def test_random_plans(seed: int) -> None:
    filled(cross_entropy, seed)  # of rows that are split
