"""A search against a plan that is known: what it leaves out is in the certificate."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

import autopar
from autopar.ir.plan import MEMORY_REPAIR, Certificate, Plan
from autopar.search.budget.cutoff import Cutoff, PrunedError
from autopar.search.microbatch.count import best_count
from tests import models as zoo


@cache
def some_plan() -> Plan:
    return autopar.plan(*zoo.mlp(), cluster="cpu", axes={"a": 2}, search=autopar.Search(pins={"microbatches": 1}))


def found(seconds: float, bound: float, price: float) -> Plan:
    return replace(some_plan(), certificate=Certificate(seconds, bound, "space", "prices", price))


def test_a_count_that_is_not_faster_leaves_its_bound() -> None:
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


def test_a_plan_that_was_made_lean_is_not_the_last() -> None:
    """More microbatches need less memory, and may be faster than one batch that hardly fits."""

    def attempt(count: int, cutoff: Cutoff) -> Plan:
        plan = found(3.0 if count == 1 else 2.0, 1.0, 0.0)
        return replace(plan, certificate=replace(plan.certificate, method=MEMORY_REPAIR)) if count == 1 else plan

    best = best_count(attempt)
    assert best.certificate.objective == 2.0
    assert best.certificate.space.startswith("1, 2 microbatches")


def test_a_bound_is_never_above_what_is_found() -> None:
    """The count that is given up needs far longer."""

    def attempt(count: int, cutoff: Cutoff) -> Plan:
        if count == 2:
            raise PrunedError(3.0)
        return found(1.0, 0.99, 2e-12)

    assert best_count(attempt).certificate.lower_bound == 0.99


def test_where_no_count_beats_the_rival_its_bound_is_told() -> None:
    def attempt(count: int, cutoff: Cutoff) -> Plan:
        cutoff.require_less(2.0)
        return found(3.0, 2.0, 2e-12)

    with pytest.raises(PrunedError) as e:
        best_count(attempt, Cutoff(1.5))
    assert e.value.bound == 2.0
    assert best_count(attempt, Cutoff(4.0)).certificate.objective == 3.0
