"""Attention with dropout on four ranks: as on one device, or drawn by kernels, block by block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import slow_devices
from tests.distributed.steps import TOLERANCE, follow

pytestmark = pytest.mark.distributed


class Attending(nn.Module):
    """Attention with dropout; its sum is linear in the weight that makes values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(8, n, bias=False) for n in (32, 16, 16))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return scaled_dot_product_attention(q, k, v, dropout_p=0.4, is_causal=True, enable_gqa=True).sum()


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(8, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}


def as_one_device(rank: int) -> float:
    from autopar.parallelize import parallelize

    plain, model = Attending(), Attending()
    parallel = parallelize(model, mesh_of(2, 2), deterministic=True, cluster=slow_devices(), timeout=WAIT)
    for each in (plain, parallel):
        torch.manual_seed(7)
        for _ in range(2):
            each(**batch()).backward()
    gradients = parallel.full_gradients()
    return max(float((gradients[n] - p.grad).abs().max()) for n, p in plain.named_parameters())


def drawn_in_kernels(rank: int, seed: int) -> dict[str, Any]:
    from autopar.parallelize import parallelize
    from autopar.rules.shapes.kernel_shapes import called

    slow = slow_devices()
    gpus = replace(slow, device=replace(slow.device, units=2))
    model = Attending()
    torch.manual_seed(seed)
    parallel = parallelize(model, mesh_of(2, 2), cluster=gpus, timeout=WAIT)
    losses = []
    for _ in range(2):
        loss = parallel(**batch())
        loss.backward()
        losses.append(float(loss.detach()))
    weight = parallel.full_state_dict()["v.weight"]
    names = [str(called(n)) for n in parallel.forward_graph.graph.nodes if n.op == "call_function"]
    return {
        "losses": losses,
        "of_gradient": float((parallel.full_gradients()["v.weight"] * weight).sum()),
        "local": [tuple(n.meta["val"][0].shape) for n in parallel.forward_graph.graph.nodes
                  if n.op == "call_function" and "attention_drawing" in str(called(n))],
        "names": names,
    }  # fmt: skip


def test_all_devices_together_draw_what_one_draws(ranks: Ranks) -> None:
    assert max(ranks.run(as_one_device)) < 1e-10


@pytest.mark.slow
def test_kernels_draw_blocks_of_their_own(ranks: Ranks) -> None:
    results, others = ranks.run(drawn_in_kernels, 1), ranks.run(drawn_in_kernels, 2)
    for found in results:
        assert not any("draw.default" in name for name in found["names"])
        assert found["local"] and all(shape != (8, 4, 6, 8) for shape in found["local"])  # split
        assert found["losses"] == results[0]["losses"]
        assert found["losses"][0] != found["losses"][1]  # another step, other numbers
        # The loss is linear in the values: a backward that dropped other elements would not give it.
        assert found["of_gradient"] == pytest.approx(sum(found["losses"]), rel=1e-10)
    assert results[0]["losses"] != others[0]["losses"]


def in_blocks(rank: int, sizes: tuple[int, ...], search: dict[str, Any]) -> tuple[float, int]:
    """Three steps of causal attention of three heads, and how often ranks swap blocks of queries."""
    from autopar.ir.ops.balanced_attention import swap_blocks
    from autopar.parallelize import parallelize
    from autopar.search.options import Search
    from autopar.strategies.attention import operators as rules
    from tests.strategies.test_balanced_attention import Causal, batch

    rules.WORTH_BLOCKS, usual = 0, rules.WORTH_BLOCKS
    model, plain = (Causal(heads=3, shared=1).double() for _ in range(2))
    options: dict[str, Any] = {"cluster": slow_devices(), "timeout": WAIT}
    parallel: Any = parallelize(model, mesh_of(*sizes), search=Search(**search), **options)
    worst = follow(parallel, plain, [{"x": batch()[0] * (step + 1)} for step in range(3)])
    graphs = (parallel.forward_graph, parallel.backward_graph)
    rules.WORTH_BLOCKS = usual
    return worst, sum(n.target is swap_blocks for graph in graphs for n in graph.graph.nodes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "search"),
    [
        ((2, 2), {"roles": {"a": "context", "b": "data"}}),
        pytest.param((4,), {"recipe": "context"}, marks=pytest.mark.deep),
    ],
)
def test_queries_in_blocks_that_balance(ranks: Ranks, sizes: tuple[int, ...], search: dict[str, Any]) -> None:
    """Queries, result and logarithm; gradients with what they need, the logarithm, and the queries' gradient."""
    results = ranks.run(in_blocks, sizes, search)
    assert max(worst for worst, _ in results) < TOLERANCE
    assert min(swaps for _, swaps in results) >= 6


