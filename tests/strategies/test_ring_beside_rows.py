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
from autopar.ir.ops.sequence.send_block import send_block
from autopar.rules.oracle.sharding import check_rule
from autopar.search.options import Search
from autopar.strategies import attention as rules
from autopar.verify.verify import verify

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
    """What is added for each query and key; of one query all keys are hidden by the least number, of one by infinity."""
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


@pytest.mark.parametrize("name", MODELS)
def test_equal_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = build(name), batch(name)
    found = 0
    for seed in range(4):
        report = verify(model, given, {"a": 2, "b": 2}, plan="random", seed=seed)
        print(name, seed, report.max_error, report.capture_error, sends(report))
        found += sends(report)
    monkeypatch.setattr(rules, "_blocked", lambda *_: "bhgqkde")
    asked = plan(model, given, cluster="h100", axes={"a": 4}, search=Search(roles={"a": "context"}, cache=False))
    report = verify(model, given, {"a": 4}, plan=asked)
    print(name, report.max_error, report.capture_error, sends(report))
    nodes = report.program.graph.graph.nodes
    print([tuple(n.meta["val"].shape) for n in nodes if isinstance(n.meta.get("val"), Tensor) and n.meta["val"].ndim==4 and n.meta["val"].shape[2:].numel() >= 256])
