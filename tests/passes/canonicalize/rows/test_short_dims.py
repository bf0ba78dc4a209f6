"""Dims that a slice makes a little shorter keep their length: padding rows are in no result and no gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from autopar.compiler import plan, program_of
from autopar.ir.graph import values_of
from autopar.ir.node_info import info
from autopar.search.options import Search
from autopar.verify.verify import verify
from tests.crossed import crossed

HIDDEN, VOCABULARY = 8, 12


class Tokens(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.table, self.first, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(8, 8), nn.Linear(8, VOCABULARY)
        self.norm, self.heads, self.pair = nn.LayerNorm(HIDDEN), nn.Linear(8, 24), nn.Linear(16, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.function(self, tokens, self.first(self.table(tokens)))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=1)


def attend(model: Tokens, x: Tensor, is_causal: bool) -> Tensor:
    q, k, v = model.heads(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2).flatten(2)


def losses(model: Tokens, tokens: Tensor, x: Tensor) -> Tensor:
    """Before the head and behind it, and of two tokens on."""
    h = model.norm(x.tanh())
    found = cross_entropy(model.head(model.norm(h[:, :-1])), tokens[:, 1:])
    return found + cross_entropy(model.head(h)[:, :-2], tokens[:, 2:])


def log_probabilities(model: Tokens, tokens: Tensor, x: Tensor) -> Tensor:
    found = model.head(x).log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
    kept = tokens[:, 1:] > 2
    return -(found * kept).sum() / kept.sum()


def neighbors(model: Tokens, tokens: Tensor, x: Tensor) -> Tensor:
    pairs = model.pair(torch.cat([x[:, :-1], x[:, 1:]], -1)).tanh()
    apart = model.norm(torch.diff(x, dim=1) + model.table(tokens)[:, 1:])
    return F.mse_loss(pairs, x[:, 1:].detach()) + F.cosine_similarity(pairs, apart, dim=-1).mean()


def put_back(model: Tokens, tokens: Tensor, x: Tensor) -> Tensor:
    y = torch.cat([x[:, :1], model.first(x[:, 1:]) - x[:, :-1]], 1)
    y = y * F.pad(model.norm(x[:, :-1]), (0, 0, 1, 0), value=0.5)
    return y.square().mean() + model.first(x[:, 1:])[:, 3].sin().sum()


def windows(model: Tokens, tokens: Tensor, x: Tensor) -> Tensor:
    return model.first(x.unfold(1, 3, 1).amax(-1)).square().mean() + x.unfold(1, 2, 1).prod(-1).tanh().sum()


def along_rows(model: Tokens, tokens: Tensor, x: Tensor) -> Tensor:
    apart = x[:, 1:] - 2 * x[:, :-1]
    pooled = (model.first(apart).softmax(1) * apart).sum(1) + apart.amax(1).sin() + apart.amin(1)
    return pooled.square().mean() + apart.cumsum(1).tanh().mean()


def nothing_of_padding(model: Tokens, tokens: Tensor, x: Tensor) -> Tensor:
    """Logarithms of zeros and quotients by them, in the rows that shifts leave empty, and their gradients."""
    scale = x[:, 1:].abs()
    y = scale.log() * x[:, :-1] / scale.sum(-1, keepdim=True)
    return model.norm(model.first(y)).tanh().square().mean() + model.head(y).logsumexp(-1).mean()


def of_inputs(model: Tokens, tokens: Tensor, x: Tensor) -> Tensor:
    """All of a model on all tokens but the last; positions, and a mask, that it makes of their number."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    at = torch.arange(inputs.shape[1])
    x = model.table(inputs) + (at / 7).sin()[:, None]
    x = x + model.first(attend(model, model.norm(x), True))
    near = ((at[:, None] >= at) & (at[:, None] - at < 5))[None, None]
    q, k, v = model.heads(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=near).transpose(1, 2).flatten(2)
    return cross_entropy(model.head(model.norm(x)), labels)


def attention(model: Tokens, tokens: Tensor, x: Tensor) -> Tensor:
    h = attend(model, x[:, 1:], False)
    return cross_entropy(model.head(h + attend(model, x[:, :-1], True))[:, 1:], tokens[:, 2:])


