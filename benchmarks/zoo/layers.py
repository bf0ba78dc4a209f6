"""Torch's own layers: recurrent networks, attention with every kind of mask, graphs, weight norm, losses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from benchmarks.zoo.parts import BATCH, CLASSES, SEQUENCE, Tensors, classifier, generator, random

HIDDEN = 16


class Recurrent(nn.Module):
    """Scores from the last state of a recurrent network."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.net = kind(HIDDEN, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sequences to scores."""
        scores: torch.Tensor = self.head(self.net(x)[0][:, -1])
        return scores


def recurrent(kind: type[nn.LSTM] | type[nn.GRU]) -> tuple[nn.Module, Tensors]:
    """A classifier of sequences of four."""
    torch.manual_seed(0)
    return classifier(Recurrent(kind), 4, HIDDEN)


class Masked(nn.Module):
    """Attention four times: boolean mask, float mask, causal, and `nn.MultiheadAttention` with padding."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.projections = nn.ModuleList(nn.Linear(HIDDEN, 3 * HIDDEN) for _ in range(3))
        self.layer = nn.MultiheadAttention(HIDDEN, heads, batch_first=True)
        self.bias = nn.Parameter(torch.zeros(SEQUENCE, SEQUENCE))
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sequences to scores."""
        band = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool, device=x.device).triu(-2)
        x = x + self.attend(0, x, attn_mask=band)
        x = x + self.attend(1, x, attn_mask=self.bias)
        x = x + self.attend(2, x, is_causal=True)
        late = torch.arange(SEQUENCE, device=x.device)[None] >= torch.arange(4, 4 + len(x), device=x.device)[:, None]
        x = x + self.layer(x, x, x, key_padding_mask=late, need_weights=False)[0]
        scores: torch.Tensor = self.head(x.mean(1))
        return scores

    def attend(self, layer: int, x: torch.Tensor, **mask: torch.Tensor | bool) -> torch.Tensor:
        """One self-attention."""
        qkv = self.projections[layer](x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(*qkv, **mask).transpose(1, 2).flatten(2)  # type: ignore[arg-type, misc]


def masked() -> tuple[nn.Module, Tensors]:
    """Attention with every kind of mask."""
    torch.manual_seed(0)
    return classifier(Masked(4), SEQUENCE, HIDDEN)


class Graph(nn.Module):
    """Messages along edges: a sum per node (`index_add`), and one weighted by a softmax per node (`scatter_add`)."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(2 * HIDDEN, HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
        self.score, self.head = nn.Linear(2 * HIDDEN, 1), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Nodes ``[n, h]`` and edges ``[2, e]`` to the loss over nodes."""
        source, target = edges
        ends = torch.cat([x[source], x[target]], 1)
        total = torch.zeros_like(x).index_add(0, target, torch.relu(self.message(ends)))
        x = x + torch.tanh(self.update(torch.cat([x, total], 1)))
        weight = torch.exp(torch.tanh(self.score(torch.cat([x[source], x[target]], 1))))
        norm = torch.zeros_like(x[:, :1]).scatter_add(0, target[:, None], weight)
        places = target[:, None].expand(-1, HIDDEN)
        x = x + torch.zeros_like(x).scatter_add(0, places, weight / (norm[target] + 1e-3) * x[source])
        return F.cross_entropy(self.head(x), labels)


def graph() -> tuple[nn.Module, Tensors]:
    """A network on a graph of 16 nodes and 32 edges."""
    torch.manual_seed(0)
    edges = torch.randint(0, 16, (2, 32), generator=generator())
    labels = torch.randint(0, CLASSES, (16,), generator=generator(1))
    return Graph(), {"x": random(16, HIDDEN), "edges": edges, "labels": labels}


class Margin(nn.Module):
    """Linear layers with weight norm, and a soft margin loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = weight_norm(nn.Linear(HIDDEN, 2 * HIDDEN))
        self.second = weight_norm(nn.Linear(2 * HIDDEN, CLASSES), dim=1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Samples and signs to loss."""
        return F.soft_margin_loss(self.second(torch.relu(self.first(x))), y)


def margin() -> tuple[nn.Module, Tensors]:
    """Weight norm and a soft margin loss."""
    torch.manual_seed(0)
    return Margin(), {"x": random(BATCH, HIDDEN), "y": random(BATCH, CLASSES, seed=1).sign()}


FAMILIES: dict[str, Callable[[], tuple[nn.Module, Tensors]]] = {
    "lstm": partial(recurrent, nn.LSTM),
    "gru": partial(recurrent, nn.GRU),
    "attention masks": masked,
    "graph": graph,
    "weight norm": margin,
}
