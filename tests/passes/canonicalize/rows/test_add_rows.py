"""Gradients of rows that are read by indices add up over tokens, wherever these are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.compiler import program_of
from autopar.verify.verify import verify
from tests.crossed import seeds

ROWS, HIDDEN, KINDS = 10, 4, 3


class Read(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.linear = function, nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        for name, shape in {
            "table": (ROWS, HIDDEN), "bias": (ROWS,), "kinds": (KINDS, ROWS, HIDDEN), "pairs": (ROWS, 2, HIDDEN)
        }.items():  # fmt: skip
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.float64)))

    def forward(self, ids: Tensor, kind: Tensor) -> Tensor:
        return (self.linear(self.function(self, ids, kind)).tanh() - 1).square().mean()


def rows(m: Read, ids: Tensor, kind: Tensor) -> Tensor:
    """From the end, and once more in another order."""
    y: Tensor = m.table[ids - ROWS] + 2 * m.table[ids.flip(1)]
    return y


def repeated(m: Read, ids: Tensor, kind: Tensor) -> Tensor:
    """As Whisper reads its positions."""
    at = torch.arange(ids.shape[1]).unsqueeze(0).repeat(ids.shape[0], 1)
    y: Tensor = m.table[at] * ids.unsqueeze(-1)
    return y


def other_shapes(m: Read, ids: Tensor, kind: Tensor) -> Tensor:
    y: Tensor = m.bias[ids].unsqueeze(-1) * m.pairs[ids].sum(2)
    return y


def several_indices(m: Read, ids: Tensor, kind: Tensor) -> Tensor:
    y: Tensor = m.kinds[kind, ids] + m.kinds[kind[:, :1], ids] - m.kinds[kind, ids, kind - 1].unsqueeze(-1)
    return y


def all_indices(m: Read, ids: Tensor, kind: Tensor) -> Tensor:
    """Numbers of a table, one by one."""
    y: Tensor = m.table[ids] * (m.table[ids, kind] * m.table[ids, kind + 1]).unsqueeze(-1)
    return y


def not_first(m: Read, ids: Tensor, kind: Tensor) -> Tensor:
    y: Tensor = m.kinds[:, ids].sum(0)
    return y


FUNCTIONS = [not_first, rows, repeated, other_shapes, several_indices, all_indices]


@pytest.mark.some(2)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_values(function: Callable[..., Tensor]) -> None:
    generator = torch.Generator().manual_seed(1)
    ids, kind = (torch.randint(0, n, (8, 8), generator=generator) for n in (ROWS, KINDS))
    nodes = program_of(Read(function), (ids, kind)).graph.graph.nodes
    found = {n.target for n in nodes}
    assert (torch.ops.aten.index_put.default in found) == (function is not_first)
    meshes: list[tuple[dict[str, int], int]] = [({"a": 4}, 1), ({"a": 2}, 2), ({"a": 2, "b": 2}, 1)]
    first = FUNCTIONS.index(function)  # one of each in the quick tests, all of all in the deep ones
    for seed in seeds(3):
        axes, count = meshes[(first + seed) % 3]
        if function is not_first and count > 1:
            continue
        report = verify(Read(function), (ids, kind), axes, plan="random", seed=seed, microbatches=count)
        assert report.max_error < 1e-10


def test_rows_that_a_table_does_not_have() -> None:
    """A user's own call, by indices that nothing is read by, stays what checks them."""

    def added(m: Read, ids: Tensor, kind: Tensor) -> Tensor:
        return torch.zeros_like(m.table).index_put((ids[:, 0],), m.table[:8], accumulate=True)

    ids = torch.full((8, 8), ROWS)
    with pytest.raises(IndexError):
        Read(added)(ids, ids)
    targets = {n.target for n in program_of(Read(added), (ids % ROWS, ids)).graph.graph.nodes}
    assert torch.ops.aten.index_put.default in targets
