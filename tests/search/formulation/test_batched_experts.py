"""Experts in batched products are split by the role `expert`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from autopar.compiler import plan
from autopar.errors import InfeasibleError
from autopar.search.options import Search
from autopar.verify.verify import verify
from tests.crossed import crossed
from tests.passes.canonicalize.test_experts import Capped

HIDDEN, EXPERTS = 8, 4


class Experts(nn.Module):
    """A router, weights and biases of experts, and one that all tokens share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.shared = nn.Linear(HIDDEN, EXPERTS, bias=False), nn.Linear(HIDDEN, HIDDEN)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 4) / 3)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 1, 4) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 4, HIDDEN) / 2)

    def made(self, rows: Tensor) -> Tensor:
        return torch.bmm(F.silu(torch.bmm(rows, self.up) + self.bias), self.down)


class Dense(Experts):
    """Each expert computes all tokens, times 0 where it was not chosen: Llama 4 in transformers."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = self.gate(tokens)
        top, chosen = scores.topk(1, -1)
        weights = torch.full_like(scores, -torch.inf).scatter(1, chosen, top).sigmoid()
        rows = (tokens.repeat(EXPERTS, 1) * weights.T.reshape(-1, 1)).view(EXPERTS, -1, HIDDEN)
        return (self.made(rows).sum(0) + self.shared(tokens)).square().mean()


class Plain(Experts):
    """All tokens by all experts, whose first product is a plain one: its columns are those of all experts."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = self.gate(tokens).softmax(-1)
        top, chosen = scores.topk(2, -1)
        weights = torch.zeros_like(scores).scatter(1, chosen, top)
        inner = F.silu(torch.einsum("th,ehi->tei", tokens, self.up) + self.bias[:, 0])
        return (torch.einsum("tei,eih,te->th", inner, self.down, weights) + self.shared(tokens)).square().mean()


class Choice(Experts):
    """Experts choose their tokens, among all of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(-1).T.topk(len(tokens) // 2, -1)
        made = self.made(tokens[chosen]) * weights[..., None]
        return (tokens.index_add(0, chosen.flatten(), made.flatten(0, 1)) + self.shared(tokens)).square().mean()


class Slots(Experts):
    """Slots are means of all tokens of a sequence (Soft MoE)."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x)
        slots = torch.einsum("gse,gsm->egm", scores.softmax(1), x)
        return (torch.einsum("egm,gse->gsm", self.made(slots), scores.softmax(2)) + self.shared(x)).square().mean()


class Gates(nn.Module):
    """Blocks of channels, each with a matrix of its own (RecurrentGemma)."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.rates = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Parameter(torch.rand(4 * HIDDEN))
        self.blocks = nn.Parameter(torch.rand(4, HIDDEN, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(x) * self.rates
        blocks = torch.bmm(x.flatten(0, 1).unflatten(1, (4, -1)).transpose(0, 1), self.blocks)
        return (blocks.transpose(0, 1).reshape(x.shape) * self.rates).square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dense": Dense, "plain": Plain, "choice": Choice, "slots": Slots, "capacity": lambda: Capped(2),
}  # fmt: skip


def batch(samples: int = 8) -> tuple[Tensor]:
    return (torch.randn(samples, 8, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64),)


def skewed(name: str) -> Any:
    """A model whose tokens all go to the first expert."""
    model: Any = MODELS[name]().double()
    model.gate.register_forward_hook(lambda gate, given, out: out + out.new_tensor([50.0, 0, 0, 0]))
    return model


@pytest.mark.some(2)
@pytest.mark.parametrize(("name", "axes"), crossed(MODELS, [{"a": 4}, {"data": 2, "expert": 2}]))
def test_experts_are_split_and_their_router_is_not(name: str, axes: dict[str, int]) -> None:
    made = MODELS[name]().double() if len(axes) > 1 else skewed(name)
    found = plan(made, batch(), cluster="h100", axes=axes, search=Search(recipe="expert"))
    placed = {parameter: str(layout[-1]) for parameter, layout in found.parameters.items()}
    of_experts = {n for n in ("up", "bias", "down") if n in placed}
    assert {n for n, p in placed.items() if p == "S(0.0)"} == of_experts
    report = verify(made, batch(), axes, plan=found)
    assert report.max_error < 1e-12
    graph = report.program.graph.graph
    products = [n.meta["val"].shape[0] for n in graph.nodes if n.target is torch.ops.aten.bmm.default]
    assert products.count(EXPERTS // axes[[*axes][-1]]) >= (2 if name == "plain" else 5)  # none computes other experts


def test_batched_experts_that_cannot_be_split() -> None:
    with pytest.raises(InfeasibleError, match=r"4 experts do not divide along axis a=8; take a smaller axis"):
        plan(Dense().double(), batch(), cluster="h100", axes={"a": 8}, search=Search(recipe="expert"))
    with pytest.raises(InfeasibleError, match=r"no experts to split along axis a=2"):
        plan(Gates().double(), batch(), cluster="h100", axes={"a": 2}, search=Search(recipe="expert"))


class Listed(nn.Module):
    """Each expert has parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.experts = nn.Linear(HIDDEN, 2), nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        mask = self.gate(x).softmax(-1)
        made = [mask[..., e, None] * expert(x) for e, expert in enumerate(self.experts)]
        return sum(made).square().mean()  # type: ignore[union-attr]


def test_experts_of_a_list_are_named() -> None:
    with pytest.raises(
        InfeasibleError, match=r"those of 'experts' are modules of a list, which .*\.py:\d+ calls.* one p"
    ):
        plan(Listed().double(), batch(), cluster="h100", axes={"a": 2}, search=Search(recipe="expert"))
