"""Models that random ones were shrunk to: each was silently wrong or ended in a raw error once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autopar


class Normed(nn.Module):
    """Batch norm between transposed views: the kernel's result has other strides than a fake tensor's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)
        return self.last(h).logsumexp(-1).mean()


def test_verify_runs_the_captured_graph_whatever_strides_kernels_give() -> None:
    torch.manual_seed(0)
    report = autopar.verify(Normed().double(), (torch.randn(2, 2, 2, dtype=torch.float64),), {"a": 2}, plan="random")
    assert max(report.max_error, report.capture_error) < 1e-7  # the gradient of the bias is zero but for rounding


class Chain(nn.Module):
    """Two linear layers and what a test puts between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 3)
        self.seen: dict[str, Tensor] = {}
        self.n = 0

    def between(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x))).square().mean()


def verified(model: nn.Module) -> autopar.EquivalenceReport:
    torch.manual_seed(0)
    x = torch.randn(2, 2, 2, dtype=torch.float64)
    return autopar.verify(model.double(), (x,), {"a": 2}, plan="random", seed=1)


def test_verify_copies_hooks_that_refer_to_the_model() -> None:
    """The hook of the copy wrote to the original."""
    model = Chain()
    model.first.register_forward_hook(lambda m, i, o: model.seen.update(out=o.detach().mean()))
    assert verified(model).max_error < 1e-12
    assert not model.seen


def test_verify_copies_a_forward_that_was_replaced() -> None:
    """The copy's ``forward`` computed with the original's weights."""
    model = Chain()
    model.first.forward = lambda x, old=model.first.forward: old(x) * 2  # type: ignore[method-assign]
    report = verified(model)
    assert max(report.max_error, report.capture_error) < 1e-12


class Parity(Chain):
    def between(self, h: Tensor) -> Tensor:
        for _ in range(2):
            self.n += 1
            h = torch.tanh(h) if self.n % 2 else h
        return h


def test_verify_counts_on_in_the_second_call() -> None:
    """The second call has the same graph, and writes another number."""
    report = verified(Parity())
    assert max(report.max_error, report.capture_error) < 1e-12
    assert "attribute n of the second call" in report.errors
