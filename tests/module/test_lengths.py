"""Which dims of a batch have the length; graphs that are gone leave nothing behind."""

from __future__ import annotations

import gc
import linecache
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar._torch_compat import FakeTensorMode
from autopar._torch_compat.caches import _sources as sources
from autopar.compiler import program_of
from autopar.module.lengths import length_dims
from autopar.search.formulation.as_before import strategies_of
from autopar.search.formulation.pins import Restrictions
from tests.distributed.models import slow_devices
from tests.distributed.test_lengths import reader, tokens


class Translator(nn.Module):
    """Of two sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.offset = nn.Parameter(torch.zeros(6, 4))

    def forward(self, source: torch.Tensor, target: torch.Tensor, learned: bool = False) -> torch.Tensor:
        x = self.table(source)
        x = x + self.offset if learned else x
        return (x.sum(1) * self.table(target).sum(1)).mean()


def ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long)


def found(key: tuple[str, int] | None, source: int, target: int, **more: Any) -> list[tuple[int, int]]:
    batch = {"source": ids(2, source), "target": ids(2, target), **more}
    program = program_of(Translator(), batch, loss=None)
    return length_dims(program, [(2, source), (2, target)], key)


def test_dims_of_the_length() -> None:
    assert found(None, 5, 5) == [(0, 1), (1, 1)]
    # The other one is of a parameter's size, and stays.
    assert found(None, 6, 5, learned=True) == [(1, 1)]
    assert found(("batch.1", 1), 5, 7) == [(1, 1)]
    with pytest.raises(ValueError, match=r"1 of 'batch.0' \(of size 5\), 1 of 'batch.1' \(of size 7\).* name one, as"):
        found(None, 5, 7)
    with pytest.raises(ValueError, match=r"no dim of the batch is a sequence's.* name a dim that may vary"):
        found(None, 6, 1, learned=True)
    with pytest.raises(ValueError, match=r"the batch has no such dim; there are 'batch.0' \[2, 5\]"):
        found(("batch.1", 2), 5, 7)


def test_an_error_says_at_which_length() -> None:
    class Picky(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[1] == 6:
                raise RuntimeError("not this one")
            return super().forward(x).square().mean()

    with pytest.raises(Exception) as error:
        autopar.parallelize(Picky(4, 4), None, (torch.zeros(2, 5, 4),), cluster="cpu", lengths=[6])
    assert "at length 6 of lengths=; dims of that length: 1 of 'batch.0'" in " ".join(error.value.__notes__)


@pytest.mark.slow
def test_graphs_that_are_gone_leave_nothing_in_torchs_caches() -> None:
    module: Any = autopar.parallelize(nn.Linear(4, 4), None, cluster="cpu", loss_fn=lambda output, _: output.sum())
    module._autopar.cache.limit = 2
    sizes = []
    for rows in range(2, 16):
        module(torch.zeros(rows, 4)).backward()
        gc.collect()
        if rows > 7:
            sizes.append((len(sources.eval_cache), len(linecache.cache), len(FakeTensorMode.cache)))
    sources_of_graphs = {(own, lines) for own, lines, _ in sizes}
    # A shape has some 15 results of its own.
    assert len(sources_of_graphs) == 1 and sizes[-1][2] < sizes[0][2] + 40, sizes


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(9))
def test_any_plan_of_another_shape_computes_the_same(seed: int) -> None:
    """Whatever the strategies of a plan for one length: a plan for another that follows them computes the same."""
    axes = {"a": 2, "b": 2}
    search = autopar.Search(recipe="random", seed=seed, cache=False)
    model = reader()
    before = autopar.plan(model, tokens(8), cluster=slow_devices(), axes=axes, search=search)
    first = program_of(model, tokens(8))
    for length, rows in ((12, 4), (8, 8)):
        program = program_of(model, tokens(length, rows))
        alike = strategies_of(before, first, program, tie=False)
        assert len(alike) == len(program.calls)
        plan = autopar.compiler.solve(
            program, axes, slow_devices(), search=autopar.Search(padding=False, cache=False, tie_layers=False),
            restrictions=Restrictions(strategies=alike),
        )  # fmt: skip
        assert all(plan.choices[key] == tuple(min(names) for names in only) for key, only in alike.items())
        report = autopar.verify(model, tokens(length, rows), axes, plan=plan)
        assert report.max_error < 1e-10
    # Three rows are not split as four are.
    assert strategies_of(before, first, program_of(model, tokens(8, 3)), tie=False) == {}
