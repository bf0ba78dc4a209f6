"""Lowerings cost what they emit, and the planned compute of whole models is what the simulated device works."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from functools import cache

import pytest
import torch

import autopar
from autopar.compiler import program_of, rewrite, solve
from autopar.costs.cluster import Cluster
from autopar.costs.kernels import Work, kernel_seconds
from autopar.ir.node_info import info
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes import PASSES
from autopar.passes.lower_operators import lower_operators
from autopar.rules.remembered import forget
from autopar.search.predict import predict
from autopar.search.random_plan import random_plan
from autopar.sharding.assignment import machine_of
from autopar.sharding.candidates import candidates
from autopar.sharding.dims import analyze
from autopar.sharding.lowered import cost
from autopar.sharding.lowered.cost import lowered_cost
from autopar.sharding.node_seconds import NodeSeconds
from autopar.sharding.operator_cost import arithmetic_dtype, operator_seconds
from autopar.simulate import simulate
from autopar.simulate.graph_tasks import emitted
from tests import models as zoo
from tests.plans import hand_plan

H100 = Cluster.preset("h100")
UNTIL = PASSES[: PASSES.index(lower_operators) + 1]


@cache
def captured(name: str) -> Program:
    """Models large enough that kernels outlast their launches; nothing is computed."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        ViTConfig,
        ViTForImageClassification,
    )

    with torch.device("meta"):
        if name == "vit":
            model = ViTForImageClassification(ViTConfig(num_hidden_layers=2, num_labels=1000))
            labels = torch.zeros(8, dtype=torch.long)
            return program_of(model, {"pixel_values": torch.zeros(8, 3, 224, 224), "labels": labels})
        ids = torch.zeros(8, 1024, dtype=torch.long)
        if name == "gpt2":
            model = GPT2LMHeadModel(GPT2Config(n_layer=2, use_cache=False))
        else:
            model = LlamaForCausalLM(LlamaConfig(
                vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=2,
                num_attention_heads=32, num_key_value_heads=8, use_cache=False, tie_word_embeddings=False,
            )).bfloat16()  # fmt: skip
        return program_of(model, {"input_ids": ids, "labels": ids})


def ratio(program: Program, plan: Plan) -> float:
    """Seconds that the simulated device computes, to those that were predicted."""
    return simulate(emitted(rewrite(program, plan), plan)).busy[0] / plan.predicted.compute_seconds


class Documents(torch.nn.Module):
    """Attention within documents: no window, and not causal."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        heads = self.first(x).unflatten(-1, (2, 8)).transpose(1, 2)
        mask = ids[:, None, :, None] == ids[:, None, None, :]
        return torch.nn.functional.scaled_dot_product_attention(heads, 2 * heads, 3 * heads, attn_mask=mask).sum()


@pytest.mark.parametrize("kind", ["causal", "documents"])
def test_a_long_ring_is_priced_by_a_short_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same kernels and collectives, in the same order, as all of its steps emitted."""
    if kind == "causal":
        program = program_of(*zoo.MODELS["llama"](layers=1, seq=32))
    else:
        program = program_of(Documents(), {"x": torch.zeros(2, 32, 16), "ids": torch.zeros(2, 32, dtype=torch.long)})
    operators = [o for o in dict.fromkeys(analyze(program).operators.values()) if "qk" in o.rule.lower]
    machine = machine_of(hand_plan(program, {"a": 16}, {}))
    rings = [
        (o, names)
        for o in operators
        for names in {candidates(o, (16,)).names(i) for i in range(len(candidates(o, (16,)).choice))}
        if names[0].startswith("qk")
    ]
    assert len(rings) >= 2  # forward and backward
    found = [lowered_cost(*ring, machine) for ring in rings]
    forget()
    monkeypatch.setattr(cost, "SHORT_RING", 16)
    for short, whole in zip(found, (lowered_cost(*ring, machine) for ring in rings), strict=True):
        assert short is not None
        assert whole is not None
        assert short.times == 12  # and the whole one has no steps that are not emitted
        assert whole.times == 0
        assert short.events == whole.events
        assert short.collectives == whole.collectives
        assert short.seconds("float32", machine) == pytest.approx(whole.seconds("float32", machine), rel=1e-9)
        assert sum(short.collectives.values()) >= 15
        assert all((getattr(short.kernels, f.name) == getattr(whole.kernels, f.name)).all() for f in fields(Work))
    forget()


