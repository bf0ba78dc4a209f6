"""Exchange of rows by expert: what devices tell one another, and the order of what comes."""

from __future__ import annotations

import pytest
import torch

from autopar.ir.ops.exchange import arrivals, block_sizes, count_experts, owned_counts


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


def test_rows_of_no_expert_are_an_error() -> None:
    """Rows that name an expert beyond the last would go nowhere."""
    sent = count_experts(torch.tensor([0, 1, 2]), 2)
    with pytest.raises(RuntimeError, match="1 of 3 pairs of a token and an expert are of no expert"):
        block_sizes(torch.zeros(3, 4), sent, sent, 2)
    assert block_sizes(torch.zeros(2, 4), sent, torch.tensor([0, 5]), 2) == ([1, 1], [0, 5])
