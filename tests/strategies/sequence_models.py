"""Models that mix along the sequence: causal convolutions, running sums, shifts; and a convolutional network."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan


class Recurrence(nn.Module):
    """A causal depthwise convolution, then a gated recurrence ``h[t] = a[t] h[t - 1] + x[t]`` by running sums."""

    def __init__(self, hidden: int = 8, kernel: int = 4) -> None:
        super().__init__()
        self.norm, self.wide, self.out = nn.RMSNorm(hidden), nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.conv = nn.Conv1d(hidden, hidden, kernel, groups=hidden, padding=kernel - 1)

    def forward(self, x: Tensor) -> Tensor:
        h, gate, decay = self.wide(self.norm(x)).chunk(3, -1)
        h = F.silu(self.conv(h.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        kept = torch.cumsum(0.1 * F.logsigmoid(decay), 1)
        h = kept.exp() * torch.cumsum(h * (-kept).exp(), 1)
        made: Tensor = x + self.out(h * F.silu(gate))
        return made


class Stack(nn.Module):
    """Some of them, and a loss."""

    def __init__(self, layers: int = 1, hidden: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Recurrence(hidden) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Shifts(nn.Module):
    """A padded convolution, and tokens mixed with their neighbors; labels are shifted as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.conv, self.head = nn.Embedding(16, 8), nn.Conv1d(8, 8, 3), nn.Linear(8, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.table((tokens > 0).cumsum(1).clamp(max=15))
        x = self.conv(F.pad(x, (0, 0, 2, 0)).transpose(1, 2)).transpose(1, 2)
        x = x - torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        x = x + F.pad(x[:, 1:], (0, 0, 0, 1)) * torch.roll(x, 2, 1).tanh() + x.flip(1)
        wide = F.pad(x, (0, 0, 1, 1))  # read by three windows, whose gradients add up
        x = wide[:, :-2] * wide[:, 1:-1].tanh() + wide[:, 2:]
        before = torch.zeros_like(x)
        before[:, 2:] = x[:, :-2]
        x = x + before.tanh()
        labels = F.pad(tokens, (0, 1), value=-100)[:, 1:].contiguous()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


class Windows(nn.Module):
    """Windows that overlap: behind each position, around it, and of blocks beside each other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.taps, self.near, self.head = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(3)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        x = x + torch.einsum("nthk,kh->nth", F.pad(x, (0, 0, 3, 0)).unfold(1, 4, 1), self.taps)
        x = x + F.pad(x, (0, 0, 1, 1), value=0.5).unfold(1, 3, 1).amax(-1).sin() * self.near.sum()
        blocks = F.pad(x, (0, 0, 2, 2)).unfold(1, 6, 2)  # of two positions, with those before and behind
        weights = torch.einsum("nbqh,nbhk->nbqk", x.unfold(1, 2, 2).mT, blocks).softmax(-1)
        x = x + torch.einsum("nbqk,nbhk->nbqh", weights, blocks).flatten(1, 2)
        return x.square().mean()


class Patches(nn.Module):
    """Patches of images that overlap, and patches added up where they overlap."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.out = nn.Linear(27, 8), nn.Linear(8 * 4 * 3, 4), nn.Linear(4, 2 * 3 * 5)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        h = self.first(F.unfold(x, 3, padding=1).mT).tanh().mT.unflatten(2, (height, width))
        h = self.second(F.unfold(h, (4, 3), padding=1, stride=2).mT).tanh()
        made = F.fold(self.out(h).mT, (height, width), (3, 5), padding=(1, 2), stride=2)
        return made.square().mean()


class Pictures(nn.Module):
    """Pictures' features in the places of tokens, as multimodal models have them; rows beside others and by indices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.vision, self.head = nn.Embedding(16, 8), nn.Linear(5, 8), nn.Linear(8, 16)
        self.register_buffer("pictures", torch.randn(8, 2, 5))

    def forward(self, tokens: Tensor) -> Tensor:
        x, rows = self.table(tokens), self.vision(self.pictures)
        shown = tokens >= 10
        x = x.masked_scatter(shown.unsqueeze(-1).expand_as(x), rows)
        x[(tokens < 2) | (tokens == 2)] = rows.flatten(0, 1)[:SMALL].tanh()
        x = x.masked_scatter(x > 1, rows.sin())
        y = x.clone()
        y[:, 1:] += x[:, :-1].tanh()
        x = y + F.pad(torch.diff(x, dim=1), (0, 0, 0, 1)) + self.table.weight[tokens - 16]
        labels = tokens.masked_scatter(shown, tokens.flip(1))
        return F.cross_entropy(self.head(x.tanh()).flatten(0, 1), labels.flatten())


class Shorter(nn.Module):
    """All tokens but the last, the next ones as labels; differences, and windows without padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.heads, self.head = nn.Embedding(16, 8), nn.Linear(8, 24), nn.Linear(8, 16)
        self.near, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, tokens: Tensor) -> Tensor:
        every = self.near(self.table(tokens))
        x, labels = every[:, :-1], tokens[:, 1:]
        q, k, v = self.heads(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        loss = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())
        apart = self.near(every[:, 1:] - every[:, :-1]).tanh().square().mean()
        return loss + apart + self.near(every.unfold(1, 3, 1).amax(-1)).sin().mean()


