"""Mixtures of experts whose tokens each rank sorts for itself: three steps of AdamW equal one device's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import slow_devices
from tests.distributed.steps import TOLERANCE, follow
from tests.distributed.test_compile import aot_eager
from tests.passes.canonicalize.test_experts import FAR, ROUTED, batch

pytestmark = pytest.mark.distributed

STEPS = 3


def skewed(name: str, skew: str) -> Any:
    """A layer in float64; ``first``: all tokens go to the first two experts, and none to others."""
    model: Any = ROUTED[name]().double()
    if skew == "first":
        with torch.no_grad():
            model.gate.weight[2:] = 0
            model.gate.weight[:2] = torch.sign(model.gate.weight[:2])
        model.gate.register_forward_hook(_first_of_all)
    return model


def _first_of_all(gate: Any, given: Any, scores: torch.Tensor) -> torch.Tensor:
    return scores + torch.tensor([30.0, 20.0, 0.0, 0.0], dtype=scores.dtype)


def train(
    rank: int,
    name: str,
    options: dict[str, Any],
    skew: str = "",
    backend: Any = None,
    samples: int = 8,
    cluster: Any = None,
) -> tuple[float, int, int, int]:
    """The largest difference of any loss, gradient or parameter, rows that a rank routes, exchanges, and own rows."""
    from autopar.ir.ops import routing
    from autopar.ir.ops.exchange import exchange_rows, own_rows
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    search = Search(**options)
    parallel: Any = parallelize(
        skewed(name, skew),
        mesh_of(2, 2),
        cluster=cluster or slow_devices(),
        timeout=WAIT,
        search=search,
        compile=backend,
    )
    batches = [{"x": batch(samples)[0].double() * (step + 1)} for step in range(STEPS)]
    worst = follow(parallel, skewed(name, skew), batches)
    graphs = (parallel.forward_graph, parallel.backward_graph)
    targets = [n.target for graph in graphs for n in graph.graph.nodes]
    (rows, *_) = [n for n in graphs[0].graph.nodes if n.target is routing.route]
    with torch.no_grad():
        return worst, int(rows.meta["val"].shape[0]), targets.count(exchange_rows), targets.count(own_rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("bias", marks=pytest.mark.deep), "index_add"])
def test_each_rank_routes_its_own_tokens(ranks: Ranks, name: str) -> None:
    results = ranks.run(train, name, {"recipe": "fsdp"})
    assert max(worst for worst, *_ in results) < TOLERANCE
    assert {rows for _, rows, *_ in results} == {8 * 4 * 2 // 4}


@pytest.mark.parametrize(
    ("options", "skew", "backend", "exchanges"),
    [
        ({"recipe": "expert"}, "", None, 3),
        pytest.param({"roles": {"a": "expert", "b": "expert"}}, "first", None, 6, marks=pytest.mark.deep),
        pytest.param({"roles": {"a": "expert", "b": "data"}}, "first", aot_eager, 3, marks=pytest.mark.deep),
    ],
)
def test_ranks_exchange_rows_by_expert(
    ranks: Ranks, options: dict[str, Any], skew: str, backend: Any, exchanges: int
) -> None:
    """Forth and back, and once in the backward pass: the batch has no gradient. Some ranks get all rows, or none."""
    results = ranks.run(train, "index_add", options, skew, backend)
    assert max(worst for worst, *_ in results) < TOLERANCE
    assert {found for *_, found, _ in results} == {exchanges}


@pytest.mark.deep
def test_one_sequence_is_split_by_position(ranks: Ranks) -> None:
    results = ranks.run(train, "index_add", {"roles": {"a": "context", "b": "expert"}}, "first", None, 1)
    assert max(worst for worst, *_ in results) < TOLERANCE
    assert {found for *_, found, _ in results} == {3} and {rows for _, rows, *_ in results} == {4 * 2 // 4}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placed", "backend"), [pytest.param(("S(0)", "S(0)"), None, marks=pytest.mark.deep), (("R", "S(0)"), aot_eager)]
)
def test_ranks_take_rows_of_their_experts(ranks: Ranks, placed: tuple[str, str], backend: Any) -> None:
    """Of tokens that all have; some ranks have no rows of theirs."""
    results = ranks.run(train, "index_add", {"pins": {"up": placed, "down": placed}}, "first", backend, 1, FAR)
    assert max(worst for worst, *_ in results) < TOLERANCE
    assert all(own and not exchanges for *_, exchanges, own in results)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param("bias", 0, marks=pytest.mark.deep),
        pytest.param("bias", 1, marks=pytest.mark.deep),
        pytest.param("keys, places", 0, marks=pytest.mark.deep),
        ("keys, places", 1),
    ],
)
def test_random_plans(ranks: Ranks, name: str, seed: int) -> None:
    results = ranks.run(train, name, {"recipe": "random", "seed": seed})
    assert max(worst for worst, *_ in results) < TOLERANCE
    assert all(exchanges for *_, exchanges, _ in results)


@pytest.mark.deep
@pytest.mark.parametrize("pins", [{"microbatches": 2}, {"recompute": "search", "microbatches": 4}])
def test_microbatches(ranks: Ranks, pins: dict[str, Any]) -> None:
    results = ranks.run(train, "scatter_add", {"pins": pins})
    assert max(worst for worst, *_ in results) < TOLERANCE


def train_batched(rank: int, name: str) -> tuple[float, int]:
    """The largest difference of any loss, gradient or parameter, and how many experts' weights a rank has."""
    from autopar.parallelize import parallelize
    from autopar.search.options import Search
    from tests.search.formulation.test_batched_experts import HIDDEN, skewed

    parallel: Any = parallelize(
        skewed(name), mesh_of(2, 2), cluster=slow_devices(), timeout=WAIT, search=Search(recipe="expert")
    )
    g = torch.Generator().manual_seed(0)
    batches = [{"x": torch.randn(8, 8, HIDDEN, generator=g, dtype=torch.float64)} for _ in range(STEPS)]
    return follow(parallel, skewed(name), batches), len(parallel.up.to_local())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", pytest.param("choice", marks=pytest.mark.deep)])
