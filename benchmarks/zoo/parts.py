"""What the families share: batches, and losses on top of networks that return scores."""

from __future__ import annotations

import torch
from torch import nn

Tensors = dict[str, torch.Tensor]

BATCH, SEQUENCE, VOCABULARY, CLASSES = 8, 8, 64, 8


def generator(seed: int = 0) -> torch.Generator:
    """A source of random numbers of its own."""
    return torch.Generator().manual_seed(seed)


def tokens(batch: int = BATCH, length: int = SEQUENCE, seed: int = 0) -> torch.Tensor:
    """Token ids, none of them one of the first four, which configurations reserve."""
    return torch.randint(4, VOCABULARY, (batch, length), generator=generator(seed))


def text() -> Tensors:
    """Token ids that are their own labels."""
    return {"input_ids": tokens(), "labels": tokens()}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers."""
    return torch.randn(*shape, generator=generator(seed))


def labels(batch: int = BATCH) -> torch.Tensor:
    """A class for each sample."""
    return torch.randint(0, CLASSES, (batch,), generator=generator(1))


class Classifier(nn.Module):
    """Cross-entropy of a network that returns scores ``[batch, classes]``."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Scores to loss."""
        return nn.functional.cross_entropy(self.net(x), labels)


def classifier(net: nn.Module, *shape: int) -> tuple[nn.Module, Tensors]:
    """A classifier on a network, with a batch of samples of this shape."""
    return Classifier(net), {"x": random(BATCH, *shape), "labels": labels()}
