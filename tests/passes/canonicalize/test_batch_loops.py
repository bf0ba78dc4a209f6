"""batch_loops: which loops over a parameter's matrices become batched products, and what stays as it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.compiler import plan, program_of
from autopar.search.options import Search
from autopar.verify.verify import verify

HIDDEN, EXPERTS, INNER = 8, 4, 6
AXES = {"a": 2, "b": 2}
aten = torch.ops.aten


class Experts(nn.Module):
    """A router, and weights of experts as one parameter each."""

    def __init__(self, columns: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, columns * INNER) / 3)
        self.bias = nn.Parameter(torch.randn(EXPERTS, columns * INNER) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN) / 2)

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.gate(x).softmax(-1)
        return scores, *scores.topk(2, -1)

    def mask(self, x: Tensor) -> Tensor:
        scores, top, chosen = self.routed(x)
        return torch.zeros_like(scores).scatter(-1, chosen, top)

    def of(self, e: int, x: Tensor) -> Tensor:
        return F.silu(x @ self.up[e] + self.bias[e]) @ self.down[e]


class Masked(Experts):
    def forward(self, x: Tensor) -> Tensor:
        tokens, mask = x.flatten(0, 1), self.mask(x.flatten(0, 1))
        y = torch.zeros_like(tokens)
        for e in range(EXPERTS):
            y = y + mask[:, e, None] * self.of(e, tokens)
        return (tokens + y).square().mean()


class Compared(Experts):
    """Whose weights are those of tokens whose experts are compared with a number."""

    def forward(self, x: Tensor) -> Tensor:
        _, top, chosen = self.routed(x)
        parts = [self.of(e, x) * torch.where(chosen == e, top, 0.0).sum(-1, keepdim=True) for e in range(EXPERTS)]
        return (x + sum(parts)).square().mean()


class Iterated(Experts):
    """Parameters are iterated over, and results stacked."""

    def forward(self, x: Tensor) -> Tensor:
        scores, top, chosen = self.routed(x)
        hot = F.one_hot(chosen, EXPERTS).to(x.dtype)
        made = [F.relu(F.linear(x, u.T, b)) @ d for u, b, d in zip(self.up, self.bias, self.down, strict=True)]
        y = (torch.stack(made, -2) * (hot * top[..., None]).sum(-2)[..., None]).sum(-2)
        return (x + y).square().mean() + (hot.mean((1, 2)) * scores.mean(1)).mean()


class Gated(Experts):
    """Halves of columns, tokens added up in place, and a counter of each expert's tokens, which is no product."""

    def __init__(self) -> None:
        super().__init__(2)
        self.norm, self.load = nn.LayerNorm(HIDDEN), nn.Buffer(torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        _, top, chosen = self.routed(tokens)
        hot, y = F.one_hot(chosen, EXPERTS).permute(2, 0, 1), torch.zeros_like(tokens)
        for e in range(EXPERTS):
            with torch.no_grad():
                self.load[e] += hot[e].sum()
            gate, up = F.linear(tokens, self.up[e].T, self.bias[e]).chunk(2, -1)
            y += ((F.silu(gate) * up) @ self.down[e]) * (top * hot[e]).sum(-1, keepdim=True)
        return (x.flatten(0, 1) + y).square().mean()


class Joined(Experts):
    """Two products of a token, parts of one expert by slices, and results side by side."""

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask(x)
        made = []
        for e in range(EXPERTS):
            h = torch.tanh(x @ self.up[e : e + 1].squeeze(0)) * torch.sigmoid(x @ self.up[e] + self.bias[e])
            made.append(h @ self.down[e])
        y = torch.cat(made, -1).unflatten(-1, (EXPERTS, HIDDEN))
        return (x + (y * mask[..., None]).sum(-2)).square().mean()


class Heads(Experts):
    """Each with a product of batches of its own."""

    def forward(self, x: Tensor) -> Tensor:
        made = []
        for e in range(EXPERTS):
            q, k = (x @ self.up[e] + self.bias[e]), (x @ self.up[e])
            made.append((q @ k.mT).sigmoid() @ (x @ self.down[e].T))
        return torch.cat(made, -1).square().mean()


class Layers(nn.Module):
    """Two layers, each of which is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Masked(), Compared()])

    def forward(self, x: Tensor) -> Any:
        return sum(checkpoint(layer, x, use_reentrant=False) for layer in self.layers)


class Chained(Experts):
    """A second loop reads what the first one has added up, as it is, and a third one rows of results."""

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask(x)
        y = sum(mask[..., e, None] * self.of(e, x) for e in range(EXPERTS))
        z = sum(mask[..., e, None] * self.of(e, y) for e in range(EXPERTS))
        rows = torch.stack([self.of(e, z) for e in range(EXPERTS)])
        return sum((rows @ self.up[e] + self.bias[e]).square().mean() for e in range(EXPERTS))


class Rounded(Experts):
    """Terms of half the precision are added up in full; all tokens go to the same two experts."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x) + x.new_tensor([0.0, 60.0, 50.0, 0.0])
        top, chosen = scores.softmax(-1).topk(2, -1)
        mask, y = torch.zeros_like(scores).scatter(-1, chosen, top), torch.zeros_like(x)
        for e in range(EXPERTS):
            with torch.autocast("cpu", torch.bfloat16):
                made = self.of(e, x)
            y += mask[..., e, None] * made
        return (x + y).square().mean()


BATCHED: dict[str, Callable[[], nn.Module]] = {
    "masked": Masked, "compared": Compared, "iterated": Iterated, "gated": Gated, "joined": Joined, "heads": Heads,
    "layers": Layers, "chained": Chained,
}  # fmt: skip


class Deep(Experts):
    """What comes next reads what was made before."""

    def forward(self, x: Tensor) -> Tensor:
        for e in range(EXPERTS):
            x = x + self.of(e, x)
        return x.square().mean()


class Fewer(Experts):
    """The first one has no tokens."""

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask(x)
        return sum(mask[..., e, None] * self.of(e, x) for e in range(1, EXPERTS)).square().mean()


class Odd(Experts):
    """One of them is another function."""

    def forward(self, x: Tensor) -> Tensor:
        mask, y = self.mask(x), torch.zeros_like(x)
        for e in range(EXPERTS):
            h = x @ self.up[e]
            y = y + mask[..., e, None] * ((h.tanh() if e == 2 else h.sigmoid()) @ self.down[e])
        return y.square().mean()


class Dropped(Experts):
    """Each draws numbers of its own."""

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask(x)
        return sum(mask[..., e, None] * F.dropout(self.of(e, x), 0.5) for e in range(EXPERTS)).square().mean()


class One(Experts):
    """What one of them makes is read beside."""

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask(x)
        made = [self.of(e, x) for e in range(EXPERTS)]
        return sum(mask[..., e, None] * made[e] for e in range(EXPERTS)).square().mean() + made[2].mean()


class Shuffled(Experts):
    """Results side by side are in another order."""

    def forward(self, x: Tensor) -> Tensor:
        made = torch.cat([self.of(e, x) for e in (0, 2, 1, 3)], -1)
        return (made * torch.arange(EXPERTS * HIDDEN)).square().mean()


class Apart(Experts):
    """Each is checkpointed: only one has its activations at a time."""

    def forward(self, x: Tensor) -> Tensor:
        mask, y = self.mask(x), torch.zeros_like(x)
        for e in range(EXPERTS):
            y = y + mask[..., e, None] * checkpoint(self.of, e, x, use_reentrant=False)
        return y.square().mean()


class Projections(nn.Module):
    """Queries, keys and values are no copies of each other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, HIDDEN, HIDDEN) / 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (x @ self.weight[i] for i in range(3))
        return F.scaled_dot_product_attention(q, k, v).square().mean()


KEPT: dict[str, Callable[[], nn.Module]] = {
    "layers": Deep, "fewer": Fewer, "odd": Odd, "dropout": Dropped, "one": One, "shuffled": Shuffled, "apart": Apart,
    "projections": Projections,
}  # fmt: skip


def batch(samples: int = 8) -> tuple[Tensor]:
    return (torch.randn(samples, 4, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64),)


def products(model: nn.Module) -> Counter[Any]:
    return Counter(n.target for n in program_of(model, batch()).graph.graph.nodes)


@pytest.mark.parametrize("name", BATCHED)
def test_loops_are_batched(name: str) -> None:
    found = products(BATCHED[name]().double())
    # The router's; of heads also products of batches.
    assert found[aten.bmm.default] >= 5 and found[aten.mm.default] <= (6 if name == "layers" else 3)


@pytest.mark.parametrize("name", KEPT)
def test_what_differs_stays(name: str) -> None:
    before = products(KEPT[name]().double())
    assert before[aten.mm.default] >= 3 * 2 + (name != "projections") * 8


@pytest.mark.some(2)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", BATCHED)
def test_random_plans(name: str, seed: int) -> None:
    assert verify(BATCHED[name]().double(), batch(), AXES, plan="random", seed=seed).max_error < 1e-12


@pytest.mark.some(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_random_plans_of_what_stays(name: str) -> None:
    assert verify(KEPT[name]().double(), batch(), AXES, plan="random").max_error < 1e-12


@pytest.mark.some(2)
@pytest.mark.slow
@pytest.mark.parametrize("pins", [{}, {"microbatches": 2, "recompute": "search"}])
@pytest.mark.parametrize("name", [n for n in BATCHED if n not in ("heads", "layers", "chained")])
def test_experts_of_a_loop_are_split(name: str, pins: dict[str, Any]) -> None:
    """No device has, gathers or multiplies another one's experts."""
    model = BATCHED[name]().double()
    found = plan(model, batch(), cluster="h100", axes={"a": 4}, search=Search(recipe="expert", pins=pins))
    split = {name for name, layout in found.parameters.items() if str(layout[0]) == "S(0.0)"}
    assert split == {"up", "bias", "down"}
    report = verify(model, batch(), {"a": 4}, plan=found)
    assert report.max_error < 1e-12
    nodes = report.program.graph.graph.nodes
    assert {n.meta["val"].shape[0] for n in nodes if n.target is aten.bmm.default} == {1}
    weights = {(EXPERTS, *p.shape[1:]) for n, p in model.named_parameters() if n in split}
    assert not weights & {tuple(v.shape) for n in nodes for v in _tensors(n.meta.get("val"))}


def _tensors(value: Any) -> list[Tensor]:
    return [v for v in (value if isinstance(value, tuple | list) else [value]) if isinstance(v, Tensor)]


@pytest.mark.slow
def test_terms_of_half_the_precision() -> None:
    """Some experts have no tokens, and two have all."""
    model, given = Rounded(), (batch()[0].float(),)
    found = plan(model, given, cluster="h100", axes={"a": 2}, search=Search(recipe="expert"))
    assert verify(model, given, {"a": 2}, plan=found, dtype=torch.float32).max_error < 0.05
    program = program_of(model, given)
    assert [n.target for n in program.graph.graph.nodes].count(aten.bmm.default) == 5


def test_without_a_backward_pass() -> None:
    with torch.no_grad():
        assert products(Masked().double())[aten.bmm.default] == 2
        assert verify(Masked().double(), batch(), AXES, plan="random").max_error < 1e-12


class Memories(nn.Module):
    """Keys and values that are learned, as rows of one parameter, beside operators that return several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.memories = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Parameter(torch.randn(2, 3, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split(HIDDEN, -1)
        k, v = (torch.cat([m.expand(len(x), -1, -1), t], 1) for m, t in zip(self.memories, (k, v), strict=True))
        var, mean = torch.var_mean(q, -1, keepdim=True)
        return (((q - mean) / (var + 1)) @ k.mT).softmax(-1).matmul(v).square().mean()


def test_operators_of_several_results_beside_rows_of_a_parameter() -> None:
    assert verify(Memories().double(), (torch.randn(4, 4, HIDDEN).double(),), AXES, plan="random").max_error < 1e-12
