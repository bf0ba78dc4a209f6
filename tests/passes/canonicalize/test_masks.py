"""Masks become functions: windows, formulas of what queries and keys have, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F  # noqa: N812

from autopar.compiler import program_of
from autopar.ir.ops.attention import attention
from autopar.ir.ops.sequence import masked_attention as masked
from autopar.passes.canonicalize import masks
from autopar.verify.verify import verify

ROWS, TOKENS = 2, 24

Mask = Callable[["Masked", dict[str, Tensor]], Tensor]


class Masked(nn.Module):
    """Attention of four heads, of which two share a key, under a mask of one's own."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mask = mask
        self.q, self.kv, self.out = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.bias = nn.Parameter(torch.randn(4, TOKENS, TOKENS))
        self.far, self.near = nn.Embedding(9, 4), nn.Linear(3, 4, bias=False)
        self.register_buffer("slopes", 0.5 ** torch.arange(1, 5))

    def forward(self, x: Tensor, **given: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
        seen = F.scaled_dot_product_attention(q, k, v, self.mask(self, given), enable_gqa=True)
        loss: Tensor = self.out(seen.transpose(1, 2).flatten(2)).square().mean()
        return loss


def batch() -> dict[str, Tensor]:
    ids = torch.tensor([[0] * 5 + [1] * 10 + [2] * 9, [0] * 21 + [1] * 3])
    starts = (ids[:, 1:] != ids[:, :-1]).nonzero()
    positions = torch.arange(TOKENS).repeat(ROWS, 1)
    for row, at in starts.tolist():
        positions[row, at + 1 :] = torch.arange(TOKENS - at - 1)
    return {
        "x": torch.randn(ROWS, TOKENS, 8, generator=torch.Generator().manual_seed(1)).double(),
        "ids": ids,
        "positions": positions,
        "ends": torch.tensor([5, 15, 24]),
        "lengths": torch.tensor([19, 24]),
    }


def at() -> Tensor:
    return torch.arange(TOKENS)[:, None]


def of() -> Tensor:
    return torch.arange(TOKENS)


def same(ids: Tensor) -> Tensor:
    return (ids[:, :, None] == ids[:, None, :])[:, None]


def as_transformers(positions: Tensor) -> Tensor:
    """Of packed documents, by the positions of tokens in them."""
    ids = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    row, query, key = torch.arange(ROWS)[:, None, None, None], at()[None, None], of()[None, None, None]
    true = query.new_ones((), dtype=torch.bool)
    return true & ((ids[row, query] == ids[row, key]) & (positions[row, key] <= positions[row, query]))


def biased(m: Masked) -> Tensor:
    """A penalty by distance, and what is later hidden (Press et al., "Train short, test long", 2021)."""
    away = (m.slopes[:, None, None] * (of() - at()))[None]
    return away.masked_fill(of() > at(), -torch.inf)


def learned(table: nn.Embedding) -> Tensor:
    """A number of each head that is learned for each distance, far ones being one (T5)."""
    return table((of() - at()).clamp(-4, 4) + 4).permute(2, 0, 1)[None]


# Keys before and after a query's own position that it sees (None: any), and whether there is a formula beside that.
FUNCTIONS: dict[str, tuple[Mask, int | None, int | None, bool]] = {
    "window": (lambda m, g: (at() >= of()) & (at() - of() < 3), 2, 0, False),
    "window by triangles": (lambda m, g: torch.ones(TOKENS, TOKENS).bool().tril().triu(-2), 2, 0, False),
    "window on both sides": (lambda m, g: (at() - of()).abs() <= 2, 2, 2, False),
    "window that is added": (
        lambda m, g: torch.zeros(TOKENS, TOKENS, dtype=torch.float64).masked_fill(
            (of() > at()) | (of() < at() - 4), -torch.inf),
        4, 0, False,
    ),
    "window of new numbers": (
        lambda m, g: torch.where((of() > at()) | (of() < at() - 4), of().new_full((), -torch.inf, dtype=torch.float64),
                                 of().new_zeros((TOKENS, TOKENS), dtype=torch.float64)),
        4, 0, False,
    ),
    "documents": (lambda m, g: same(g["ids"]) & (of() <= at()), None, 0, True),
    "documents in windows": (lambda m, g: same(g["ids"]) & (of() <= at()) & (of() > at() - 4), 3, 0, True),
    "latest documents": (lambda m, g: same(torch.cummax(g["ids"], 1)[0]) & (of() <= at()), None, 0, True),
    "documents, both ways": (lambda m, g: same(g["ids"]), None, None, True),
    "cumulative lengths": (
        lambda m, g: same(torch.bucketize(of(), g["ends"], right=True)[None]) & (of() <= at()), None, 0, True,
    ),
    "packed": (lambda m, g: as_transformers(g["positions"]), None, 0, True),
    "padding": (lambda m, g: (of() < g["lengths"][:, None, None, None]) & (of() <= at()), None, 0, True),
    "prefix": (lambda m, g: (of() <= at()) | (of() < 3), None, None, True),
    "prefix of the batch": (
        lambda m, g: ~((of() > at()) & (of() >= g["lengths"][:, None, None, None])), None, None, True,
    ),
    "chunks": (lambda m, g: (at() // 4 == of() // 4) & (of() <= at()), None, 0, True),
    "bias by distance": (lambda m, g: biased(m), None, 0, True),
    "learned by distance": (lambda m, g: learned(m.far), None, None, True),
    "learned twice, causal": (
        lambda m, g: (learned(m.far) + m.near.weight.t()[(at() - of()) % 3].permute(2, 0, 1) * 0.5).masked_fill(
            of() > at(), -torch.inf),
        None, 0, True,
    ),
    "learned by what the batch says": (
        lambda m, g: m.far((g["ids"][:, None, :] - g["ids"][:, :, None]).clamp(-2, 2) + 2).permute(0, 3, 1, 2),
        None, None, True,
    ),
}  # fmt: skip
"""By hand in torch-only code, as transformers does, and as packing collators give them."""

STAYING: dict[str, Mask] = {
    "a learned bias": lambda m, g: m.bias,
    "a learned bias beside a table": lambda m, g: learned(m.far) + m.bias,
    "a table that something else reads": lambda m, g: learned(m.far) * learned(m.far).sigmoid(),
    "of queries times keys": lambda m, g: (m.bias > -1) | (of() == at()),
    "by chance": lambda m, g: (torch.rand(TOKENS, TOKENS) < 2) & (of() <= at()),
}


def kernels(mask: Mask) -> list[fx.Node]:
    given = {k: t.float() if t.is_floating_point() else t for k, t in batch().items()}
    nodes = program_of(Masked(mask), given).graph.graph.nodes
    return [n for n in nodes if "autopar.attention" in str(n.target)]


@pytest.mark.some(2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_masks(name: str) -> None:
    """Forward and backward get the same function, and nothing of queries times keys is left."""
    mask, before, after, formula = FUNCTIONS[name]
    forward, backward = kernels(mask)
    far = [TOKENS if n is None else n for n in (before, after)]
    assert forward.target is masked.attention_masked and backward.target is masked.attention_masked_backward
    found, again = forward.args[3:], (backward.args[4], *backward.args[7:-1])
    assert found == again
    assert list(found[3:5]) == far and bool(found[1]) == formula
    assert backward.args[-1] == (found[9] is not None) and found[11] == masked.INFINITY
    for node in forward.graph.nodes:
        shape = node.meta["val"].shape if isinstance(node.meta.get("val"), Tensor) else ()
        assert list(shape[-2:]) != [TOKENS, TOKENS] or node.op == "placeholder" or "bias" in node.name, node


def test_of_a_large_batch_of_equal_samples_one_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of the positions that transformers makes: the mask of packed documents is causal, whatever the batch."""
    monkeypatch.setattr(masks.constants, "_LARGEST", TOKENS + 1)  # less than two samples
    forward, backward = kernels(lambda m, g: as_transformers(torch.arange(TOKENS)[None].expand(ROWS, -1)))
    assert forward.target is attention and forward.args[3] is None and forward.args[6]
    assert backward.args[4] is None and backward.args[9]
    apart = torch.stack([torch.arange(TOKENS), torch.arange(TOKENS) % 5])
    forward, _ = kernels(lambda m, g: as_transformers(apart))
    assert forward.target is masked.attention_masked and forward.args[4]


@pytest.mark.some(2)
@pytest.mark.parametrize("name", STAYING)
def test_other_masks_stay(name: str) -> None:
    forward, _ = kernels(STAYING[name])
    assert forward.target is attention and forward.args[3] is not None


@pytest.mark.parametrize(
    ("mask", "causal"),
    [
        (lambda m, g: torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(), True),
        (lambda m, g: (at() - of()).abs() < 99, False),
        (lambda m, g: same(torch.arange(TOKENS).diff(prepend=torch.tensor([-1])).ne(1).cumsum(0)[None]), False),
    ],
)
def test_what_is_known_needs_no_mask(mask: Mask, causal: bool) -> None:
    for node in kernels(mask):
        assert node.target is not masked.attention_masked
        assert causal in node.args and None in node.args[3:5]


def test_long_masks_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of a sequence as long as a mask could not be."""

    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            q, near = self.f(x)[:, None], torch.arange(x.shape[1])
            away = near[:, None] - near
            return F.scaled_dot_product_attention(q, q, q, (away >= 0) & (away < 4096)).square().mean()

    with torch.device("meta"):
        program = program_of(Long(), (torch.zeros(1, 2**20, 4),))
    forward, _ = (n for n in program.graph.graph.nodes if "autopar.attention" in str(n.target))
    assert forward.args[3:6] == ([], "", False) and forward.args[6:8] == (4095, 0)


def values(name: str, axes: dict[str, int], seed: int, **options: Any) -> float:
    model = Masked({**STAYING, **{n: f[0] for n, f in FUNCTIONS.items()}}[name]).double()
    report = verify(model, batch(), axes, plan="random", seed=seed, **options)
    return max(report.max_error, report.capture_error)


FEW = ("documents in windows", "packed", "prefix of the batch", "bias by distance", "learned twice, causal",
       "learned by what the batch says", "a learned bias beside a table", "of queries times keys")  # fmt: skip
"""One of each kind; of the others `test_functions_of_masks` knows the functions."""


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in FEW else pytest.mark.deep) for n in (*FUNCTIONS, *STAYING) if n != "by chance"],
)
def test_equal_values(name: str) -> None:
    assert values(name, {"a": 2, "b": 2}, len(name)) < 1e-10


@pytest.mark.deep
@pytest.mark.parametrize("name", FUNCTIONS)
def test_equal_values_of_many_plans(name: str) -> None:
    for axes in ({"a": 4}, {"a": 2, "b": 2}, {"a": 2, "b": 2, "c": 2}):
        for seed in range(4):
            assert values(name, axes, seed, microbatches=1 + seed % 2, random_strides=seed % 3 == 2) < 1e-10
