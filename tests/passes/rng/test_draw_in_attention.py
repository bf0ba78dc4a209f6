"""draw_in_attention: on GPUs attention draws its dropout itself, block by block, and forward and backward alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import autopar
from autopar.compiler import for_devices, program_of, rewrite, solve
from autopar.costs.cluster import Cluster
from autopar.ir.ops.random import step_seed
from autopar.ir.plan import EVERY, Plan
from autopar.ir.program import Program, draws
from autopar.passes import DETERMINISTIC_PASSES, PASSES, Pass
from autopar.passes.rng.draw_in_attention import draw_in_attention
from autopar.rules.shapes.kernel_shapes import called
from autopar.search.emitted.peak import saved_for_backward
from autopar.search.options import Search
from autopar.sharding.candidates import candidates
from autopar.sharding.dims import analyze
from autopar.sharding.operator_cost import operator_work
from autopar.strategies.attention.operators import FORWARD_PASSES
from autopar.verify.verify import compare, global_values
from tests import models as zoo
from tests.crossed import crossed, seeds
from tests.plans import hand_plan, show

AXES = {"a": 2, "b": 2}
OURS = torch.ops.autopar
H100 = Cluster.preset("h100")


class Dropping(nn.Module):
    """Causal attention with dropout, of queries that are computed from a parameter."""

    def __init__(self, kv_heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.kv_heads = nn.Linear(8, 32), kv_heads
        self.k, self.v = (nn.Linear(8, 8 * kv_heads) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        shared = {"enable_gqa": True} if self.kv_heads < 4 else {}
        return scaled_dot_product_attention(q, k, v, dropout_p=0.4, is_causal=True, **shared).square().sum()


def batch(rows: int = 4) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 6, 8, generator=torch.Generator().manual_seed(1))}


def planned(program: Program, split: dict[str, str], cluster: Cluster = H100, axes: dict[str, int] = AXES) -> Plan:
    return replace(hand_plan(program, axes, split), cluster=cluster)


SPLIT = {"draw": "a.0 b.0", "attention": "b.0 h.0", "attention_backward": "b.0 h.0"}


def targets(program: Program) -> list[Any]:
    return [called(n) for n in program.graph.graph.nodes if n.op == "call_function"]


def test_before_and_after() -> None:
    program = program_of(Dropping(), batch())
    plan = planned(program, SPLIT)
    before, after = (
        show(rewrite(program, plan, passes=tuple(p for p in PASSES if p.__name__ != left_out)))
        for left_out in ("draw_in_attention", "")
    )
    assert "seeded(autopar.draw.default, 0, add, 'dropout', [0.4, 4], [2, 2, 6, 6]" in before
    assert "autopar.attention(" in before and "autopar.attention_backward(" in before
    assert "dropout'" not in after
    assert "seeded(autopar.attention_drawing.default, 0, add, " in after
    assert ", 0.4, True, None, False)" in after.partition("autopar.attention_drawing_backward(")[2].partition("\n")[0]


@pytest.mark.parametrize(
    ("split", "cluster", "passes"),
    [
        (SPLIT, Cluster.preset("cpu"), PASSES),  # no kernel draws
        (SPLIT, H100, DETERMINISTIC_PASSES),  # the numbers of one device
        (SPLIT | {"attention_backward": "h.0 b.0"}, H100, PASSES),  # redistributed in between
        (SPLIT | {"draw": "R a.0"}, H100, PASSES),
    ],
)
def test_elsewhere_it_stays_a_mask(split: dict[str, str], cluster: Cluster, passes: tuple[Pass, ...]) -> None:
    program = program_of(Dropping(), batch())
    found = targets(rewrite(program, planned(program, split, cluster), passes=passes))
    assert found.count(OURS.draw.default) == 1
    assert OURS.attention_drawing.default not in found


def test_one_gpu_draws_from_its_own_generator() -> None:
    """As eager PyTorch does there: no seed stands before it."""
    program = program_of(Dropping(), batch())
    local = rewrite(program, planned(program, {}, axes={"a": 1}), passes=DETERMINISTIC_PASSES)
    assert OURS.attention_drawing.default in [n.target for n in local.graph.graph.nodes]
    assert sum(draws(n) for n in local.graph.graph.nodes) == 1


def step(program: Program, plan: Plan, values: list[Tensor], seed: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
    with step_seed(seed):
        report = compare(program, rewrite(program, plan), plan, values, torch.float64)
    return report.loss, dict(report.gradients)


@pytest.mark.some(2)
@pytest.mark.parametrize(("split", "kv_heads"), crossed(["b.0 h.0", "b.0 b.0", "R h.0", "R R"], [4, 2]))
def test_forward_and_backward_drop_the_same_elements(split: str, kv_heads: int) -> None:
    """The gradient of a step is that of its loss, by differences, with the same elements dropped."""
    model, tokens = Dropping(kv_heads).double(), {"x": batch()["x"].double()}
    program = program_of(model, tokens)
    letters = {"b.0": "a.0", "h.0": "b.0", "R": "R"}
    drawn = " ".join(letters[s] for s in split.split())
    plan = planned(program, {"draw": drawn, "attention": split, "attention_backward": split})
    assert OURS.attention_drawing.default in targets(rewrite(program, plan))
    values = global_values(program, model, tokens)
    loss, gradients = step(program, plan, values)
    assert not torch.equal(loss, step(program, plan, values, seed=2)[0])
    names = [spec.name if spec.kind == "parameter" else "" for spec in program.inputs]
    for name, gradient in gradients.items():
        direction = torch.randn(gradient.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        sides = [
            step(
                program,
                plan,
                [v + s * 1e-5 * direction if n == name else v for n, v in zip(names, values, strict=True)],
            )[0]
            for s in (1, -1)
        ]
        found = (sides[0] - sides[1]) / 2e-5
        torch.testing.assert_close(found, (gradient * direction).sum(), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "pins",
    [
        pytest.param({"stages": 2, "microbatches": 2}, marks=pytest.mark.deep),
        pytest.param({"microbatches": 2}, marks=pytest.mark.deep),
        {},
    ],
    ids=lambda p: " ".join(p) or "recomputed",
)
def test_kernels_draw_what_masks_would_be(pins: dict[str, Any]) -> None:
    """From the same seeds: in stages, in microbatches, and where the backward pass draws once more."""
    model, tokens = zoo.gpt2(16, layers=2, heads=2, batch=4, seq=4, attn_pdrop=0.3)
    model = model.double()
    program = program_of(model, tokens)
    plan = solve(program, AXES, "h100", search=Search(pins=pins))
    if not pins:
        drawn = [name for name in plan.choices if "forward autopar." in name]
        plan = replace(plan, recompute=dict.fromkeys(drawn, EVERY))
    values, found = global_values(program, model, tokens), []
    for passes in (PASSES, tuple(p for p in PASSES if p is not draw_in_attention)):
        local = rewrite(program, plan, passes=passes)
        assert (OURS.attention_drawing.default in targets(local)) == (passes is PASSES)
        with step_seed(1):
            found.append(compare(program, local, plan, values, torch.float64).gradients)
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=1e-10, atol=1e-12)


def test_what_is_kept_counts_nothing_where_kernels_draw_it() -> None:
    program = program_of(*zoo.gpt2(16, heads=4, batch=4, seq=16, attn_pdrop=0.1))
    bytes_of = {}
    for name in ("cpu", "h100"):
        counted = for_devices(program, Cluster.preset(name).device, AXES, deterministic=False)
        (node,) = (n for n in program.graph.graph.nodes if n.target is OURS.draw.default)
        bytes_of[name] = analyze(counted).types[node, 0].bytes
    assert bytes_of == {"cpu": 4 * 4 * 16 * 16, "h100": 0}
    moved = {}
    for name in ("cpu", "h100"):
        counted = for_devices(program, Cluster.preset(name).device, AXES, deterministic=False)
        operator = next(o for n, o in analyze(counted).operators.items() if n.target is OURS.attention.default)
        moved[name] = float(operator_work(operator, candidates(operator, ()), ()).moved[0])
    assert moved["h100"] == 4 * (4 * 4 * 16 * (4 * 4 + 1))  # queries, keys, values, results, and logarithms
    scores = 4 * 4 * 16 * 16
    assert moved["cpu"] == moved["h100"] + scores + FORWARD_PASSES * 4 * scores
    deterministic = for_devices(program, H100.device, AXES, deterministic=True)
    assert not deterministic.drawn_in_kernels
    plans = [planned(program, {}, Cluster.preset(name)) for name in ("cpu", "h100")]
    saved = [saved_for_backward(rewrite(program, plan), plan) for plan in plans]
    # No mask, but the random state; and the formula's result is row-major: what is reshaped is a copy of it.
    assert saved[0] - saved[1] == scores - 24 + 4 * (4 * 16 * 16)


@pytest.mark.slow
def test_a_gpt2_with_its_dropout_splits_attention_on_gpus() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        config = GPT2Config(
            n_layer=2, n_positions=1024, n_embd=1024, n_head=16, vocab_size=1024, bos_token_id=0, eos_token_id=0,
            use_cache=False,
        )  # fmt: skip
        model = GPT2LMHeadModel(config)
        tokens = torch.zeros(64, 1024, dtype=torch.long)
    assert config.attn_pdrop > 0
    plan = autopar.plan(
        model, {"input_ids": tokens, "labels": tokens}, cluster="h100", axes={"gpu": 8}, precision="bf16"
    )
    ours = {k: v for k, v in plan.choices.items() if "autopar.attention" in k or "attn: forward autopar.draw" in k}
    assert len(ours) == 3  # in one class of layers
    assert all(names != ("R",) for names in ours.values())


def test_random_plans_for_gpus_run_with_masks_or_without() -> None:
    model, tokens = Dropping(2).double(), {"x": batch()["x"].double()}
    program = program_of(model, tokens)
    values = global_values(program, model, tokens)
    for seed in seeds(4, 2):
        plan = solve(program, AXES, "h100", search=Search(recipe="random", seed=seed))
        local = rewrite(program, plan, passes=DETERMINISTIC_PASSES)
        assert compare(program, local, plan, values, torch.float64).max_error < 1e-10
