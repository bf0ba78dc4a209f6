"""look_up_by_group: matrices that are looked up for each pair of a token and an expert are multiplied by groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from autopar.compiler import plan, program_of
from autopar.ir.ops import routing
from autopar.ir.ops.exchange import exchange_rows
from autopar.search.options import Search
from autopar.verify.verify import verify

HIDDEN, EXPERTS, INNER = 8, 4, 6
AXES = {"a": 2, "b": 2}


class Experts(nn.Module):
    """A router, and weights of experts as one parameter each; ``first``: all tokens go to the first two experts."""

    def __init__(self, first: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN) / 3)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * INNER) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN) / 2)
        self.first = first

    def routed(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        scores = self.gate(x)
        if self.first:
            scores = scores + scores.new_tensor([50.0, 40.0, 0.0, 0.0])
        top: tuple[Tensor, Tensor] = scores.softmax(-1).topk(k, -1)
        return top

    def made(self, rows: Tensor, ids: Tensor) -> Tensor:
        """As transformers does: a matrix times a vector, and a vector times a matrix."""
        h = torch.bmm(self.up[ids], rows.unsqueeze(-1)).squeeze(-1) + self.bias[ids]
        gate, up = h.chunk(2, -1)
        return torch.bmm((F.silu(gate) * up).unsqueeze(1), self.down[ids]).squeeze(1)


class Pairs(Experts):
    """Tokens are repeated for their pairs, which are added up behind."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = F.layer_norm(x, (HIDDEN,)).flatten(0, 1) * 1.5
        top, ids = self.routed(tokens, 2)
        made = self.made(tokens.repeat_interleave(2, 0), ids.flatten()) * top.reshape(-1, 1)
        return (x.flatten(0, 1) + made.view(-1, 2, HIDDEN).sum(1)).square().mean()


class Single(Experts):
    """One expert a token, in a network that goes on with the tokens in a row."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1).tanh()
        scores = self.gate(tokens).softmax(-1)
        ids = scores.argmax(-1)
        y = tokens + self.made(tokens, ids) * scores.gather(1, ids[:, None])
        return (F.layer_norm(y, (HIDDEN,)) * tokens).square().mean()


class Einsum(Experts):
    """Experts of a token are a dim of their own, and one product adds up what they make."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        top, ids = self.routed(tokens, 2)
        h = torch.einsum("tkh,tkih->tki", tokens[:, None].expand(-1, 2, -1), self.up[ids]) + self.bias[ids]
        made = torch.einsum("tki,tkih->tkh", F.relu(h[..., :INNER]), self.down[ids])
        return (tokens + torch.einsum("tkh,tk->th", made, top)).square().mean()


class Numbered(Experts):
    """Experts are what a table of the tokens says, some counted from the end."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        ids = (tokens[:, 0] > 0).long() * 2 - 1 + (tokens[:, 1] > 0).long()  # -1 to 2
        return (tokens + self.made(tokens, ids) * self.gate(tokens)[:, :1]).square().mean()


class Twice(Experts):
    """The same token's two experts, of which one is looked up after the other has been multiplied."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        top, ids = self.routed(tokens, 2)
        y = sum(self.made(tokens, ids[:, j]) * top[:, j, None] for j in range(2))
        return (tokens + y).square().mean()


GROUPED: dict[str, Callable[[], nn.Module]] = {
    "pairs": Pairs, "first": lambda: Pairs(True), "single": Single, "einsum": Einsum, "numbered": Numbered,
    "twice": Twice,
}  # fmt: skip


class Normed(Experts):
    """Something else is computed of each matrix."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weight = F.normalize(self.down[self.routed(tokens, 1)[1][:, 0]], dim=1)
        return (torch.bmm(tokens[:, None, :INNER], weight)).square().mean()


class Samples(Experts):
    """An expert for each sample: rows have more than one vector."""

    def forward(self, x: Tensor) -> Tensor:
        ids = self.gate(x.mean(1)).argmax(-1)
        return torch.bmm(torch.bmm(x, self.up[ids].mT)[..., :INNER], self.down[ids]).square().mean()


class Running(Experts):
    """A row's place says what it is added to."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        top, ids = self.routed(tokens, 1)
        return self.made(tokens, ids[:, 0]).cumsum(0).square().mean() + top.mean()


