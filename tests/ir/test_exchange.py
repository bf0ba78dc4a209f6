"""Exchange of rows by expert: what devices tell one another, and the order of what comes."""

from __future__ import annotations

import pytest
import torch

from autopar.ir.ops.exchange import (
    arrivals,
    block_sizes,
    count_experts,
    message_sizes,
    own_block,
    own_rows,
    owned_counts,
    place_rows,
)


def test_rows_of_an_expert_come_together() -> None:
    """Two devices, four experts: this one has the first two, and gets 2 + 1 rows of each of them from the senders."""
    received = torch.tensor([2, 1, 0, 3])
    assert owned_counts(received, 2).tolist() == [2, 4]
    assert arrivals(received, 2, 99).tolist() == [0, 1, 2, 3, 4, 5]  # expert 0 from one sender, 1 from both
    assert arrivals(torch.tensor([1, 1, 2, 0]), 2, 99).tolist() == [0, 2, 3, 1]
    assert arrivals(torch.zeros(4, dtype=torch.int64), 2, 99).tolist() == []


def test_counts() -> None:
    for dtype in (torch.int64, torch.int32):
        assert count_experts(torch.tensor([0, 2, 2, 3], dtype=dtype), 5).tolist() == [1, 0, 2, 1, 0]
    assert count_experts(torch.empty(0, dtype=torch.int64), 2).tolist() == [0, 0]


def test_sizes_of_messages_there_and_back() -> None:
    sizes = message_sizes(torch.tensor([1, 1, 0, 0]), torch.tensor([0, 3, 2, 0]), 2)
    assert block_sizes(torch.zeros(2, 4), sizes, False) == ([2, 0], [3, 2])
    assert block_sizes(torch.zeros(5, 4), sizes, True) == ([3, 2], [2, 0])


def test_own_rows_and_their_place() -> None:
    """The blocks of all devices are the rows, and each is where it was: the one is the other's transpose."""
    rows, counts = torch.randn(7, 3, dtype=torch.float64), torch.tensor([2, 0, 0, 4, 1, 0])
    blocks = [own_block(counts, 3, i) for i in range(3)]
    own = [own_rows(rows, block, 2) for block in blocks]
    assert [len(x) for x in own] == [2, 4, 1]
    torch.testing.assert_close(torch.cat(own), rows)
    torch.testing.assert_close(torch.stack([place_rows(*x, 7) for x in zip(own, blocks, strict=True)]).sum(0), rows)


def test_rows_of_no_expert_are_an_error() -> None:
    """Rows that name an expert beyond the last would go nowhere."""
    counts = count_experts(torch.tensor([0, 1, 2]), 2)
    for take, sizes in ((block_sizes, message_sizes(counts, counts, 2)), (own_rows, own_block(counts, 2, 0))):
        with pytest.raises(RuntimeError, match="1 of 3 pairs of a token and an expert are of no expert"):
            take(torch.zeros(3, 4), sizes, False)
