"""Plans in the cache that are not what they say are searched again."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar import Search
from autopar.costs.cluster import Cluster
from autopar.ir.plan import Plan
from autopar.ir.quantized.axes import QuantizedAxis
from autopar.search import cache
from autopar.search.options import Job
from tests import models as zoo
from tests.search.cache.planned import AXES, CLUSTER, planned


@pytest.mark.parametrize("pins", [{"up.weight": ("R", "S(1)")}, {"batch.0": ("R", "R")}, {"up": ("R", "S(1)")}])
def test_a_plan_that_is_not_as_pinned_is_searched_again(
    pins: dict[str, Any], kept: Path, searches: list[Search], caplog: pytest.LogCaptureFixture
) -> None:
    pinned, other = planned(search=Search(pins=pins)), planned(search=Search(cache=False, recipe="ddp"))
    (file,) = kept.iterdir()
    assert planned(search=Search(pins=pins)) == pinned  # which is read
    assert "searched again" not in caplog.text
    other.save(file)
    searches.clear()
    assert planned(search=Search(pins=pins)) == pinned
    assert len(searches) >= 1 and re.search(r"searched again: .*PlanError: .*pinned", caplog.text)


def other_layouts(plan: Plan) -> Plan:
    """Of a plan that is right, and worse, under the name of the best."""
    worse = planned(search=Search(recipe="random", seed=1))
    return replace(worse, certificate=plan.certificate, predicted=plan.predicted)


FORGED: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "layouts": (other_layouts, "does not cost what it says: certificate.objective is"),
    "objective": (
        lambda p: replace(p, certificate=replace(p.certificate, objective=2 * p.certificate.objective)),
        "certificate.objective is .* and should be",
    ),
    "seconds": (
        lambda p: replace(p, predicted=replace(p.predicted, step_seconds=p.predicted.step_seconds / 2)),
        "predicted.step_seconds is .* and should be",
    ),
    "memory": (
        lambda p: replace(p, predicted=replace(p.predicted, peak_bytes={"parameters": 1.0})),
        "predicted.peak_bytes.parameters is 1 and should be",
    ),
    "no memory": (lambda p: replace(p, predicted=replace(p.predicted, peak_bytes={})), "its peak of .* is above"),
    "traffic": (
        lambda p: replace(p, predicted=replace(p.predicted, communication_bytes={"a": 1.0, "b": 0.0})),
        "predicted.communication_bytes.a is 1 and should be",
    ),
    "program": (lambda p: replace(p, fingerprint="0" * 16), "it is of another program"),
    "torch": (lambda p: replace(p, torch="2.0.0"), "it is of another version of torch"),
    "optimizer": (lambda p: replace(p, optimizer="sgd"), "it is of another optimizer"),
    "few bits": (lambda p: replace(p, quantized=(QuantizedAxis("a", 8),)), "it is of another precision of messages"),
    "copies": (lambda p: replace(p, secondary=("a",)), "it is of another secondary copy"),
    "cluster": (lambda p: replace(p, cluster=Cluster.preset("h100")), "it is of another cluster"),
    "axes": (lambda p: replace(p, axes=(("b", 2), ("a", 2))), "it is of another mesh"),
    "choices": (lambda p: replace(p, choices={}), "PlanError"),
    "parameters": (lambda p: replace(p, parameters={}), "searched again"),
    "padding": (lambda p: replace(p, padding={"up.weight": (64, 16)}), "searched again"),
    "padding of another": (lambda p: replace(p, padding={"up.other": (64, 16)}), "'up.other', which the model"),
    "microbatches": (lambda p: replace(p, microbatches=3), "searched again"),
}


@pytest.mark.some(4)
@pytest.mark.parametrize("name", FORGED)
def test_forged_plans_are_found_out(
    name: str, kept: Path, searches: list[Search], caplog: pytest.LogCaptureFixture
) -> None:
    forge, says = FORGED[name]
    first = planned(memory=1e9)
    (file,) = kept.iterdir()
    forge(first).save(file)
    searches.clear()
    assert planned(memory=1e9) == first
    assert searches
    assert re.search(says, caplog.text)
    assert Plan.load(file) == first


def test_a_budget_is_kept_whatever_a_file_says(kept: Path, searches: list[Search]) -> None:
    """The plan of a larger budget, under the name of one of a smaller."""
    roomy = planned(memory=1e9)
    (file,) = kept.iterdir()
    needed = sum(roomy.predicted.peak_bytes.values())
    program, dims, _ = zoo.captured("mlp")
    small = cache.file_of(program, dims, Job(AXES, CLUSTER, memory=0.9 * needed))
    assert small is not None
    file.rename(small)
    assert cache.load(small, program, Job(AXES, CLUSTER, memory=0.9 * needed)) is None
    assert cache.load(small, program, Job(AXES, CLUSTER, memory=needed)) == roomy


def test_bounds_of_files_are_claims(kept: Path) -> None:
    first = planned()
    (file,) = kept.iterdir()
    bound = 0.999 * first.certificate.objective
    replace(first, certificate=replace(first.certificate, lower_bound=bound)).save(file)
    read = planned()
    assert (first.certificate.claimed, read.certificate.claimed) == (False, True)
    assert read.certificate.lower_bound == bound
    _, batch = zoo.mlp()
    claims = [autopar.parallelize(zoo.mlp()[0], None, batch).plan.certificate.claimed for _ in range(2)]
    assert claims == [False, True]
