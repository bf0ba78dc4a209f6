"""Small models drawn at random: chains and branches of the layers that real models are made of."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import strategies as st
from torch import Tensor, nn

HIDDEN = 8
SEQ = 4
BATCH = 4
VOCAB = 16


class Residual(nn.Module):
    """``x + f(x)``: one factor twice in the weights of ``f``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Branch(nn.Module):
    """``f(x) * sigmoid(g(x))``: a value with several users."""

    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) * torch.sigmoid(self.right(x))


class Fold(nn.Module):
    """A view that mixes dims, and its way back: ``[b, s, h] -> [b * s, h] -> ... -> [b, s, h]``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        return self.inner(x.reshape(b * s, h)).reshape(b, s, h)


class Attention(nn.Module):
    """Self-attention with a fused projection; written out, or torch's own."""

    def __init__(self, heads: int, fused: bool, causal: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.heads, self.fused, self.causal = heads, fused, causal

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = (t.reshape(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            scores = q @ k.transpose(-1, -2) / (h // self.heads) ** 0.5
            if self.causal:
                scores = scores.masked_fill(~torch.ones(s, s, dtype=torch.bool).tril(), float("-inf"))
            y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, s, h))


class Image(nn.Module):
    """The sequence as a picture: a group norm and a convolution behind a permutation, or its copy."""

    def __init__(self, groups: int, copied: bool) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, HIDDEN)
        self.conv = nn.Conv2d(HIDDEN, HIDDEN, 3, padding=1)
        self.copied = copied

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        picture = x.reshape(b, 2, s // 2, h).permute(0, 3, 1, 2)
        picture = picture.contiguous() if self.copied else picture
        return self.conv(F.silu(self.norm(picture))).permute(0, 2, 3, 1).reshape(b, s, h)


class Channels(nn.Module):
    """Fused attention whose projection is a convolution: the elements of a head are not next to each other."""

    def __init__(self, heads: int, copied: bool, causal: bool) -> None:
        super().__init__()
        self.qkv = nn.Conv1d(HIDDEN, 3 * HIDDEN, 1)
        self.heads, self.copied, self.causal = heads, copied, causal

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        qkv = self.qkv(x.transpose(1, 2)).reshape(b, 3, self.heads, h // self.heads, s).transpose(-1, -2)
        q, k, v = (qkv.contiguous() if self.copied else qkv).unbind(1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).reshape(b, s, h)


class Turned(nn.Module):
    """A layer on the sequence in front of the batch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(0, 1)).transpose(0, 1)


class LayerMix(nn.Module):
    """A linear layer along the sequence: ``[b, s, h] -> [b, h, s] -> ... -> [b, s, h]``."""

    def __init__(self) -> None:
        super().__init__()
        # No bias: a softmax or norm behind it would make its gradient zero but for rounding.
        self.linear = nn.Linear(SEQ, SEQ, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.transpose(1, 2)).transpose(1, 2)


class Scale(nn.Module):
    """A parameter that is broadcast, and a statistic over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        # Half of the mean: all of it would make gradients above this layer zero but for rounding.
        return (x - 0.5 * x.mean(dim=0, keepdim=True)) * self.weight


class RandomModel(nn.Module):
    """Embedding or projection, a body, a head, and a loss."""

    def __init__(self, body: list[nn.Module], tokens: bool, tied: bool, loss: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN) if tokens else nn.Linear(HIDDEN, HIDDEN)
        self.body = nn.ModuleList(body)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied and tokens:
            self.head.weight = self.embed.weight
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.body:
            x = layer(x)
        logits = self.head(x)
        if self.loss == "cross_entropy":
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return (logits.softmax(-1) ** 2).sum(-1).mean() + logits.logsumexp(-1).mean() * 0.1


@st.composite
def models(draw: st.DrawFn) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model in float64 and a batch for it."""
    torch.manual_seed(draw(st.integers(0, 3)))
    pointwise = st.sampled_from([nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU]).map(lambda make: make())
    plain = st.one_of(
        pointwise,
        st.just(None).map(lambda _: nn.Linear(HIDDEN, HIDDEN)),
        st.just(None).map(
            lambda _: nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.ReLU(), nn.Linear(4 * HIDDEN, HIDDEN))
        ),
        st.just(None).map(lambda _: nn.LayerNorm(HIDDEN)),
        st.just(None).map(lambda _: nn.Softmax(-1)),
        st.just(None).map(lambda _: Scale()),
    )
    attention = st.builds(Attention, st.sampled_from([1, 2, 4]), st.booleans(), st.booleans())
    mixing = st.just(None).map(lambda _: LayerMix())
    strided = st.one_of(
        st.builds(Image, st.sampled_from([1, 2, 4]), st.booleans()),
        st.builds(Channels, st.sampled_from([1, 2, 4]), st.booleans(), st.booleans()),
        st.just(None).map(lambda _: Turned(nn.LayerNorm(HIDDEN))),
    )
    layer = st.one_of(
        plain,
        attention,
        mixing,
        strided,
        plain.map(Residual),
        attention.map(Residual),
        strided.map(Residual),
        plain.map(Fold),
        st.builds(Branch, plain, plain),
    )
    body = draw(st.lists(layer, min_size=1, max_size=3))
    tokens = draw(st.booleans())
    model = RandomModel(body, tokens, draw(st.booleans()), draw(st.sampled_from(["cross_entropy", "other"])))
    x = torch.randint(0, VOCAB, (BATCH, SEQ)) if tokens else torch.randn(BATCH, SEQ, HIDDEN, dtype=torch.float64)
    labels = torch.randint(0, VOCAB, (BATCH, SEQ))
    if draw(st.booleans()):
        labels[0, : draw(st.integers(1, SEQ))] = -100  # ignored labels, spread unevenly over shards
    return model.double(), (x, labels)
