"""Tables that are cut to the length of the sequence do not say how it is split."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.compiler import plan, program_of
from autopar.search.options import Search
from autopar.sharding.dims import analyze
from autopar.sharding.factor_kinds import sequence_factors
from autopar.verify.verify import verify

aten = torch.ops.aten


class Tables(nn.Module):
    """Positions learned and fixed, of 16 tokens, a causal mask of as many, and a weight of three."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.learned = nn.Embedding(16, 8), nn.Parameter(torch.randn(1, 16, 8))
        self.register_buffer("ids", torch.arange(16)[None])
        self.register_buffer("seen", torch.ones(16, 16, dtype=torch.bool).tril())
        self.fixed, self.qkv = nn.Embedding(16, 8), nn.Parameter(torch.randn(24, 8))

    def forward(self, tokens: Tensor) -> Tensor:
        n = tokens.shape[1]
        x = self.embed(tokens) + self.learned[:, :n].tanh() + self.fixed(self.ids[:, :n])
        q, k, v = (nn.functional.linear(x, w) for w in (self.qkv[:8], self.qkv[8:16], self.qkv[16:]))
        scores = (q @ k.transpose(1, 2)).masked_fill(~self.seen[:n, :n], -torch.inf)
        far = torch.arange(1 - 16, 1, dtype=x.dtype)[-n:]  # as ALiBi of MPT
        loss: Tensor = ((scores + far).softmax(-1) @ v).square().mean()
        return loss


@pytest.mark.slow
def test_a_length_that_shares_a_factor_with_tables() -> None:
    model, tokens = Tables().double(), torch.randint(16, (2, 12), generator=torch.Generator().manual_seed(0))
    program = program_of(model, (tokens,))
    assert [f.size for f in sequence_factors(program, analyze(program))] == [12]
    kinds = [n.target for n in program.graph.graph.nodes]
    # Both dims of the mask, three tables, and a gradient; the weight is cut into thirds as it was.
    assert kinds.count(aten.narrow.default) == 5 and kinds.count(aten.pad.default) == 1
    assert kinds.count(aten.slice.Tensor) == kinds.count(aten.slice_backward.default) == 3
    search = Search(roles={"a": "context"})
    found = plan(model, (tokens,), cluster="h100", axes={"a": 4}, search=search)
    assert str(found.batch["0"][0]) == "S(1.0)"
    assert verify(model, (tokens,), {"a": 4}, plan=found).max_error < 1e-10
    assert verify(model, (tokens,), {"a": 2, "b": 2}, plan="random", seed=1).max_error < 1e-10
