"""Any feasible plan of any model computes what one device would: loss and every gradient, in float64."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.compiler import program_of, rewrite
from autopar.costs.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.ir.program import Program
from autopar.passes import DETERMINISTIC_PASSES
from autopar.passes.pad_dims import pad
from autopar.search.microbatch.split import microbatch_program
from autopar.search.random_plan import random_plan
from autopar.sharding.dims import Dims, analyze
from autopar.verify.verify import compare, global_values
from tests import models as zoo
from tests.plans import random_padding
from tests.property.random_models import models

BOUND = 1e-10
MESHES = [{"a": 4}, {"a": 2, "b": 2}, {"a": 2, "b": 2, "c": 2}, {"a": 1, "b": 4}]

meshes = st.sampled_from(MESHES)
seeds = st.integers(0, 2**32 - 1)


def check(program: Program, dims: Dims, values: list[Tensor], axes: dict[str, int], seed: int) -> None:
    """Every third plan pads some dims, whether they divide or not; all compute or move some values again.

    Some values are on the host between the passes. Every fourth is in microbatches, if the program can be cut.
    """
    part = program
    if seed % 4 == 0:
        with suppress(InfeasibleError):
            part = microbatch_program(program, 2, deterministic=True)
            dims = analyze(part)
    shapes = random_padding(part, dims, Random(seed).randrange) if seed % 3 == 0 else {}
    longer = pad(part, shapes)
    dims = analyze(longer) if shapes else dims
    plan = random_plan(longer, dims, axes, Cluster.preset("cpu"), seed, recompute=True, offload=True)
    plan = replace(plan, padding=shapes, fingerprint=program.fingerprint, microbatches=part.microbatches)
    local = rewrite(program, plan, passes=DETERMINISTIC_PASSES)
    report = compare(program, local, plan, values, torch.float64)
    assert report.max_error <= BOUND, f"{report.worst}: {report.max_error} on {axes}, seed {seed}"


DEEP = settings().max_examples > 1000
"""Whether `make test-deep` runs, which draws as many examples as its profile says; `make test` draws few."""


PLANS = 4
"""Of each random model: capturing it takes longer than a plan."""


@pytest.mark.slow
@settings(max_examples=settings().max_examples if DEEP else 3)
@given(drawn=models(), plans=st.lists(st.tuples(meshes, seeds), min_size=PLANS, max_size=PLANS))
def test_random_plans_of_random_model(
    drawn: tuple[nn.Module, tuple[Tensor, ...]], plans: list[tuple[dict[str, int], int]]
) -> None:
    model, batch = drawn
    program = program_of(model, batch)
    dims, values = analyze(program), global_values(program, model, batch)
    for axes, seed in plans:
        check(program, dims, values, axes, seed)


@settings(max_examples=settings().max_examples if DEEP else 10)
@given(axes=meshes, seed=seeds)
def test_many_random_plans_of_a_small_model(axes: dict[str, int], seed: int) -> None:
    check(*zoo.captured("mlp"), axes, seed)


SHORT = ("cnn",)
"""`tests/verify/test_verify.py` has a random plan of others."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in SHORT else pytest.mark.deep) for n in sorted(zoo.MODELS)]
)
@settings(max_examples=100 if DEEP else 2)
@given(axes=meshes, seed=seeds)
def test_random_plan_of_real_model(name: str, axes: dict[str, int], seed: int) -> None:
    program, dims, values = zoo.captured(name)
    check(program, dims, values, axes, seed)
