"""Layers that are treated unlike: plans in parts, and what a budget of kept bytes leads to."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.compiler import peak_of, program_of, program_to_plan, rewrite, solve
from autopar.ir.graph import is_backward
from autopar.ir.plan import EVERY, Plan
from autopar.ir.program import Program
from autopar.memory.recompute import uniform, weighted
from autopar.search.predict import predict
from autopar.sharding.dims import analyze
from autopar.sharding.layer_classes import layer_classes
from autopar.verify.verify import compare, global_values
from benchmarks import recompute
from tests import models
from tests.capture.test_repeat import AXES, EAGER
from tests.explain.tables.stand_ins import hand_made_plan

LAST = EVERY[0][1]


def of_parts(names: dict[str, list[bool]], ends: list[float], count: dict[str, int]) -> Plan:
    """A plan that makes again what is marked of each part."""
    table = {}
    for name, marked in names.items():
        cuts = [0, *(math.ceil(end * count[name] - 1e-9) for end in ends[:-1]), LAST]
        ranges = [pair for pair, own in zip(itertools.pairwise(cuts), marked, strict=True) if own]
        table[name] = tuple(pair for pair in ranges if pair[0] < pair[1])
    return replace(hand_made_plan(), recompute={name: ranges for name, ranges in table.items() if ranges})


@given(
    cuts=st.lists(st.integers(1, 31), max_size=4, unique=True),
    marks=st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=3, max_size=3),
)
def test_parts_say_of_each_member_what_the_plan_says(cuts: list[int], marks: list[list[bool]]) -> None:
    ends = [*(cut / 32 for cut in sorted(cuts)), 1.0]
    count = {"layer": 32, "twice": 64, "once": 1}
    plan = of_parts({k: m[: len(ends)] for k, m in zip(count, marks, strict=True)}, ends, count)
    parts = uniform(plan, count)
    assert sum(share for share, _ in parts) == pytest.approx(1.0)
    for name in ("layer", "twice"):
        seen: list[bool] = []
        for share, part in parts:
            seen += [name in part.recompute] * round(share * count[name])
        assert seen == [any(a <= i < b for a, b in plan.recompute.get(name, ())) for i in range(count[name])]
    assert len({("once" in part.recompute) for _, part in parts}) == 1


def test_weighted() -> None:
    parts = [(0.5, {"a": 1.0, "b": {"x": 4}}), (0.25, {"a": 2.0}), (0.25, {"a": 4.0, "b": {"y": 8}})]
    assert weighted(parts) == {"a": 2.0, "b": {"x": 2, "y": 2}}
    assert weighted([(0.5, 3), (0.5, 4)]) == 4


def in_three_parts(plan: Plan, program: Program) -> Plan:
    """The first two blocks make everything again, three some of it, and the rest nothing."""
    classes = layer_classes(program, analyze(program))
    own = {k: nodes[0] for k, nodes in classes.members.items() if classes.count[k] == 8}
    names = [k for k, node in own.items() if node.op == "call_function" and not is_backward(node)]
    table = {name: ((0, 5 if i % 3 == 0 else 2),) for i, name in enumerate(names)}
    return replace(plan, recompute=table)


@pytest.mark.deep
def test_three_kinds_of_blocks_of_a_model_that_is_captured_in_part() -> None:
    """Time is that of the whole model's graph, and memory about that, never less."""
    model, batch = models.MODELS["llama"](layers=8, seq=4)
    whole, short = program_of(model, batch), program_to_plan(model, batch)
    assert short.repeat is not None
    plan = in_three_parts(solve(short, AXES, EAGER), short)
    assert len(uniform(plan, layer_classes(short, analyze(short)).count)) == 3
    deep = replace(plan, fingerprint=whole.fingerprint)
    found, expected = (predict(p, analyze(p), x).predicted for p, x in ((short, plan), (whole, deep)))
    assert found.step_seconds == pytest.approx(expected.step_seconds, rel=1e-3)
    held, of_whole = (sum(peak_of(p, x).values()) for p, x in ((short, plan), (whole, deep)))
    assert of_whole * (1 - 1e-3) <= held <= of_whole * 1.2


@pytest.mark.parametrize(
    ("name", "solver", "budget"),
    [
        pytest.param("gpt2", "dp", 0.2, marks=pytest.mark.deep),
        pytest.param("vit", "dp", 0.5, marks=pytest.mark.deep),
        pytest.param("llama", "dp", 0.2, marks=pytest.mark.deep),
        pytest.param("llama", "greedy", 0.2, marks=pytest.mark.deep),
        pytest.param("unet", "ilp", 0.2, marks=pytest.mark.slow),
    ],
)
def test_no_more_is_recomputed_than_by_torch_in_as_many_bytes(name: str, solver: str, budget: float) -> None:
    """Prices alone mix whole layers, and leave a tenth of the bytes unused; the plan still computes the same."""
    torch.manual_seed(0)
    model, batch = recompute.MODELS[name]()
    raw = recompute.capture(model, batch)
    program = recompute.canonical(raw)
    theirs = recompute.partitioned(name, raw, solver, budget)
    plan = recompute.plan_keeping(program, theirs.saved)
    kept, again = recompute.kept_by(program, plan)
    assert kept <= theirs.saved
    assert recompute.flops(again) <= theirs.flops
    report = compare(program, rewrite(program, plan), plan, global_values(program, model, batch), torch.float64)
    assert report.gradients.keys() == report.reference_gradients.keys() != set()
    assert report.max_error <= 1e-10