def in_a_ring(rank: int, causal: bool, roles: dict[str, str], sizes: tuple[int, ...]) -> tuple[float, int]:
    """Three steps of attention in a ring, and how often ranks send keys and values, and their gradients."""
    from autopar.ir.ops.sequence.send_block import send_block
    from autopar.parallelize import parallelize
    from autopar.search.options import Search
    from autopar.strategies.attention import operators as rules
    from tests.strategies.test_ring_attention import Attending
    from tests.strategies.test_ring_attention import batch as sequences

    rules.blocked, usual = (lambda *_: "bgqkde"), rules.blocked
    model, plain = (Attending(causal=causal).double() for _ in range(2))
    names = dict(zip(("x", "other"), sequences(*([32] if causal else [32, 16])), strict=False))
    options: dict[str, Any] = {"cluster": slow_devices(), "timeout": WAIT}
    parallel: Any = parallelize(model, mesh_of(*sizes), search=Search(roles=roles, cache=False), **options)
    worst = follow(parallel, plain, [{n: t * (step + 1) for n, t in names.items()} for step in range(3)])
    graphs = (parallel.forward_graph, parallel.backward_graph)
    rules.blocked = usual
    return worst, sum(n.target is send_block for graph in graphs for n in graph.graph.nodes)


@pytest.mark.parametrize(
    ("causal", "roles", "sizes", "sends"),
    [
        (True, {"a": "context"}, (4,), 3 + 3 + 4),
        pytest.param(False, {"a": "context", "b": "tensor"}, (2, 2), 1 + 1 + 2, marks=pytest.mark.deep),
    ],
)
def test_keys_go_round(ranks: Ranks, causal: bool, roles: dict[str, str], sizes: tuple[int, ...], sends: int) -> None:
    """Keys go to all others, in the backward pass with their gradients, which come home."""
    results = ranks.run(in_a_ring, causal, roles, sizes)
    assert max(worst for worst, _ in results) < TOLERANCE
    assert min(found for _, found in results) >= sends  # more where the forward pass is recomputed


def beside_rows(rank: int, name: str, search: dict[str, Any], sizes: tuple[int, ...]) -> tuple[float, int]:
    """Two steps of attention beside a bias, or with dropout, and how often ranks send keys and their gradients."""
    from autopar.ir.ops.sequence.send_block import send_block
    from autopar.parallelize import parallelize
    from autopar.search.options import Search
    from autopar.strategies.attention import operators as rules
    from tests.strategies import test_ring_beside_rows as models

    usual = rules.blocked
    if "roles" in search:
        rules.blocked = lambda *_: "bhgqkde"
    model, plain = (models.build(name) for _ in range(2))
    options: dict[str, Any] = {"cluster": slow_devices(), "timeout": WAIT, "search": Search(**search, cache=False)}
    parallel: Any = parallelize(model, mesh_of(*sizes), models.batch(name), deterministic=True, **options)
    found = []
    for each in (plain, parallel):
        torch.manual_seed(7)
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            each(**models.batch(name)).backward()
            optimizer.step()
    found = [parallel.full_gradients()[n] - p.grad for n, p in plain.named_parameters()]
    found += [parallel.full_state_dict()[n] - p for n, p in plain.state_dict().items()]
    graphs = (parallel.forward_graph, parallel.backward_graph)
    rules.blocked = usual
    return max(float(t.abs().max()) for t in found), sum(n.target is send_block for g in graphs for n in g.graph.nodes)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "search", "sizes", "sends"),
    [
        ("dropped", {"roles": {"a": "context"}}, (4,), 3 + 3 + 4),
        ("both", {"recipe": "random", "seed": 0}, (2, 2), 1),
        *(
            pytest.param(name, {"recipe": "random", "seed": seed}, (4,), 0, marks=pytest.mark.deep)
            for seed, name in enumerate(("learned", "of keys", "given", "causal"))
        ),
    ],
)
def test_keys_go_round_beside_rows(
    ranks: Ranks, name: str, search: dict[str, Any], sizes: tuple[int, ...], sends: int
) -> None:
    """Biases, their gradients, and what dropout keeps, are those of one device."""
    results = ranks.run(beside_rows, name, search, sizes)
    assert max(worst for worst, _ in results) < TOLERANCE
    assert min(found for _, found in results) >= sends


