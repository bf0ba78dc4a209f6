"""pad_dims: the same numbers from longer tensors."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.compiler import program_of, rewrite
from autopar.costs.cluster import Cluster
from autopar.errors import PlanError
from autopar.ir.node_info import info
from autopar.ir.ops.attention import attention
from autopar.ir.ops.sequence.masked_attention import attention_masked
from autopar.ir.precision import Precision
from autopar.ir.program import Program
from autopar.ir.shards import is_zero_outside, with_padding, without_padding
from autopar.passes.pad_dims import pad
from autopar.search.random_plan import random_plan
from autopar.sharding.dims import analyze
from autopar.verify.emulate import run_whole
from autopar.verify.float64 import as_dtype
from autopar.verify.verify import compare, global_values
from tests import models as zoo
from tests.plans import random_padding

aten = torch.ops.aten

Shapes = Mapping[str, tuple[int, ...]]


class Tokens(nn.Module):
    """An embedding, two layers, a norm and a vocabulary."""

    def __init__(self, vocabulary: int, ffn: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocabulary, 8)
        self.up, self.down = nn.Linear(8, ffn), nn.Linear(ffn, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, vocabulary)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(ids)
        logits = self.head(self.norm(x + self.down(torch.relu(self.up(x)))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


_IDS = torch.randint(0, 27, (8, 4), generator=torch.Generator().manual_seed(0))
BATCH = (_IDS, _IDS.roll(1, 1))
VOCABULARY = {"embed.weight": (28, 8), "head.weight": (28, 8), "head.bias": (28,)}
FFN = {"up.weight": (32, 8), "up.bias": (32,), "down.weight": (8, 32)}
HIDDEN = {"embed.weight": (27, 12), "up.weight": (30, 12), "down.weight": (12, 30), "down.bias": (12,)}
HIDDEN |= {"norm.weight": (12,), "norm.bias": (12,), "head.weight": (27, 12)}


def padded(shapes: Shapes) -> tuple[Program, Program, list[torch.Tensor]]:
    model = Tokens(27, 30)
    program = program_of(model, BATCH)
    values = [v.double() if v.is_floating_point() else v for v in global_values(program, model, BATCH)]
    return as_dtype(program, torch.float64), as_dtype(pad(program, shapes), torch.float64), values


def added(before: Program, after: Program) -> Counter[str]:
    """Operators that came in."""
    counts = [Counter(str(n.target) for n in p.graph.graph.nodes if n.op == "call_function") for p in (before, after)]
    return counts[1] - counts[0]


@pytest.mark.parametrize("shapes", [VOCABULARY, FFN, HIDDEN, VOCABULARY | FFN], ids=["v", "f", "h", "vf"])
def test_computes_the_same(shapes: Shapes) -> None:
    before, after, values = padded(shapes)
    longer = [with_padding(v, n.meta["val"].shape) for v, n in zip(values, after.placeholders, strict=True)]
    for spec, one, other in zip(before.outputs, run_whole(before, values), run_whole(after, longer), strict=True):
        assert one is not None
        assert other is not None
        assert torch.allclose(without_padding(other, one.shape), one, rtol=1e-12, atol=1e-14), spec
        if spec.kind == "gradient":
            assert other.shape == shapes.get(spec.name, one.shape)
            assert is_zero_outside(other, one.shape)


def test_a_vocabulary_needs_one_mask() -> None:
    before, after, _ = padded(VOCABULARY)
    assert added(before, after) == {"aten.arange.default": 1, "aten.ge.Scalar": 1, "aten.masked_fill.Scalar": 1}
    assert after.used[("result", "1")] == (8, 4, 27)
    assert after.output_values[1].meta["val"].shape == (8, 4, 28)  # type: ignore[union-attr]


def test_zeros_stay_zeros() -> None:
    """Two layers with a ReLU need no mask at all; the gradient of the first one's bias is a sum of zeros."""
    before, after, _ = padded(FFN)
    assert added(before, after) == {}


def test_what_cannot_be_padded_gets_what_it_had() -> None:
    before, after, _ = padded(HIDDEN)
    found = added(before, after)
    assert found["aten.narrow.default"] > 0
    assert found["aten.pad.default"] > 0
    for node in after.graph.graph.nodes:
        if "layer_norm" in str(node.target):
            assert node.args[0 if "backward" not in str(node.target) else 1].meta["val"].shape[-1] == 8


