"""apply_precision: what is kept, what is computed with, and in which dtype gradients are added up."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Precision, Search
from autopar.compiler import peak_of, program_of, rewrite, solve
from autopar.ir.graph import values_of
from autopar.ir.node_info import info
from autopar.ir.program import Program
from autopar.sharding.dims import analyze
from tests import models as zoo
from tests.crossed import seeds

aten = torch.ops.aten
BF16 = Precision()


def dtypes(program: Program, kind: str) -> set[torch.dtype]:
    """Of the placeholders of a kind that are floating."""
    pairs = zip(program.placeholders, program.inputs, strict=True)
    return {n.meta["val"].dtype for n, i in pairs if i.kind == kind and n.meta["val"].is_floating_point()}


def reductions(program: Program) -> list[tuple[bool, torch.dtype]]:
    """Of every collective that adds up: whether it is for a gradient only, and in which dtype it adds."""
    found = [n for n in program.graph.graph.nodes if info(n).collective]
    adding = [n for n in found if info(n).collective.kind in ("all_reduce", "reduce_scatter")]
    return [(info(n).collective.gradient, n.all_input_nodes[0].meta["val"].dtype) for n in adding]


def test_parameters_are_kept_in_one_dtype_and_computed_with_in_another() -> None:
    program = program_of(*zoo.mlp(), precision=BF16)
    assert dtypes(program, "parameter") == dtypes(program, "batch") == {torch.float32}
    products = [n for n in program.graph.graph.nodes if n.target is aten.mm.default]
    assert {n.meta["val"].dtype for n in products} == {torch.bfloat16}
    outputs = zip(program.outputs, program.output_values, strict=True)
    assert {v.meta["val"].dtype for o, v in outputs if o.kind == "gradient" and v} == {torch.float32}


def test_same_numbers_as_casting_by_hand() -> None:
    """The loss and float32 gradients of ``functional_call`` with cast parameters, up to bfloat16's rounding."""
    model, batch = zoo.mlp()
    plain = copy.deepcopy(model)
    cast = {n: p.to(torch.bfloat16) for n, p in plain.named_parameters()}
    expected = torch.func.functional_call(plain, cast, kwargs={k: v.to(torch.bfloat16) for k, v in batch.items()})
    expected.backward()
    module = autopar.parallelize(model, None, precision="bf16")
    loss = module(**batch)
    loss.backward()
    assert loss.dtype == torch.bfloat16
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0)
    for name, parameter in plain.named_parameters():
        found = dict(module.named_parameters())[name].grad
        assert found is not None and found.dtype == torch.float32 and parameter.grad is not None
        assert float((found - parameter.grad).abs().max()) <= 0.02 * float(parameter.grad.abs().max()), name


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        ("mlp", None),
        ("mlp", "random"),
        *(pytest.param("llama", recipe, marks=pytest.mark.deep) for recipe in ("random", None)),
    ],
)
def test_equivalence_in_float64(model: str, recipe: str | None) -> None:
    report = autopar.verify(*zoo.MODELS[model](), {"a": 2, "b": 2}, plan=recipe, precision=BF16)
    assert report.max_error <= 1e-10, report.worst
    assert report.capture_error <= 0.3


def test_gradients_are_added_up_in_float32_wherever_a_plan_does_it() -> None:
    program = program_of(*zoo.mlp(), precision=BF16)
    for seed in seeds(8, 3):
        plan = solve(program, {"a": 2, "b": 2}, "cpu", search=Search(recipe="random", seed=seed))
        for gradient, dtype in reductions(rewrite(program, plan)):
            assert not gradient or dtype == torch.float32
    marked = [n for n in program.graph.graph.nodes if info(n).reduce_dtype is not None]
    assert {aten.mm.default, aten.sum.dim_IntList} <= {n.target for n in marked}


def test_the_search_gathers_parameters_in_the_dtype_of_computing_and_reduces_after_the_cast() -> None:
    """Full sharding: bf16 all-gathers, float32 reduce-scatters, no casts around them."""
    program = program_of(*zoo.mlp(hidden=64, ffn=256, batch=16384), precision=BF16)
    pins = {"batch.*": ("S(0)",), "*.weight": ("S(0)",)}
    plan = solve(program, {"a": 4}, "cpu", search=Search(pins=pins))
    local = rewrite(program, plan)
    gathers = [n for n in local.graph.graph.nodes if info(n).collective and info(n).collective.kind == "all_gather"]
    large = [v for n in gathers for v in values_of(n) if v is not None and v.numel() == 64 * 256]
    assert large and {v.dtype for v in large} == {torch.bfloat16}
    assert {d for _, d in reductions(local) if d != torch.bfloat16} == {torch.float32}


def test_a_reduction_before_the_cast_is_charged_for_float32() -> None:
    program = program_of(*zoo.mlp(), precision=BF16)
    dims = analyze(program)
    types = {t.reduce for (n, _), t in dims.types.items() if info(n).reduce_dtype is not None}
    assert types == {"float32"}


def test_policy_is_part_of_the_fingerprint() -> None:
    model, batch = zoo.mlp()
    policies: list[Precision | None] = [None, BF16, Precision(torch.float16), Precision(master=torch.float64)]
    assert len({program_of(model, batch, precision=p).fingerprint for p in policies}) == len(policies)


def test_master_dtype_is_what_parameters_are_kept_in() -> None:
    model, batch = zoo.mlp()
    module = autopar.parallelize(model.to(torch.bfloat16), None, precision=BF16)
    module(**batch).backward()
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in module.parameters() if p.grad is not None} == {torch.float32}


@pytest.mark.parametrize("wrong", ["int8", torch.int8, "float"])
def test_what_is_no_floating_dtype_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"precision=.*expected 'bf16'"):
        autopar.parallelize(nn.Linear(2, 2), None, precision=wrong)
    with pytest.raises(ValueError, match=r"Precision\(compute=.*expected one of"):
        Precision(wrong)


def test_plan_under_a_policy() -> None:
    model, batch = zoo.mlp()
    plain = autopar.plan(model, batch, cluster="cpu", axes={"a": 2})
    mixed = autopar.plan(model, batch, cluster="cpu", axes={"a": 2}, precision="bf16")
    assert mixed.fingerprint != plain.fingerprint
    assert mixed.predicted.memory_bytes["parameters"] == plain.predicted.memory_bytes["parameters"]


def test_whole_gradients_of_layers_are_not_there_at_once() -> None:
    """Each is brought into the dtype of its parameter, and its sum begins, where it is made."""

    def transient(layers: int) -> float:
        model = nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(64, 64, bias=False), nn.Tanh())))
        batch, loss_fn = (torch.randn(8, 64),), lambda y, batch: y.float().square().mean()
        program = program_of(model, batch, loss_fn=loss_fn, precision=BF16)
        plan = solve(program, {"a": 4}, "h100", search=Search(recipe="fsdp"))
        return peak_of(program, replace(plan, overlap=False))["transient"]  # in buckets some are

    assert transient(12) == transient(4)
