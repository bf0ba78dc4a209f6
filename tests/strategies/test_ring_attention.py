"""Attention in a ring: equal values, nothing gathered, exchanges beside kernels, and chosen where it should be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from autopar.compiler import plan, program_of, rewrite, solve
from autopar.costs.cluster import Cluster
from autopar.ir.ops import attention as ops
from autopar.ir.ops.collectives import waits_for
from autopar.ir.ops.sequence.send_block import send_block
from autopar.ir.plan import Plan
from autopar.rules.oracle.sharding import check_rule
from autopar.search.options import Search
from autopar.sharding.candidates import candidates
from autopar.sharding.dims import Operator, analyze
from autopar.simulate import simulate
from autopar.simulate.graph_tasks import emitted
from autopar.strategies.attention import operators as rules
from autopar.verify.verify import verify

H100 = Cluster.preset("h100")


class Attending(nn.Module):
    """Attention whose heads of values have another size; with ``other`` its keys are of another sequence."""

    def __init__(self, heads: int = 4, shared: int = 2, head: int = 4, wide: int = 6, causal: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.causal = (heads, heads // shared, heads // shared), causal
        self.q, self.k, self.v = (nn.Linear(8, n * s) for n, s in zip(self.heads, (head, head, wide), strict=True))
        self.out = nn.Linear(heads * wide, 8)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        made = zip((self.q, self.k, self.v), self.heads, (x, *[x if other is None else other] * 2), strict=True)
        q, k, v = (f(y).unflatten(-1, (h, -1)).transpose(1, 2) for f, h, y in made)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=0.7, enable_gqa=True)
        loss: Tensor = self.out(seen.transpose(1, 2).flatten(2)).square().mean()
        return loss


def batch(*lengths: int, rows: int = 2) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(rows, n, 8, generator=generator).double() for n in lengths)


def in_a_ring(monkeypatch: pytest.MonkeyPatch, blocked: str) -> None:
    """Nothing else along the sequence, nor along some other letters."""
    monkeypatch.setattr(rules, "blocked", lambda *_: f"{blocked}gqkde")


def sends(found: Any) -> int:
    return sum(n.target is send_block for n in found.program.graph.graph.nodes)


def calls(heads: int, shared: int, queries: int, keys: int, wide: int, causal: bool) -> Iterator[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, queries, 4), (heads // shared, keys, 4), (heads // shared, keys, wide), (heads, queries, wide))
    q, k, v, grad = (torch.randn(2, *s, dtype=torch.float64, generator=generator) for s in shapes)
    numbers = (0.0, causal, 0.7)
    out, log = ops.attention(q, k, v, None, None, *numbers)
    yield ops.attention, (q, k, v, None, None, *numbers)
    yield ops.attention_backward, (grad, q, k, v, None, None, out, log, *numbers, False)


SHAPES = [(4, 2, 24, 24, 6, True), (2, 1, 24, 24, 4, True), (4, 2, 24, 36, 6, False), (4, 4, 24, 24, 4, False)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("parts", [3, pytest.param(2, marks=pytest.mark.deep), pytest.param(4, marks=pytest.mark.deep)])
def test_rules(shape: Any, parts: int) -> None:
    for target, args in calls(*shape):
        assert any("qk" in text for text in check_rule(target, args, {}, parts=parts, pairs=parts == 2))


@pytest.mark.parametrize(
    ("axes", "roles", "options", "lengths"),
    [
        pytest.param({"a": 4}, {"a": "context"}, {}, (32,), marks=pytest.mark.deep),
        ({"a": 2, "b": 2}, {"a": "context", "b": "tensor"}, {"causal": False}, (16,)),
        pytest.param({"a": 2}, {"a": "context"}, {"shared": 4}, (8,), marks=pytest.mark.deep),
        pytest.param({"a": 4}, {"a": "context"}, {"causal": False}, (16, 24), marks=pytest.mark.deep),
        pytest.param({"a": 2, "b": 2, "c": 2}, {"a": "data", "b": "context", "c": "tensor"}, {}, (16,),
                     marks=pytest.mark.deep),
    ],
)  # fmt: skip
def test_equal_values(
    axes: Any, roles: Any, options: Any, lengths: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Of a plan by roles, and of random ones, which recompute and have microbatches."""
    model, x, deep = Attending(**options).double(), batch(*lengths), request.node.get_closest_marker("deep")
    in_a_ring(monkeypatch, "" if "data" in roles.values() else "b")
    asked = plan(model, x, cluster="h100", axes=axes, search=Search(roles=roles))
    report = verify(model, x, axes, plan=asked)
    assert report.max_error < 1e-10
    assert sends(report) > 0
    in_a_ring(monkeypatch, "")
    counts = []
    for seed in range(6 if deep else 1):
        more = {"microbatches": 1 + seed % 2, "random_strides": seed % 3 == 2}
        report = verify(model, x, axes, plan="random", seed=seed, **more)
        assert report.max_error < 1e-10
        counts.append(sends(report))
    assert any(counts) or not deep