class Joined(nn.Module):
    """Two padded parts beside each other, as a result."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.rand(3, 7)), nn.Parameter(torch.rand(3, 7))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        joined = torch.cat([self.a * x, self.b * x], -1)
        return joined.sum(), joined, self.a * x


def test_padding_within_a_result_is_cut_out() -> None:
    """Who takes a result cuts its dims at their ends."""
    x = torch.rand(3, 7)
    program = program_of(Joined(), (x,))
    after = pad(program, {"a": (3, 8), "b": (3, 8)})
    assert after.used[("result", "2")] == (3, 7)
    assert ("result", "1") not in after.used
    values = global_values(program, Joined(), (x,))
    longer = [with_padding(v, n.meta["val"].shape) for v, n in zip(values, after.placeholders, strict=True)]
    for one, other in zip(run_whole(program, values), run_whole(after, longer), strict=True):
        assert one is not None and other is not None
        assert torch.allclose(without_padding(other, one.shape), one)


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_under_a_precision_policy(compute: torch.dtype) -> None:
    """Parameters are padded in float32 and computed with in half of it, as without padding."""
    model = Tokens(27, 30)
    before = program_of(model, BATCH, precision=Precision(compute))
    after = pad(before, VOCABULARY | FFN)
    values = global_values(before, model, BATCH)
    longer = [with_padding(v, n.meta["val"].shape) for v, n in zip(values, after.placeholders, strict=True)]
    for spec, one, other in zip(before.outputs, run_whole(before, values), run_whole(after, longer), strict=True):
        assert one is not None
        assert other is not None
        assert one.dtype == other.dtype == (torch.float32 if spec.kind == "gradient" else compute)
        error = (without_padding(other, one.shape) - one).abs().max()
        assert float(error) <= 0.02 * float(one.abs().max()), spec
        assert spec.kind != "gradient" or is_zero_outside(other, one.shape)


def test_a_gradient_is_added_up_as_the_policy_says_after_it_is_padded() -> None:
    after = pad(program_of(Tokens(27, 30), BATCH, precision=Precision()), HIDDEN)
    made = [n for n in after.graph.graph.nodes if n.target in (aten.pad.default, aten.narrow.default)]
    between = [n for n in made if info(n.args[0]).reduce_dtype is not None]
    assert between
    assert {info(n).reduce_dtype for n in between} == {torch.float32}


def test_nothing_to_do() -> None:
    program = program_of(Tokens(27, 30), BATCH)
    assert pad(program, {}) is program


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"head.weight": (26, 8)}, "head.weight"),
        ({"head.weight": (28,)}, "head.weight"),
        ({"head.weight": (28, 8), "head.bias": (32,)}, "head.bias"),
        ({"tail.weight": (28, 8)}, r"tail\.weight.*does not have"),
    ],
)
def test_impossible_shapes(shapes: Shapes, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        pad(program_of(Tokens(27, 30), BATCH), shapes)


def error(program: Program, values: list[torch.Tensor], axes: dict[str, int], seed: int) -> float:
    """Of a random plan with random padding."""
    shapes = random_padding(program, analyze(program), random.Random(seed).randrange)
    longer = pad(program, shapes)
    drawn = random_plan(longer, analyze(longer), axes, Cluster.preset("cpu"), seed)
    plan = replace(drawn, padding=shapes, fingerprint=program.fingerprint)
    return compare(program, rewrite(program, plan), plan, values, torch.float64).max_error


DEEP = [pytest.param(name, marks=pytest.mark.deep) for name in ("bert", "encoder", "gpt2", "llama", "vit")]


@pytest.mark.parametrize("name", ["cnn", *DEEP])
def test_real_models(name: str) -> None:
    program, _, values = zoo.captured(name)
    assert error(program, values, {"a": 2, "b": 2}, 1) < 1e-10


def test_padding_that_is_not_zero_in_a_gradient_is_seen() -> None:
    program, _, values = zoo.captured("mlp")
    shapes = {"up.weight": (36, 16), "up.bias": (36,), "down.weight": (16, 36)}
    longer = pad(program, shapes)
    drawn = random_plan(longer, analyze(longer), {"a": 2}, Cluster.preset("cpu"), 0)
    plan = replace(drawn, padding=shapes, fingerprint=program.fingerprint)
    local = rewrite(program, plan)
    assert compare(program, local, plan, values, torch.float64).max_error < 1e-12
    graph, last = local.graph.graph, local.output_node
    finals = list(last.args[0])  # type: ignore[arg-type]
    at = next(i for i, o in enumerate(local.outputs) if o.name == "up.bias")
    with graph.inserting_before(last):
        finals[at] = graph.call_function(aten.add.Scalar, (finals[at], 1e-9))
    finals[at].meta = dict(last.args[0][at].meta)  # type: ignore[index,union-attr]
    last.args = (finals,)
    local.graph.recompile()
    assert compare(program, local, plan, values, torch.float64).max_error == float("inf")


class Heads(nn.Module):
    """Attention of three heads; queries, keys and values of one weight, or of their own, with six heads of queries."""

    def __init__(self, grouped: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.grouped, self.wide = grouped, 24 if grouped else 12
        self.out = nn.Linear(self.wide, 8)
        self.make()

    def make(self) -> None:
        self.qkv = nn.Linear(8, 36)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.qkv(x).chunk(3, -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in self.project(x))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.out(out.transpose(1, 2).flatten(2)).square().mean()


class OwnWeights(Heads):
    """The same with a weight each, as in Llama."""

    def make(self) -> None:
        self.q, self.k, self.v = nn.Linear(8, self.wide), nn.Linear(8, 12), nn.Linear(8, 12)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.q(x), self.k(x), self.v(x)


class Masked(OwnWeights):
    """The same under a mask that is given by its function: a window, or documents where heads share keys."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in self.project(x))
        at = torch.arange(x.shape[1])
        seen = (at[:, None] >= at) & (at[:, None] - at < 3)
        if self.grouped:
            seen = (at[:, None] >= at) & (at[:, None] // 3 == at // 3)
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=self.grouped)
        return self.out(out.transpose(1, 2).flatten(2)).square().mean()