def under_a_mask(rank: int, name: str, search: dict[str, Any], sizes: tuple[int, ...]) -> tuple[float, int]:
    """Three steps of a model, and how often ranks send rows to their neighbors."""
    from autopar.ir.ops.sequence.send_block import send_block
    from autopar.parallelize import parallelize
    from autopar.search.options import Search
    from autopar.strategies.attention import operators as rules
    from tests.strategies import test_masked_attention as models

    usual = rules.blocked
    if "roles" in search:  # nothing but keys from other devices
        rules.blocked = lambda *_: "bhgqkde"
    model, plain = (models.build(name) for _ in range(2))
    given = models.BATCHES[name]()
    options: dict[str, Any] = {"cluster": slow_devices(), "timeout": WAIT, "search": Search(**search, cache=False)}
    parallel: Any = parallelize(model, mesh_of(*sizes), given, **options)
    worst = follow(parallel, plain, [given] * 3)
    graphs = (parallel.forward_graph, parallel.backward_graph)
    rules.blocked = usual
    return worst, sum(n.target is send_block for graph in graphs for n in graph.graph.nodes)


CONTEXT: dict[str, Any] = {"roles": {"a": "context"}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "search", "sizes", "sends"),
    [
        pytest.param("window", CONTEXT, (4,), 2, marks=pytest.mark.deep),
        ("learned", CONTEXT, (4,), 2 * (3 + 3 + 4)),
        pytest.param("capped", {"recipe": "random", "seed": 0}, (2, 2), 0, marks=pytest.mark.deep),
        pytest.param("hidden", CONTEXT, (4,), 2 * (3 + 3 + 4), marks=pytest.mark.deep),
        pytest.param("hidden", {"recipe": "random", "seed": 0}, (2, 2), 0, marks=pytest.mark.deep),
        pytest.param("documents", CONTEXT, (4,), 3 + 3 + 4, marks=pytest.mark.deep),
        *(
            pytest.param(name, {"recipe": "random", "seed": seed}, sizes, 0, marks=pytest.mark.deep)
            for name in ("mistral", "qwen", "t5", "longt5", "swin")
            for seed, sizes in enumerate([(4,), (2, 2)])
        ),
    ],
)
def test_masks_by_their_functions(
    ranks: Ranks, name: str, search: dict[str, Any], sizes: tuple[int, ...], sends: int
) -> None:
    """What a window reaches comes from a neighbor and goes back; documents go round with keys; models of others."""
    results = ranks.run(under_a_mask, name, search, sizes)
    # Norms of these, or softmaxes, compute in float32 whatever the model's dtype is; `verify` computes all in float64.
    tolerance = 1e-5 if name in ("mistral", "qwen", "t5", "longt5") else TOLERANCE
    assert max(worst for worst, _ in results) < tolerance
    assert min(found for _, found in results) >= sends


def lengths_of_its_own(rank: int) -> str:
    """What a rank is told whose documents are others in number."""
    from autopar.errors import RankError
    from autopar.parallelize import parallelize
    from tests.strategies import test_masked_attention as models

    ends = torch.tensor([5, 16] if rank else [5, 9, 16])
    parallel = parallelize(models.build("documents"), mesh_of(4), cluster=slow_devices(), timeout=WAIT)
    with pytest.raises(RankError) as found:
        parallel(x=models.documents()["x"], ids=ends)
    return str(found.value)


def test_packed_lengths_that_differ(ranks: Ranks) -> None:
    """Before anything is captured, and on every rank: nobody waits for another."""
    for text in ranks.run(lengths_of_its_own):
        assert "the global shape of the batch differs: rank 0 has [2, 16, 8] float64, [3] int64, ranks 1, 2, 3" in text
