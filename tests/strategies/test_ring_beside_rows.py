"""Attention in a ring beside biases and what dropout keeps: equal values, rows that stay, and nothing gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from autopar.compiler import plan
from autopar.ir.ops import attention as ops
from autopar.ir.ops.formula import attention_rows as by_rows
from autopar.ir.ops.random import replayed
from autopar.ir.ops.sequence.send_block import send_block
from autopar.rules.oracle.sharding import check_rule
from autopar.search.options import Search
from autopar.strategies.attention import operators as rules
from autopar.verify.verify import verify

deep = pytest.mark.deep
ROWS, TOKENS, LEAST = 2, 16, torch.finfo(torch.float64).min


class Biased(nn.Module):
    """Attention with a bias that is learned or given, and maybe with dropout."""

    def __init__(self, shape: tuple[int, ...] | None = None, dropout: float = 0.0, causal: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(8, 16), nn.Linear(8, 8)
        self.bias = None if shape is None else nn.Parameter(torch.randn(shape))
        self.dropout, self.causal = dropout, causal

    def forward(self, x: Tensor, given: Tensor | None = None) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in self.qkv(x).split((8, 4, 4), -1))
        added = self.bias if given is None else given if self.bias is None else given + self.bias
        seen = F.scaled_dot_product_attention(q, k, v, added, self.dropout, self.causal, enable_gqa=True)
        loss: Tensor = self.out(seen.transpose(1, 2).flatten(2)).square().mean()
        return loss


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).double()


def hiding() -> Tensor:
    """What is added for each query and key; one query sees no key by the least number, one by infinity."""
    found = numbers(ROWS, 1, TOKENS, TOKENS)
    found[0, 0, 3], found[1, 0, 5], found[0, 0, 7, 2:] = LEAST, -torch.inf, LEAST
    found[1, 0, :, :4] = -torch.inf
    return found


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "learned": (lambda: Biased((1, 2, TOKENS, TOKENS)), dict),
    "of all heads": (lambda: Biased((TOKENS, TOKENS)), dict),
    "of keys": (lambda: Biased((2, 1, TOKENS)), dict),
    "given": (lambda: Biased(), lambda: {"given": hiding()}),
    "both": (lambda: Biased((2, TOKENS, 1)), lambda: {"given": hiding()}),
    "dropped": (lambda: Biased((2, TOKENS, TOKENS), 0.5), dict),
    "causal": (lambda: Biased(None, 0.3, True), dict),
}


def build(name: str) -> nn.Module:
    return MODELS[name][0]().double()


def batch(name: str) -> dict[str, Tensor]:
    return {"x": numbers(ROWS, TOKENS, 8), **MODELS[name][1]()}


def sends(report: Any) -> int:
    return sum(n.target is send_block for n in report.program.graph.graph.nodes)


def whole(report: Any) -> list[tuple[int, ...]]:
    """Shapes of what has all queries and all keys, but for what is drawn."""
    nodes = [
        n for n in report.program.graph.graph.nodes if isinstance(n.meta.get("val"), Tensor) and n.op != "placeholder"
    ]
    shapes = [
        tuple(n.meta["val"].shape) for n in nodes if "draw" not in str(n.args[0] if n.target is replayed else n.target)
    ]
    return [s for s in shapes if s[-2:] == (TOKENS, TOKENS)]


@pytest.mark.parametrize("name", ["learned", *(pytest.param(n, marks=deep) for n in MODELS if n != "learned")])
def test_equal_values(name: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Of random plans, and of a ring: no device has a bias, its gradient, or scores of all queries and keys."""
    model, given = build(name), batch(name)
    seeds = 4 if request.node.get_closest_marker("deep") else 1
    reports = [verify(model, given, {"a": 2, "b": 2}, plan="random", seed=seed) for seed in range(seeds)]
    assert max(max(r.max_error, r.capture_error) for r in reports) < 1e-10
    monkeypatch.setattr(rules, "blocked", lambda *_: "bhgqkde")
    asked = plan(model, given, cluster="h100", axes={"a": 4}, search=Search(roles={"a": "context"}, cache=False))
    report = verify(model, given, {"a": 4}, plan=asked)
    assert report.max_error < 1e-10
    assert sends(report) >= 3 + 3 + 4
    assert not whole(report)


def biases() -> Iterator[Tensor | None]:
    """Of all dims that may be missing, of those of keys alone, and with rows that large numbers hide."""
    generator = torch.Generator().manual_seed(2)
    for shape in ((1, 4, 4, 8), (2, 1, 1, 8), (4, 8), (1, 4, 4, 1)):
        yield torch.randn(shape, generator=generator, dtype=torch.float64)
    hidden = torch.randn(1, 2, 4, 8, generator=generator, dtype=torch.float64).repeat_interleave(2, 1)
    hidden[0, 0, 1], hidden[0, 1, 2], hidden[..., 3, :5], hidden[..., 0, 2:] = LEAST, -torch.inf, -torch.inf, LEAST
    yield hidden
    yield None


@pytest.mark.parametrize("parts", [2, pytest.param(4, marks=pytest.mark.deep)])
def test_rules(parts: int) -> None:
    """Also with what dropout keeps, and under a causal mask beside that."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 4, 4), (2, 8, 4), (2, 8, 6), (4, 4, 6))
    size = parts // 2
    q, k, v, grad = (torch.randn(2, h, n * size, w, generator=generator, dtype=torch.float64) for h, n, w in shapes)
    for i, bias in enumerate(biases()):
        if bias is not None:
            bias = bias.repeat(*(1,) * (bias.ndim - 2), *(1 if n == 1 else size for n in bias.shape[-2:]))
        drops = i % 2 == 1
        kept = torch.rand(2, 4, 4 * size, 8 * size, generator=generator) < 0.7 if drops else None
        numbers = (0.3 * drops, bias is None, 0.7)
        of_rows = (0.3 * drops, 0.7, 1.5 if drops else None, not drops)
        for forward, backward, rest in (
            (ops.attention, ops.attention_backward, numbers),
            (by_rows.attention_rows, by_rows.attention_rows_backward, of_rows),
        ):
            args = (q, k, v, bias, kept)
            saved = forward(*args, *rest)
            wanted = bias is not None
            for target, given in ((forward, (*args, *rest)), (backward, (grad, *args, *saved, *rest, wanted))):
                assert any("qk" in text for text in check_rule(target, given, {}, parts=parts, pairs=False))


def test_a_query_that_large_numbers_hide_sees_the_mean_of_all() -> None:
    """Where the formula computes it, as torch's does: its gradients, too."""
    q, k, v = (numbers(1, 1, 3, 4).requires_grad_() for _ in range(3))
    bias = torch.zeros(3, 3).double()
    bias[1] = LEAST
    bias.requires_grad_()
    found = []
    for call in (
        lambda: ops.attention(q, k, v, bias, None, 0.0, False, None)[0],
        lambda: (q @ k.mT / 2 + bias).softmax(-1) @ v,
    ):
        found.append(torch.autograd.grad(call().square().sum(), (q, k, v, bias)))
    assert all(torch.allclose(a, b) for a, b in zip(*found, strict=True))