FLAT, NESTED = {"gpu": 8}, {"node": 2, "gpu": 4}
PLANS = [
    ("llama", None, FLAT),
    *(pytest.param("llama", recipe, FLAT, marks=pytest.mark.deep) for recipe in ("ddp", "fsdp", "megatron")),
    pytest.param("llama", "megatron", NESTED, marks=pytest.mark.deep),
    pytest.param("llama", None, NESTED, marks=pytest.mark.deep),
    *(pytest.param(name, None, NESTED, marks=pytest.mark.deep) for name in ("gpt2", "vit")),
    *(pytest.param(name, None, FLAT, marks=pytest.mark.deep) for name in ("gpt2", "vit")),
    *(
        pytest.param(name, recipe, axes, marks=pytest.mark.deep)
        for name in ("gpt2", "vit")
        for recipe, axes in (("ddp", FLAT), ("fsdp", FLAT), ("megatron", FLAT), ("hsdp", NESTED), ("megatron", NESTED))
    ),
]


@pytest.mark.parametrize(("name", "recipe", "axes"), PLANS)
def test_what_is_emitted_computes_as_long_as_predicted(name: str, recipe: str | None, axes: dict[str, int]) -> None:
    program = captured(name)
    plan = solve(program, axes, H100, search=autopar.Search(recipe=recipe))
    assert 0.97 <= ratio(program, plan) <= 1.03


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama", pytest.param("vit", marks=pytest.mark.deep), pytest.param("gpt2", marks=pytest.mark.deep)]
)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in (1, 2))])
def test_of_random_plans_too(name: str, seed: int) -> None:
    """Their values go through several moves: what is copied for strides is copied before the first only."""
    program, axes = captured(name), {"a": 2, "b": 2}
    dims = analyze(program)
    plan = predict(program, dims, random_plan(program, dims, axes, H100, seed, recompute=seed > 1))
    assert 0.9 <= ratio(program, plan) <= 1.03


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "every"), [("gpt2", False), *(pytest.param(n, True, marks=pytest.mark.deep) for n in ("gpt2", "bert"))]
)
def test_every_lowering_costs_its_nodes(name: str, every: bool) -> None:
    """An operator that is split as it likes, all others whole: the kernels and collectives of its nodes.

    Unless every pair is tried, each way to split comes up on each axis.
    """
    program = program_of(*zoo.MODELS[name]())
    dims, axes = analyze(program), {"a": 2, "b": 2}
    seen, count = set(), 0
    for node, operator in dims.operators.items():
        if not operator.rule.lower or operator in seen:
            continue
        seen.add(operator)
        tried = set[tuple[int, str]]()
        for i in range(len((chosen := candidates(operator, (2, 2))).choice)):
            names = chosen.names(i)
            if not every and tried >= set(enumerate(names)):
                continue
            plan = hand_plan(program, axes, {node.name: " ".join(names)})
            machine = machine_of(plan)
            found = lowered_cost(operator, names, machine)
            if found is None or any(n.startswith("P") for n in names):
                continue
            tried |= set(enumerate(names))
            before = {n.name for n in rewrite(program, plan, passes=UNTIL[:-1]).graph.graph.nodes}
            after = rewrite(program, plan, passes=UNTIL).graph.graph.nodes
            seconds, own = NodeSeconds(machine), [n for n in after if n.name not in before]
            kernels = sum(seconds.kernel(n)[0] for n in own if info(n).collective is None)
            made = [info(n).collective for n in own if info(n).collective is not None]
            dtype = arithmetic_dtype(operator, machine.device)
            assert kernel_seconds(found.kernels, dtype, machine.device).sum() == pytest.approx(kernels, rel=1e-6)
            assert found.collectives == Counter(made)
            one = candidates(operator, (2, 2), allowed=[[n] for n in names])
            sent = sum(seconds.collective(c) for c in made if c is not None)
            # Beside one another as far as the code's order lets them, such as the exchanges of a ring.
            in_a_ring = any(n.startswith("qk") for n in names)
            least = max(kernels, sent) if in_a_ring else kernels + sent
            assert float(operator_seconds(operator, one, machine)[0]) >= 0.999 * least
            count += 1
    assert count > 10
