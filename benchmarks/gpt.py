"""The GPT of Megatron-LM, as the measured and published step times were taken with: attention in parts, dropout."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

DROPOUT = 0.1


class Block(nn.Module):
    """A transformer layer: heads of one fused projection, tanh-gelu between two linears.

    If it is ``fused``, what Megatron's own kernels do in one pass with other operators is left out, so that it costs
    nothing: scale and mask before the softmax, a bias before gelu, bias and dropout before the residual sum.
    """

    def __init__(self, hidden: int, heads: int, dtype: torch.dtype, device: str, fused: bool = False) -> None:
        """Weights of ``dtype`` on ``device``."""
        super().__init__()
        own = {"dtype": dtype, "device": device}
        self.heads, self.fused, bias = heads, fused, not fused
        self.norm1 = nn.LayerNorm(hidden, **own)
        self.qkv = nn.Linear(hidden, 3 * hidden, **own)
        self.proj = nn.Linear(hidden, hidden, bias, **own)
        self.norm2 = nn.LayerNorm(hidden, **own)
        self.up = nn.Linear(hidden, 4 * hidden, bias, **own)
        self.down = nn.Linear(4 * hidden, hidden, bias, **own)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, sequence, hidden]`` to the same."""
        x = x + self.drop(self.proj(self.attend(self.qkv(self.norm1(x)))))
        y = F.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + self.drop(self.down(y))

    def drop(self, x: Tensor) -> Tensor:
        """Dropout before a residual sum."""
        return x if self.fused else F.dropout(x, DROPOUT)

    def attend(self, qkv: Tensor) -> Tensor:
        """Causal attention; the three parts of each head, one head after the other, are the last dim."""
        batch, sequence, width = qkv.shape
        size = width // 3 // self.heads
        parts = qkv.view(batch, sequence, self.heads, 3, size).unbind(3)
        query, key, value = (part.transpose(1, 2) for part in parts)
        scores = query @ key.transpose(2, 3)
        if not self.fused:
            future = torch.ones(sequence, sequence, dtype=torch.bool, device=qkv.device).triu(1)
            scores = (scores * size**-0.5).masked_fill(future, -1e4)
        shares = F.dropout(scores.softmax(-1), DROPOUT)
        return (shares @ value).transpose(1, 2).reshape(batch, sequence, width // 3)


class GPT(nn.Module):
    """Embeddings, blocks, and a head that shares the words' weight; returns the loss."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        layers: int,
        sequence: int,
        vocabulary: int,
        *,
        dtype: torch.dtype = torch.float16,
        device: str = "meta",
        fused: bool = False,
    ) -> None:
        """A model without values by default: planning needs none."""
        super().__init__()
        own = {"dtype": dtype, "device": device}
        self.words = nn.Embedding(vocabulary, hidden, **own)
        self.positions = nn.Embedding(sequence, hidden, **own)
        self.layers = nn.ModuleList(Block(hidden, heads, dtype, device, fused) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden, **own)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Both ``[batch, sequence]``."""
        x = F.dropout(self.words(tokens) + self.positions.weight, DROPOUT)
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def batch_of(size: int, sequence: int, device: str = "meta") -> tuple[Tensor, Tensor]:
    """Tokens and labels, without values by default."""
    return torch.zeros(2, size, sequence, dtype=torch.int64, device=device).unbind(0)  # type: ignore[return-value]


def gpt_3_6b() -> tuple[GPT, tuple[Tensor, Tensor]]:
    """3.6 billion parameters and the batch of the measured steps: `autopar plan --model benchmarks/gpt.py:gpt_3_6b`.

    With Megatron's fused kernels, as on several nodes. Blocks are alike: planning looks at one, and counts it 30 times.
    """
    return GPT(3072, 32, 30, 2048, 51200, fused=True), batch_of(512, 2048)


def gpt_18_4b() -> tuple[GPT, tuple[Tensor, Tensor]]:
    """18.4 billion parameters, likewise."""
    return GPT(6144, 48, 40, 2048, 51200, fused=True), batch_of(1024, 2048)
