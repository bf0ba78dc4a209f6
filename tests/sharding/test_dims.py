"""Dimension analysis: factors are found by themselves, contradictions stay apart, every plan through them is right."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autopar
from autopar.compiler import program_of, rewrite
from autopar.costs.cluster import Cluster
from autopar.ir.layout import TensorType
from autopar.ir.program import Program
from autopar.search.random_plan import random_plan
from autopar.sharding.dims import Dims, analyze
from autopar.sharding.factor_classes import FactorClasses
from autopar.verify.verify import compare, global_values
from tests import models
from tests.crossed import seeds

AXES = {"a": 2, "b": 2}


def type_of(program: Program, dims: Dims, name: str) -> TensorType:
    node = next(n for n, i in zip(program.placeholders, program.inputs, strict=True) if i.name == name)
    return dims.type_of(node)


def factors(type_: TensorType) -> list[str]:
    return [" ".join(f"{f.name}:{f.size}" for f in dim) for dim in type_.dims]


def worst_random(captured: tuple[Program, Dims, list[torch.Tensor]], seeds: range) -> float:
    program, dims, values = captured
    found = []
    for seed in seeds:
        plan = random_plan(program, dims, AXES, Cluster.preset("cpu"), seed)
        found.append(compare(program, rewrite(program, plan), plan, values, torch.float64).max_error)
    return max(found)


def test_grouped_queries_are_found() -> None:
    program, dims, _ = models.captured("llama", seq=4)
    assert factors(type_of(program, dims, "model.layers.0.self_attn.q_proj.weight")) == [
        "kv_heads:4 group:2 head.0:2 head.1:2",
        "hidden:32",
    ]
    assert (
        factors(type_of(program, dims, "model.layers.0.self_attn.k_proj.weight"))[0] == "kv_heads:4 head.0:2 head.1:2"
    )
    assert factors(type_of(program, dims, "model.layers.0.mlp.up_proj.weight")) == ["ffn:64", "hidden:32"]
    assert factors(type_of(program, dims, "model.embed_tokens.weight")) == ["vocab:64", "hidden:32"]
    assert factors(type_of(program, dims, "0")) == ["batch:8", "seq:4"]


@pytest.mark.parametrize(
    ("name", "parameter", "dim"),
    [("gpt2", "transformer.h.0.attn.c_attn.weight", 1), ("encoder", "encoder.layers.0.self_attn.in_proj_weight", 0)],
)
def test_fused_projection_is_three_by_heads_by_head(name: str, parameter: str, dim: int) -> None:
    program, dims, _ = models.captured(name, seq=4)
    assert [f.size for f in type_of(program, dims, parameter).dims[dim]] == [3, 4, 8]
    assert factors(type_of(program, dims, parameter))[dim].split()[1:] == ["heads:4", "head:8"]
    assert factors(type_of(program, dims, parameter))[1 - dim] == "hidden:32"


def test_every_view_of_a_transformer_keeps_its_letters() -> None:
    """No view of these models stands in the way of a split."""
    for name in ("gpt2", "llama"):
        _, dims, _ = models.captured(name, seq=4)
        for node, operator in dims.operators.items():
            if operator.rule.view:
                assert set(operator.letters) == set(operator.rule.letters), f"{name}: {node} {operator.rule.equation}"


def test_incompatible_factorings_do_not_merge() -> None:
    found = FactorClasses()
    dim = found.new(320)
    norm, heads = [*found.new(32), *found.new(10)], [*found.new(5), *found.new(64)]
    assert found.unite(dim, norm)
    before = (list(found.parent), list(found.parts), found.expand(dim))
    assert not found.unite(dim, heads)  # 5 and 32: neither divides the other
    assert (found.parent[: len(before[0])], found.parts[: len(before[1])], found.expand(dim)) == before
    assert [found.size[f] for f in found.expand(heads)] == [5, 64]


def test_failure_after_some_success_is_undone() -> None:
    found = FactorClasses()
    left = [*found.new(4), *found.new(6)]
    right = [*found.new(2), *found.new(2), *found.new(4), *found.new(2)]  # 4 = 2 * 2, then 6 against 4
    assert not found.unite(left, right)
    assert [found.size[f] for f in found.expand(left)] == [4, 6]
    assert [found.size[f] for f in found.expand(right)] == [2, 2, 4, 2]
    assert len({found.find(f) for f in (*left, *right)}) == 6


shapes = st.lists(st.sampled_from([2, 3, 4, 6, 5]), max_size=4)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12), st.lists(shapes, min_size=6, max_size=6))
def test_uniting_keeps_sizes_and_is_all_or_nothing(pairs: list[tuple[int, int]], groups: list[list[int]]) -> None:
    found = FactorClasses()
    dims = [[f for n in group for f in found.new(n)] for group in groups]
    for i, j in pairs:
        before = [found.expand(d) for d in dims]
        done = found.unite(dims[i], dims[j])
        assert [math.prod(found.size[f] for f in found.expand(d)) for d in dims] == [math.prod(g) for g in groups]
        if done:
            assert found.expand(dims[i]) == found.expand(dims[j])
        else:
            assert [found.expand(d) for d in dims] == before
        assert set(found.sizes()) >= {f for d in dims for f in found.expand(d)}


class Contradiction(nn.Module):
    """One dim of 40 as 4 x 10 and as 5 x 8, through the weight, the activation and the sum of both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 40)
        self.scale = nn.Parameter(torch.randn(40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        left, right = y.view(8, 4, 10).softmax(-1), (y * self.scale).view(8, 5, 8).softmax(-1)
        return (left.reshape(8, 40) * right.reshape(8, 40)).pow(2).sum() + y.sum()


def test_plans_through_incompatible_factorings_are_right() -> None:
    torch.manual_seed(0)
    model, batch = Contradiction(), (torch.randn(8, 8),)
    dims = analyze(program_of(model, batch))
    cut = [n.name for n, o in dims.operators.items() if set(o.letters) != set(o.rule.letters)]
    assert cut  # somewhere the two meet, and the dim cannot be split there
    for seed in seeds(2):
        report = autopar.verify(model, batch, AXES, plan="random", seed=seed)
        assert report.max_error < 1e-10, (seed, report.worst)
    assert autopar.verify(model, batch, {"a": 4}).max_error < 1e-10


def test_gradients_lie_as_their_parameters() -> None:
    """Even where the backward pass sees a dim in other factors: the same split must mean the same blocks."""
    model, batch = Contradiction(), (torch.randn(8, 8),)
    program = program_of(model, batch)
    dims = analyze(program)
    for output, value in zip(program.outputs, program.output_values, strict=True):
        if output.kind == "gradient" and value is not None:
            assert dims.type_of(value).dims == type_of(program, dims, output.name).dims


def similar() -> tuple[Program, Dims, list[torch.Tensor]]:
    """How much alike the rows of each sample are."""

    class Similar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = self.inner(x)
            return (rows @ rows.mT).softmax(-1).square().mean()

    torch.manual_seed(0)
    model, batch = Similar(), (torch.randn(8, 4, 6),)
    program = program_of(model, batch)
    return program, analyze(program), global_values(program, model, batch)


@pytest.mark.parametrize(
    ("name", "arguments", "shape"),
    [
        ("similar", {}, (8, 4, 4)),
        ("residual", {}, (16, 16)),
        pytest.param("bert", {"seq": 4}, (32, 32), marks=pytest.mark.deep),
    ],
)
def test_one_factor_twice_in_a_tensor(name: str, arguments: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Scores, the square weight of a residual block, BERT's transform before its head."""
    captured = similar() if name == "similar" else models.captured(name, **arguments)
    assert any(t.shape == shape and t.dims[-1] == t.dims[-2] for t in captured[1].types.values())
    assert worst_random(captured, range(1 if name == "bert" else 2)) < 1e-10


class ThereAndBack(nn.Module):
    """Square tensors: both transpositions are the same call, but only the first result is laid out by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x.mT * self.scale).mT.exp()).square().mean()


def test_operators_are_shared_only_by_results_that_are_moved_alike() -> None:
    """A redistribution of what has other strides copies, and may take another path."""
    program = program_of(ThereAndBack(), (torch.randn(8, 4, 4),))
    dims = analyze(program)
    seen = set()
    for node, shared in dims.operators.items():
        for i, own in enumerate(shared.outputs):
            assert own is None or own.relaid == dims.types[node, i].relaid, node.name
            seen |= {own.relaid} if own is not None and node.target is torch.ops.aten.permute.default else set()
    assert len(seen) > 1


def test_analysis_is_deterministic() -> None:
    program, dims, _ = models.captured("mlp")
    assert analyze(program) is dims  # remembered
    again = analyze(replace(program))
    assert again is not dims
    assert dims.types == again.types
    assert {n: o.letters for n, o in dims.operators.items()} == {n: o.letters for n, o in again.operators.items()}
