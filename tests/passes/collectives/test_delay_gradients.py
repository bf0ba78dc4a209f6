"""delay_gradients: a gathered head is freed before its gradient is there, and the step computes the same."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.compiler import rewrite, solve
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.memory.liveness import memory_points
from autopar.passes import PASSES, run_passes
from autopar.passes.collectives.delay_gradients import delay_gradients
from autopar.search.options import Search
from autopar.verify.verify import compare
from tests import models

bucketing = import_module("autopar.passes.collectives.bucket_collectives")  # whose name its function has in the package

WITHOUT = tuple(p for p in PASSES if p is not delay_gradients)
VOCABULARY, HIDDEN = 1024, 32
HEAD = 4 * VOCABULARY * HIDDEN
"""Bytes of the head, and of its gradient."""


def at_head(local: Program, plan: Plan) -> float:
    """The most bytes that are live in the head's backward pass."""
    points = memory_points(local, plan)
    return max(p.total for p in points if p.backward and "lm_head" in p.path)


@pytest.mark.parametrize(("recipe", "overlap"), [pytest.param("fsdp", True, marks=pytest.mark.deep), ("zero2", False)])
def test_the_head_and_its_gradient_are_not_there_together(
    recipe: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucketing, "SMALLEST", 1)  # as large heads are sent: alone
    monkeypatch.setattr(bucketing, "LARGEST", 2**12)
    program, _, values = models.captured("llama", layers=3, vocab_size=VOCABULARY, hidden=HIDDEN)
    axes = {"node": 2, "gpu": 2}
    plan = replace(solve(program, axes, "h100", search=Search(recipe=recipe)), overlap=overlap)
    local = rewrite(program, plan)
    assert at_head(run_passes(program, plan, WITHOUT), plan) - at_head(local, plan) > 0.9 * HEAD
    assert compare(program, local, plan, values, torch.float64).max_error < 1e-12


@pytest.mark.deep
@settings(max_examples=10)
@given(st.integers(0, 2**16), st.booleans())
def test_random_plans_compute_the_same_in_no_more(seed: int, overlap: bool) -> None:
    program, _, values = models.captured("llama", layers=3, vocab_size=VOCABULARY, hidden=HIDDEN)
    plan = solve(program, {"a": 2, "b": 2}, "h100", search=Search(recipe="random", seed=seed))
    plan = replace(plan, overlap=overlap)
    local = rewrite(program, plan)
    assert at_head(local, plan) <= at_head(run_passes(program, plan, WITHOUT), plan)
    assert compare(program, local, plan, values, torch.float64).max_error < 1e-12