KEPT: dict[str, Callable[[], nn.Module]] = {"normed": Normed, "samples": Samples}


def batch(samples: int = 8) -> tuple[Tensor]:
    return (torch.randn(samples, 4, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64),)


def targets(model: nn.Module, given: Any = None) -> list[Any]:
    return [n.target for n in program_of(model, given or batch()).graph.graph.nodes]


@pytest.mark.parametrize("name", GROUPED)
def test_matrices_are_not_looked_up(name: str) -> None:
    found = targets(GROUPED[name]().double())
    sorts = 2 if name == "twice" else 1
    assert found.count(routing.sort_by_expert) == sorts
    # Tokens have no gradient.
    assert found.count(routing.multiply_by_expert) == sorts * 3
    assert found.count(routing.outer_by_expert) == sorts * 2
    program = program_of(GROUPED[name]().double(), batch())
    tables = [n for n in program.graph.graph.nodes if n.target is torch.ops.aten.index.Tensor]
    assert all(n.args[0].meta["val"].ndim < 3 for n in tables)


@pytest.mark.parametrize("name", KEPT)
def test_others_stay(name: str) -> None:
    assert routing.sort_by_expert not in targets(KEPT[name]().double())
    assert verify(KEPT[name]().double(), batch(), AXES, plan="random").max_error < 1e-12


@pytest.mark.some(2)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", [*GROUPED, "running"])
def test_random_plans(name: str, seed: int) -> None:
    model = Running() if name == "running" else GROUPED[name]()
    assert verify(model.double(), batch(), AXES, plan="random", seed=seed).max_error < 1e-12


@pytest.mark.some(2)
@pytest.mark.slow
@pytest.mark.parametrize("pins", [{}, {"microbatches": 2, "recompute": "search"}])
@pytest.mark.parametrize("name", GROUPED)
def test_tokens_go_to_their_experts(name: str, pins: dict[str, Any]) -> None:
    """No device has, gathers or multiplies another one's experts."""
    model = GROUPED[name]().double()
    found = plan(model, batch(), cluster="h100", axes={"a": 4}, search=Search(recipe="expert", pins=pins))
    split = {name for name, layout in found.parameters.items() if str(layout[0]) == "S(0.0)"}
    assert split >= {"up", "down"}
    report = verify(model, batch(), {"a": 4}, plan=found)
    assert report.max_error < 1e-12
    nodes = report.program.graph.graph.nodes
    assert exchange_rows in {n.target for n in nodes}
    weights = {tuple(p.shape) for n, p in model.named_parameters() if n in split and p.ndim == 3}
    given = [n.meta.get("val") for n in nodes]
    values = [v for made in given for v in (made if isinstance(made, tuple | list) else [made])]
    assert not weights & {tuple(v.shape) for v in values if isinstance(v, Tensor)}


def test_indices_out_of_range_are_an_error() -> None:
    """As in eager mode, not rows of another expert."""

    class Wrong(Experts):
        def forward(self, x: Tensor) -> Tensor:
            tokens = x.flatten(0, 1)
            return self.made(tokens, (tokens[:, 0] > 0).long() * EXPERTS).square().mean()

    model = Wrong().double()
    with pytest.raises(IndexError):
        model(*batch())
    assert routing.sort_by_expert in targets(model)
    found = plan(model, batch(), cluster="h100", axes={"a": 2}, search=Search(recipe="ddp"))
    with pytest.raises(Exception, match=r"out of (bounds|range)"):
        verify(model, batch(), {"a": 2}, plan=found)


@pytest.mark.slow
def test_half_precision() -> None:
    class Rounded(Pairs):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    given = (batch()[0].float(),)
    assert targets(Rounded(), given).count(routing.multiply_by_expert) == 3
    found = plan(Rounded(), given, cluster="h100", axes={"a": 2}, search=Search(recipe="expert"))
    assert verify(Rounded(), given, {"a": 2}, plan=found, dtype=torch.float32).max_error < 0.05


def test_without_a_backward_pass() -> None:
    with torch.no_grad():
        assert targets(Pairs().double()).count(routing.multiply_by_expert) == 2
        assert verify(Pairs().double(), batch(), AXES, plan="random").max_error < 1e-12
