"""Causal attention of some of the queries in blocks that balance: equal values, and only where it is worth it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.compiler import plan, program_of, rewrite
from autopar.ir.ops import attention as ops
from autopar.ir.ops.balanced_attention import owner, swap_blocks, swapped
from autopar.rules.oracle.sharding import check_rule
from autopar.search.options import Search
from autopar.strategies.attention import operators as rules
from autopar.verify.verify import verify
from tests.crossed import seeds
from tests.strategies.samples import all_samples


class Causal(nn.Module):
    """Fewer heads of keys than of queries, and of another size."""

    def __init__(self, head: int = 4, wide: int = 6, heads: int = 4, shared: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = (heads, heads // shared, heads // shared)
        self.q, self.k, self.v = (nn.Linear(8, n * s) for n, s in zip(self.heads, (head, head, wide), strict=True))
        self.out = nn.Linear(heads * wide, 8)

    def forward(self, x: Tensor) -> Tensor:
        made = zip((self.q, self.k, self.v), self.heads, strict=True)
        q, k, v = (f(x).unflatten(-1, (h, -1)).transpose(1, 2) for f, h in made)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.7, enable_gqa=True)
        loss: Tensor = self.out(seen.transpose(1, 2).flatten(2)).square().mean()
        return loss


def batch(length: int = 48) -> tuple[Tensor]:
    return (torch.randn(2, length, 8, generator=torch.Generator().manual_seed(1)).double(),)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "WORTH_BLOCKS", 0)


@pytest.mark.some(10)
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    "sample", [s for s in all_samples() if s.target in (ops.attention, ops.attention_backward)], ids=str
)
def test_rules(sample: Any) -> None:
    check_rule(sample.target, sample.args, sample.kwargs)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    "axes",
    [
        pytest.param({"a": 3}, marks=pytest.mark.deep),
        {"a": 2, "b": 2},
        *(pytest.param({"a": n}, marks=pytest.mark.deep) for n in (2, 8)),
    ],
)
def test_equal_values(axes: dict[str, int]) -> None:
    model, x = Causal().double(), batch()
    roles = {a: "context" if a == "a" else "tensor" for a in axes}
    in_context = plan(model, x, cluster="h100", axes=axes, search=Search(roles=roles))
    counts = []
    for seed, chosen in enumerate((in_context, *["random"] * len(seeds(4)))):
        report = verify(model, x, axes, plan=chosen, seed=seed)
        assert report.max_error < 1e-10
        counts.append(sum(n.target is swap_blocks for n in report.program.graph.graph.nodes))
    assert any(counts)


@pytest.mark.usefixtures("always")
def test_nothing_that_is_hidden_is_computed() -> None:
    """Of scores, every device computes as many, and with blocks half of them, but for what is on the diagonal."""
    model, x, axes = Causal(4, 4).double(), batch(64), {"a": 4}
    program = program_of(model, x)
    for seed in range(12):
        chosen = plan(model, x, cluster="h100", axes=axes, search=Search(recipe="random", seed=seed))
        local = rewrite(program, chosen).graph.graph
        calls = [n for n in local.nodes if n.target is ops.attention]
        if len(calls) == 1 or any("qk.0" in names for names in chosen.choices.values()):
            continue
        pairs = 0.0
        for call in calls:
            query, key = (call.args[i].meta["val"].shape for i in (0, 1))
            pairs += query[0] * query[1] * query[2] * key[2] / (2 if call.args[6] else 1)
        assert len(calls) == 3
        assert pairs == 2 * 4 * 64 * 64 / 2 / 4
        return
    raise AssertionError("no random plan splits the queries")


@pytest.mark.slow
def test_few_tokens_are_masked() -> None:
    """Blocks take three calls and a hundred small kernels: that is for long sequences."""
    axes = {"a": 2}
    for seed in (3, 4):
        report = verify(Causal().double(), batch(), axes, plan="random", seed=seed)
        assert not any("qk.0" in names for names in report.plan.choices.values())
        assert not any(n.target is swap_blocks for n in report.program.graph.graph.nodes)


@given(st.integers(1, 6))
def test_blocks_come_back(parts: int) -> None:
    blocks = [torch.tensor([2 * r, 2 * r + 1]) for r in range(parts)]
    away = swapped(blocks, False)
    assert [t.tolist() for t in away] == [[r, 2 * parts - 1 - r] for r in range(parts)]
    assert all(owner(int(m), parts) == r for r, t in enumerate(away) for m in t)
    assert [t.tolist() for t in swapped(away, True)] == [t.tolist() for t in blocks]