def test_ranks_have_experts_in_batched_products(ranks: Ranks, name: str) -> None:
    """All tokens are the first expert's: other ranks multiply zeros, or what is left."""
    results = ranks.run(train_batched, name)
    assert max(worst for worst, _ in results) < TOLERANCE
    assert {experts for _, experts in results} == {1}  # of two, which the other axis shards


def train_other_form(rank: int, form: str) -> tuple[float, int]:
    """The largest difference of any loss, gradient or parameter, and how many experts' weights a rank has."""
    from autopar.parallelize import parallelize
    from autopar.search.options import Search
    from tests.passes.canonicalize.test_batch_loops import HIDDEN, Masked
    from tests.passes.canonicalize.test_looked_up_experts import Pairs

    def made() -> Any:
        return Masked().double() if form == "loop" else Pairs(first=True).double()

    parallel: Any = parallelize(
        made(), mesh_of(2, 2), cluster=slow_devices(), timeout=WAIT, search=Search(roles={"a": "data", "b": "expert"})
    )
    g = torch.Generator().manual_seed(0)
    batches = [{"x": torch.randn(8, 4, HIDDEN, generator=g, dtype=torch.float64)} for _ in range(STEPS)]
    return follow(parallel, made(), batches), len(parallel.up.to_local())


@pytest.mark.slow
@pytest.mark.parametrize("form", ["loop", "looked up"])
def test_ranks_have_experts_of_other_forms(ranks: Ranks, form: str) -> None:
    """A loop over a parameter's matrices; matrices that are looked up for each pair, of which some ranks have none."""
    results = ranks.run(train_other_form, form)
    assert max(worst for worst, _ in results) < TOLERANCE
    assert {experts for _, experts in results} == {2}


def family(name: str) -> Any:
    """A tiny model of transformers in float64, whose grouped products take it."""
    import transformers
    from transformers.integrations import moe

    moe._can_use_grouped_mm = lambda *_: False  # torch's own takes no float64 on CPUs
    common = {
        "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "use_cache": False, "tie_word_embeddings": False, "max_position_embeddings": 32,
    }  # fmt: skip
    torch.manual_seed(0)
    config = {
        "mixtral": lambda: transformers.MixtralConfig(**common, intermediate_size=32, num_local_experts=4),
        "qwen3": lambda: transformers.Qwen3MoeConfig(
            **common, intermediate_size=32, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2, head_dim=4
        ),
        "deepseek": lambda: transformers.DeepseekV3Config(
            **common, intermediate_size=32, moe_intermediate_size=16, n_routed_experts=8, num_experts_per_tok=2,
            n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4,
            qk_nope_head_dim=4, v_head_dim=4, n_shared_experts=1,
        ),
        "gpt-oss": lambda: transformers.GptOssConfig(
            **common, intermediate_size=16, num_local_experts=4, num_experts_per_tok=2, head_dim=4
        ),
    }[name]()  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).double()


def train_family(rank: int, name: str, options: dict[str, Any]) -> float:
    from autopar.ir.ops import routing
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    g = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 64, (8, 8), generator=g) for _ in range(STEPS)]
    parallel: Any = parallelize(
        family(name), mesh_of(2, 2), cluster=slow_devices(), timeout=WAIT, search=Search(**options)
    )
    worst = follow(parallel, family(name), [{"input_ids": i, "labels": i} for i in ids])
    assert any(n.target is routing.route for n in parallel.forward_graph.graph.nodes)
    return worst


@pytest.mark.deep
@pytest.mark.parametrize(
    "options", [{"recipe": "fsdp"}, {"recipe": "expert"}, {}, {"recipe": "random", "seed": 1}], ids=str
)
@pytest.mark.parametrize("name", ["mixtral", "qwen3", "deepseek", "gpt-oss"])
def test_families(ranks: Ranks, name: str, options: dict[str, Any]) -> None:
    """Transformers rounds to float32 in its norms, router and rotary embedding: 2e-5 was measured, emulated 2e-15."""
    assert max(ranks.run(train_family, name, options)) < 1e-4