def whole(model: Tokens, tokens: Tensor, x: Tensor) -> Tensor:
    """Sorted rows, and results that stay shorter: as they were."""
    apart = x[:, 1:] - x[:, :-1]
    return model.first(apart).sort(1)[0].cumprod(1).sum() + apart.std(1).mean()


SPLIT = [losses, log_probabilities, neighbors, put_back, windows, along_rows, nothing_of_padding]
ATTEND = [of_inputs, attention]


def tokens_of(samples: int, length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(length))


# Two samples of 18 tokens on axes of 4: the sequence is not split, nor may it be wrong.
BATCHES: list[tuple[int, dict[str, int], tuple[int, int]]] = [
    (0, {"a": 4}, (1, 16)), (1, {"a": 2, "b": 2}, (3, 20)), (2, {"a": 4}, (2, 18)),
]  # fmt: skip


@pytest.mark.some(2)
@pytest.mark.parametrize(("function", "case"), crossed([*SPLIT, *ATTEND, whole], BATCHES))
def test_values(
    function: Callable[[Any, Tensor, Tensor], Tensor], case: tuple[int, dict[str, int], tuple[int, int]]
) -> None:
    seed, axes, size = case
    report = verify(Tokens(function).double(), (tokens_of(*size),), axes, plan="random", seed=seed)
    assert report.max_error < 1e-10, (axes, size)


@pytest.mark.some(2)
@pytest.mark.parametrize("function", [*SPLIT, *ATTEND])
def test_the_sequence_is_split(function: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
    axes, batch, model = {"a": 4}, (tokens_of(1, 32),), Tokens(function).double()
    made = plan(model, batch, cluster="h100", axes=axes, search=Search(roles={"a": "context"}))
    report = verify(model, batch, axes, plan=made)
    assert report.max_error < 1e-10
    moves = [(k.kind, n) for n in report.program.graph.graph.nodes if (k := info(n).collective) is not None]
    assert any(kind == "send" for kind, _ in moves)
    sizes = {(kind, size) for kind, n in moves for v in values_of(n) if v is not None for size in v.shape}
    # Keys and values are gathered.
    assert ("all_gather", 32) not in sizes or function in ATTEND
    assert not any(size in (29, 30, 31) for _, size in sizes)


@pytest.mark.parametrize(("length", "dims"), [(16, {16}), (17, {16, 17})])
def test_tokens_and_one_more_are_cut(length: int, dims: set[int]) -> None:
    """What a slice leaves may divide, and then what was before does not."""
    nodes = program_of(Tokens(of_inputs), (tokens_of(1, length),)).graph.graph.nodes
    made = [n for n in nodes if isinstance(n.meta.get("val"), Tensor) and n.target is not torch.ops.aten.arange.default]
    assert {size for n in made for size in n.meta["val"].shape if size > 12} - {24} == dims


def test_rows_and_channels_of_one_tensor_get_shorter() -> None:
    """Both are the longer tensor with another dim padded, which was taken for padded in both."""

    def integrals(model: Tokens, tokens: Tensor, x: Tensor) -> Tensor:
        places = model.norm.weight.cumsum(0)
        return torch.trapezoid(x, places).square().mean() + torch.cumulative_trapezoid(x, dim=1).square().mean()

    report = verify(Tokens(integrals), (tokens_of(2, 16),), {"a": 2, "b": 2}, plan="random")
    assert report.max_error < 1e-10


def test_results_are_in_the_memory_in_which_they_were() -> None:
    def function(model: Tokens, tokens: Tensor, x: Tensor) -> Any:
        return cross_entropy(model.head(x[:, :-1]), tokens[:, 1:]), x, x[:, 1:], tokens[:, 1:]

    model, batch = Tokens(function), (tokens_of(1, 16),)
    program = program_of(model, batch, loss="0")
    values = {o.name: v for o, v in program.results}
    assert values["2"].target is torch.ops.aten.slice.Tensor and values["2"].args[0] is values["1"]
    assert values["3"].target is torch.ops.aten.slice.Tensor and values["3"].args[0] in program.placeholders