class Sloped(OwnWeights):
    """The same with a bias by distance, whose slope is of each head (ALiBi)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in self.project(x))
        at, slopes = torch.arange(x.shape[1]), torch.tensor([2.0**-i for i in range(q.shape[1])], dtype=x.dtype)
        bias = torch.where(at[:, None] >= at, slopes[:, None, None] * (at - at[:, None]), -torch.inf)
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias[None], enable_gqa=self.grouped)
        return self.out(out.transpose(1, 2).flatten(2)).square().mean()


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        (Heads(False), {"qkv.weight": (48, 8), "qkv.bias": (48,), "out.weight": (8, 16)}),
        (OwnWeights(False), {"q.weight": (16, 8), "k.weight": (16, 8), "v.weight": (16, 8), "out.weight": (8, 16)}),
        (OwnWeights(True), {"q.weight": (32, 8), "k.weight": (16, 8), "v.weight": (16, 8), "out.weight": (8, 32)}),
        (Masked(False), {"q.weight": (16, 8), "k.weight": (16, 8), "v.weight": (16, 8), "out.weight": (8, 16)}),
        (Masked(True), {"q.weight": (32, 8), "k.weight": (16, 8), "v.weight": (16, 8), "out.weight": (8, 32)}),
        (Sloped(False), {"q.weight": (16, 8), "k.weight": (16, 8), "v.weight": (16, 8), "out.weight": (8, 16)}),
        (Sloped(True), {"q.weight": (32, 8), "k.weight": (16, 8), "v.weight": (16, 8), "out.weight": (8, 32)}),
    ],
    ids=["of one weight", "of three", "grouped", "window", "documents", "slopes", "slopes, grouped"],
)
def test_heads(model: nn.Module, shapes: Shapes) -> None:
    """Attention runs on four heads, of three; parameters stay as they are."""
    batch = (torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)),)
    program = program_of(model, batch)
    values = [v.double() for v in global_values(program, model, batch)]
    before, after = as_dtype(program, torch.float64), as_dtype(pad(program, shapes), torch.float64)
    assert [n.meta["val"].shape for n in after.placeholders] == [v.shape for v in values]
    attended = [n for n in after.graph.graph.nodes if str(n.target).startswith("autopar.attention")]
    forwards = attention, attention_masked
    assert attended and all(n.args[n.target not in forwards].meta["val"].shape[1] % 4 == 0 for n in attended)
    for one, other in zip(run_whole(before, values), run_whole(after, values), strict=True):
        assert one is not None
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-14)
