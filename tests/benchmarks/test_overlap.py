"""The benchmark of overlap: what it measures of a plan, with and without."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.compiler import solve
from autopar.search.options import Search
from benchmarks import overlap
from tests import models


@pytest.mark.deep
def test_a_row_with_and_without() -> None:
    program, _, _ = models.captured("llama", layers=2)
    axes = {"node": 2, "gpu": 2}
    plan = solve(program, axes, "h100", search=Search(recipe="fsdp"))
    before, after = (overlap.measured(program, replace(plan, overlap=on), axes, "fsdp") for on in (False, True))
    assert set(before) == set(overlap.COLUMNS)
    assert (before["overlap"], after["overlap"]) == ("no", "yes")
    assert after["collectives"] < before["collectives"]
    assert 1.0 <= after["ratio"] < before["ratio"]


@pytest.mark.slow
def test_tiny_models_wait_for_the_host() -> None:
    row = next(overlap.families("llama"))
    assert set(row) == set(overlap.FAMILY_COLUMNS)
    assert row["waiting_us"] > 0 and 0.95 < row["ratio"] < 1.05 < row["without"]