def test_a_ring_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is the operator itself, with both of its outputs."""
    model, x = Attending(causal=False).double(), batch(16, 24)
    in_a_ring(monkeypatch, "b")
    report = verify(model, x, {"a": 1, "b": 2}, plan="random", seed=22)
    assert report.max_error < 1e-10
    strategies = [names for key, names in report.plan.choices.items() if "autopar.attention" in key]
    assert ("qk.0", "R") in strategies


def attention_of(model: nn.Module, x: tuple[Tensor, ...]) -> Operator:
    dims = analyze(program_of(model, x))
    return next(o for n, o in dims.operators.items() if n.target is ops.attention)


def names(operator: Operator, *sizes: int) -> set[tuple[str, ...]]:
    found = candidates(operator, sizes)
    return {found.names(i) for i in range(len(found.choice))}


@pytest.mark.slow
def test_where_it_is_not_offered() -> None:
    """An odd number of positions, two axes, and a causal mask of other lengths; masks and dropout have no such rule."""
    assert ("qk.0",) in names(attention_of(Attending(), batch(8)), 4)
    assert ("qk.0",) not in names(attention_of(Attending(), batch(12)), 4)
    assert ("qk.0",) in names(attention_of(Attending(causal=False), batch(12)), 4)
    assert ("qk.0",) not in names(attention_of(Attending(), batch(8, 16)), 2)
    assert ("qk.0",) not in names(attention_of(Attending(causal=False), batch(1)), 2)
    two = names(attention_of(Attending(), batch(16)), 2, 2)
    assert {("qk.0", "h.0"), ("b.0", "qk.0")} <= two
    assert not {("qk.0", "qk.0"), ("qk.0", "q.0")} & two


class Layer(nn.Module):
    """Attention of ``kv`` heads of keys, and of 16 of queries, between linears."""

    def __init__(self, kv: int = 16, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.q, self.kv, self.out = nn.Linear(2048, 2048), nn.Linear(2048, 256 * kv), nn.Linear(2048, 2048)

    def forward(self, x: Tensor) -> Tensor:
        k, v = (t.unflatten(-1, (-1, 128)).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
        q = self.q(x).unflatten(-1, (-1, 128)).transpose(1, 2)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)
        return x + self.out(seen.transpose(1, 2).flatten(2))


def searched(
    kv: int, length: int, axes: dict[str, int], memory: float = 70.0, cluster: Cluster = H100, causal: bool = True
) -> tuple[Plan, Any]:
    with torch.device("meta"):
        model = Layer(kv, causal).to(torch.bfloat16)
        x = torch.zeros(1, length, 2048, dtype=torch.bfloat16)
    program = program_of(model, (x,), loss_fn=lambda y, _: y.square().mean())
    roles = {a: "context" for a in axes}
    found = solve(program, axes, cluster, memory=memory * 2**30, search=Search(roles=roles, cache=False))
    return found, program


def choices(found: Plan) -> list[tuple[str, ...]]:
    return [names for key, names in found.choices.items() if "autopar.attention" in key]


# Nodes are far from one another.
FAR = replace(H100, axis_links={"node": replace(H100.links[1], bandwidth=10e9)})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("expected", "kv", "length", "axes", "memory", "cluster", "causal"),
    [
        # Heads for all devices, near one another: four exchanges of what a device has.
        pytest.param(("h.0",), 16, 32768, {"a": 8}, 70.0, H100, True, marks=pytest.mark.deep),
        # Fewer heads than devices, and one of them of keys: gathered, it is small.
        pytest.param(("q.0",), 1, 65536, {"a": 32}, 70.0, H100, True, marks=pytest.mark.deep),
        # No room for all keys and values.
        (("qk.0",), 8, 131072, {"a": 16}, 1.2, H100, True),
        # Heads for the devices of a node; keys go from node to node beside kernels.
        pytest.param(("qk.0", "h.0"), 4, 65536, {"node": 4, "gpu": 4}, 70.0, FAR, False, marks=pytest.mark.deep),
    ],
)
def test_the_search_chooses(
    expected: tuple[str, ...], kv: int, length: int, axes: dict[str, int], memory: float, cluster: Cluster,
    causal: bool,
) -> None:  # fmt: skip
    """In a ring, kernels take one device's keys, beside exchanges, in as many seconds as predicted to 5%."""
    found, program = searched(kv, length, axes, memory, cluster, causal)
    assert set(choices(found)) == {expected}
    if "qk.0" not in expected:
        return
    local = rewrite(program, found)
    seconds = simulate(emitted(local, found)).step_seconds
    assert found.predicted.step_seconds == pytest.approx(seconds, rel=0.05)
    nodes = list(local.graph.graph.nodes)
    own = length // next(iter(axes.values()))
    for node in (n for n in nodes if n.target in (ops.attention, ops.attention_backward)):
        keys = node.args[1 if node.target is ops.attention else 2].meta["val"]
        assert keys.shape[2] <= own
    order = {n: i for i, n in enumerate(nodes)}
    kernels = [order[n] for n in nodes if n.target in (ops.attention, ops.attention_backward)]
    hidden = []
    for node in (n for n in nodes if n.target is send_block):
        (wait,) = waits_for(node)
        hidden.append(any(order[node] < k < order[wait] for k in kernels))
    # All but the way home of the last gradients.
    assert hidden.count(False) == 1
    peak = found.predicted.peak_bytes
    assert sum(peak.values()) <= memory * 2**30