class Residual(nn.Module):
    """A convolutional network of signals, with strides, dilation, reflections at the ends and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.first, self.second = nn.Conv1d(3, 4, 7, 2, 3), nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.near = nn.Conv1d(4, 4, 3, padding=1, bias=False, padding_mode="reflect")
        self.far = nn.Conv1d(4, 4, 3, padding=2, dilation=2)
        self.short, self.long, self.out = nn.Conv1d(4, 8, 1, 2), nn.Conv1d(4, 8, 3, 2, 1), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(self.stem(x)))
        h = F.relu(h + self.far(F.relu(self.second(self.near(h)))))
        return self.out(F.relu(self.short(h) + self.long(h)).mean(-1)).square().mean()


class Pooled(nn.Module):
    """Pooling with windows that overlap and that tile, transposed convolutions back, single rows, maxima, and what is
    over the tokens of all samples.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.out, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(16, 4)
        self.longer, self.norm = nn.ConvTranspose1d(8, 8, 4, 2, 1), nn.BatchNorm1d(8)
        self.again = nn.ConvTranspose1d(8, 8, 3, 2, 1, output_padding=1, groups=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inside(x).tanh().mT
        h = h - F.avg_pool1d(h, 3, 1, 1, count_include_pad=False)
        h = F.max_pool1d(F.avg_pool1d(h, 5, 1, 2), 3, 2, 1)
        h = self.again(F.max_pool1d(h, 2)) + F.adaptive_avg_pool1d(self.longer(h), h.shape[-1])
        h = self.out(h.mT).sin()
        some = h[:, 5] * h[:, 7:9].sum(1), (h * h[:, -1:]).sum(1)
        largest, first = h.max(1, keepdim=True)
        h = h + largest * (h.argmin(1, keepdim=True) - first).sin()
        running, places = h.detach().cummax(1)
        h = h * (running + (places - h.detach().cummin(1).indices)).cos()
        tokens = h.flatten(0, 1)
        scaled = self.norm(tokens / (1 + tokens.std(0))) * tokens.norm(dim=0).sin() - tokens.amax(0)
        h = h + scaled.unflatten(0, h.shape[:2])
        return h.square().mean() + self.head(torch.cat(some, -1)).square().mean()


class Image(nn.Module):
    """Convolutions of two dims, one of them padded more at the end, one with edges; what a U-Net has between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 4, 3, padding=1, padding_mode="replicate")
        self.depthwise = nn.Conv2d(4, 4, 5, padding=2, groups=4)
        self.down, self.out = nn.Conv2d(4, 4, 3, 2), nn.Conv2d(4, 2, 3, padding="same")
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depthwise(F.relu(self.norm(self.first(x))))
        x = self.down(F.pad(x, (0, 1, 0, 1)))
        x = F.interpolate(x, scale_factor=2) * F.interpolate(x, scale_factor=2, mode="bilinear").sin()
        return self.out(x).square().mean()


class Selective(nn.Module):
    """A state-space model whose factors depend on the sequence, read from both ends."""

    def __init__(self, hidden: int = 8, states: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.out = nn.Linear(hidden, 2 * hidden + 2 * states), nn.Linear(hidden, hidden)
        self.rates, self.states = nn.Parameter(torch.rand(hidden, states)), states

    def forward(self, x: Tensor) -> Tensor:
        h, steps, into, of = self.wide(x).split([x.shape[-1], x.shape[-1], self.states, self.states], -1)
        steps = F.softplus(steps)[..., None]
        kept, terms = (-steps * self.rates).exp(), steps * h[..., None] * into[..., None, :]
        _, there = associative_scan(_after, (kept, terms), 1, combine_mode="generic")
        back, _ = associative_scan(
            lambda left, right: _after(left[::-1], right[::-1])[::-1], (terms, kept), 1, True, "generic"
        )
        read = ((there + back) @ of[..., None]).squeeze(-1)
        loss: Tensor = self.out(read).square().mean()
        return loss


def segment_sum(logs: Tensor) -> Tensor:
    """Sums of all segments of the last dim, ``[..., to, from]``, as models of the Mamba2 family have it."""
    size = logs.shape[-1]
    logs = logs[..., None].expand(*logs.size(), size)
    logs = logs.masked_fill(~torch.ones(size, size, dtype=torch.bool).tril(-1), 0)
    return torch.cumsum(logs, -2).masked_fill(~torch.ones(size, size, dtype=torch.bool).tril(0), -torch.inf)


class Chunks(nn.Module):
    """A state-space model by chunks (T. Dao, A. Gu, "Transformers are SSMs", 2024, listing 1)."""

    def __init__(self, heads: int = 2, head: int = 4, states: int = 3, chunk: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sizes, self.chunk, hidden = (heads * head, states, states, heads), chunk, heads * head
        self.wide, self.out, self.heads = nn.Linear(hidden, sum(self.sizes)), nn.Linear(hidden, hidden), heads

    def forward(self, x: Tensor, order: str = "bhzc,bchpn->bzhpn") -> Tensor:
        h, into, of, steps = self.wide(x).split(self.sizes, -1)
        h, into, of = (t.unflatten(1, (-1, self.chunk)) for t in (h.unflatten(-1, (self.heads, -1)), into, of))
        logs = -F.softplus(steps).unflatten(1, (-1, self.chunk)).permute(0, 3, 1, 2)
        total = torch.cumsum(logs, -1)
        own = torch.einsum("bcln,bcsn,bhcls,bcshp->bclhp", of, into, torch.exp(segment_sum(logs)), h)
        states = torch.einsum("bcln,bhcl,bclhp->bchpn", into, torch.exp(total[..., -1:] - total), h)
        states = torch.cat([torch.zeros_like(states[:, :1]), states], 1)
        kept = torch.exp(segment_sum(F.pad(total[..., -1], (1, 0))))
        kept = kept if order.startswith("bhzc") else kept.transpose(1, 3)
        states = torch.einsum(order, kept, states)[:, :-1]
        of_states = torch.einsum("bcln,bchpn,bhcl->bclhp", of, states, torch.exp(total))
        loss: Tensor = self.out((own + of_states).flatten(1, 2).flatten(2)).square().mean()
        return loss


def _after(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return left[0] * right[0], right[0] * left[1] + right[1]


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


_TOKENS = torch.randint(16, (2, 16), generator=torch.Generator().manual_seed(1))
SMALL = int((_TOKENS <= 2).sum())

MODELS: dict[str, tuple[type[nn.Module], Tensor]] = {
    "recurrence": (Stack, _drawn(2, 16, 8)),
    "shifts": (Shifts, _TOKENS),
    "windows": (Windows, _drawn(2, 16, 8)),
    "pictures": (Pictures, _TOKENS),
    "shorter": (Shorter, _TOKENS),
    "selective": (Selective, _drawn(2, 16, 8)),
    "chunks": (Chunks, _drawn(2, 32, 8)),
    "residual": (Residual, _drawn(2, 3, 32)),
    "pooled": (Pooled, _drawn(2, 64, 8)),
    "patches": (Patches, _drawn(2, 3, 16, 8)),
    "image": (Image, _drawn(2, 3, 16, 8)),
}
"""A class and a batch, by name."""
