"""A search against a plan that is known: what it leaves out is in the certificate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

import autopar
from autopar.costs.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.ir.plan import MEMORY_REPAIR, Certificate, Plan
from autopar.ir.program import Program
from autopar.search.budget.cutoff import NO_CUTOFF, Cutoff, PrunedError
from autopar.search.microbatch import count as microbatch_count
from autopar.search.options import Job
from tests import models as zoo
from tests.plans import tiny


@cache
def some_plan() -> Plan:
    return autopar.plan(*zoo.mlp(), cluster="cpu", axes={"a": 2}, search=autopar.Search(pins={"microbatches": 1}))


def found(seconds: float, bound: float, price: float) -> Plan:
    return replace(some_plan(), certificate=Certificate(seconds, bound, "space", "prices", price))


@pytest.fixture
def best_count(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plan]:
    """`best_count` where each number of microbatches has the plan that an attempt says."""

    def found(attempt: Callable[[int, Cutoff], Plan], cutoff: Cutoff = NO_CUTOFF) -> Plan:
        def plan_of_count(program: Program, count: int, job: Job) -> Plan:
            return attempt(count, job.cutoff)

        monkeypatch.setattr(microbatch_count, "plan_of_count", plan_of_count)
        return microbatch_count.best_count(tiny()[0], Job({"a": 2}, Cluster.preset("cpu"), cutoff=cutoff))

    return found


def test_a_count_that_is_not_faster_leaves_its_bound(best_count: Callable[..., Plan]) -> None:
    rivals: list[Cutoff] = []

    def attempt(count: int, cutoff: Cutoff) -> Plan:
        rivals.append(cutoff)
        if count == 2:
            raise PrunedError(0.97)
        return found(1.0, 0.99, 2e-12)

    best = best_count(attempt)
    assert rivals == [Cutoff(), Cutoff(1.0, 2e-12)]
    assert (best.certificate.objective, best.certificate.lower_bound) == (1.0, 0.97)
    assert best.certificate.space.startswith("1, 2 microbatches")


def test_a_plan_that_was_made_lean_is_not_the_last(best_count: Callable[..., Plan]) -> None:
    """More microbatches need less memory, and may be faster than one batch that hardly fits."""

    def attempt(count: int, cutoff: Cutoff) -> Plan:
        plan = found(3.0 if count == 1 else 2.0, 1.0, 0.0)
        return replace(plan, certificate=replace(plan.certificate, method=MEMORY_REPAIR)) if count == 1 else plan

    best = best_count(attempt)
    assert best.certificate.objective == 2.0
    assert best.certificate.space.startswith("1, 2 microbatches")


def test_a_bound_is_never_above_what_is_found(best_count: Callable[..., Plan]) -> None:
    """The count that is given up needs far longer."""

    def attempt(count: int, cutoff: Cutoff) -> Plan:
        if count == 2:
            raise PrunedError(3.0)
        return found(1.0, 0.99, 2e-12)

    assert best_count(attempt).certificate.lower_bound == 0.99


def test_where_no_count_beats_the_rival_its_bound_is_told(best_count: Callable[..., Plan]) -> None:
    def attempt(count: int, cutoff: Cutoff) -> Plan:
        cutoff.require_less(2.0, in_any_memory=True)
        return found(3.0, 2.0, 2e-12)

    with pytest.raises(PrunedError) as e:
        best_count(attempt, Cutoff(1.5))
    assert e.value.bound == 2.0
    assert best_count(attempt, Cutoff(4.0)).certificate.objective == 3.0


@pytest.mark.parametrize("most", [2, 8])
def test_more_microbatches_are_tried_where_memory_makes_fewer_slow(best_count: Callable[..., Plan], most: int) -> None:
    """**Wrong before**: the bound of one microbatch that hardly fits was taken for that of any number."""

    def attempt(count: int, cutoff: Cutoff) -> Plan:
        if count > most:
            raise InfeasibleError("the batch has no so many samples")
        cutoff.require_less(8.0 / count)
        return found(9.0 / count, 8.0 / count, 0.0)

    if most == 2:
        with pytest.raises(PrunedError) as e:
            best_count(attempt, Cutoff(3.0))
        assert e.value.bound == 4.0
        return
    best = best_count(attempt, Cutoff(3.0)).certificate
    assert (best.objective, best.lower_bound) == (2.25, 2.0)
    assert best.space.startswith("1, 2, 4 microbatches")


def test_a_first_plan_is_of_the_fewest_microbatches_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many, as long as that needs less."""
    tried: list[int] = []
    needed = {1: 400, 2: 200, 4: 150, 8: 149}

    def plan_of_count(program: Program, count: int, job: Job) -> Plan:
        tried.append(count)
        if needed[count] > fits:
            raise InfeasibleError("too much", needed=needed[count])
        return found(float(count), 1.0, 0.0)

    monkeypatch.setattr(microbatch_count, "plan_of_count", plan_of_count)
    job, fits = Job({"a": 2}, Cluster.preset("cpu")), 160
    assert microbatch_count.fewest_that_fit(tiny()[0], job, 8).certificate.objective == 4.0
    assert tried == [1, 2, 4]
    tried.clear()
    monkeypatch.setattr(microbatch_count, "has_room_for_state", lambda *_: True)
    assert microbatch_count.fewest_that_fit(tiny()[0], replace(job, memory=90), 8).certificate.objective == 4.0
    assert tried == [1, 4]  # the first needs more than four times the memory
    fits = 100
    with pytest.raises(InfeasibleError) as e:
        microbatch_count.fewest_that_fit(tiny()[0], job, 8)
    assert e.value.needed == 149
    with pytest.raises(InfeasibleError) as e:
        microbatch_count.fewest_that_fit(tiny()[0], job, 2)
    assert e.value.needed == 200
