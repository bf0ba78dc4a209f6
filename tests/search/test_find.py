"""`Search`, and what `find_plan` makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

import autopar
from autopar import Search
from autopar.compiler import program_of, solve
from autopar.costs.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.ir.layout import Split
from autopar.search.budget.cutoff import Cutoff, PrunedError
from autopar.search.find import find_plan
from autopar.search.formulation.as_before import strategies_of
from autopar.search.formulation.pins import Restrictions
from autopar.search.options import Job
from autopar.search.overlap.weights import Weights
from autopar.search.rounds import Rounds
from autopar.sharding.dims import analyze
from tests import models as zoo


def test_unknown_recipe_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no recipe 'megaton'.*mean 'megatron'"):
        Search(recipe="megaton")


def test_random_recipe_draws_by_seed_and_keeps_pins() -> None:
    model, batch = zoo.mlp()
    pins = {"up.weight": ("S(0)",)}

    def draw(seed: int) -> autopar.Plan:
        search = Search(recipe="random", seed=seed, pins=pins)
        return autopar.plan(model, batch, cluster="cpu", axes={"a": 4}, search=search)

    plans = [draw(seed) for seed in range(4)]
    assert all(p.parameters["up.weight"] == (Split(0, 0),) for p in plans)
    assert len({tuple(p.choices.items()) for p in plans}) > 1
    assert draw(3).to_dict() == plans[3].to_dict()
    assert autopar.verify(model, batch, {"a": 4}, plan=plans[0]).max_error <= 1e-10


@pytest.mark.slow
def test_more_axes_do_not_beat_the_exact_optimum_of_two() -> None:
    """An axis of size one changes nothing: three axes are one problem too, four are searched axis by axis."""
    model, batch = zoo.mlp(hidden=64, ffn=256)
    axes = {"a": 2, "b": 2}
    search = Search(pins={"overlap": "none"})
    exact = autopar.plan(model, batch, cluster="cpu", axes=axes, search=search).certificate
    third = autopar.plan(model, batch, cluster="cpu", axes={**axes, "c": 1}, search=search).certificate
    assert third.objective == pytest.approx(exact.objective, rel=2e-3)
    assert third.method != "axis by axis"
    fourth = autopar.plan(model, batch, cluster="cpu", axes={**axes, "c": 1, "d": 1}, search=search).certificate
    assert fourth.lower_bound <= exact.objective * (1 + 1e-9)
    assert fourth.objective >= exact.lower_bound * (1 - 1e-9)
    assert fourth.method == "axis by axis"


def in_float64(case: tuple[nn.Module, zoo.Tensors]) -> tuple[nn.Module, zoo.Tensors]:
    return case[0].double(), {name: value.double() for name, value in case[1].items()}


@pytest.mark.slow
def test_a_fourth_axis_makes_a_plan_no_slower() -> None:
    """The largest three are one problem, whose plan is the first; the simulator chooses among plans within 5%."""
    (model, batch), axes, search = in_float64(zoo.mlp()), dict.fromkeys("abc", 2), Search(cache=False, padding=False)
    three, four = (autopar.plan(model, batch, cluster="cpu", axes=of, search=search) for of in (axes, {"z": 2, **axes}))
    assert four.predicted.step_seconds <= 1.05 * three.predicted.step_seconds
    assert autopar.verify(model, batch, dict(four.axes), plan=four).max_error < 1e-10


@pytest.mark.slow
def test_first_plans_that_are_far_off_do_not_end_the_search_for_a_bound() -> None:
    """Chunks could hide a little of the first plan's step, which takes several times as long as the best."""
    certificate = solve(zoo.captured("encoder")[0], {"a": 4}, "cpu", search=Search(cache=False)).certificate
    assert certificate.gap < 0.03  # 0.07 where they did


@pytest.mark.some(1)
@pytest.mark.parametrize("seed", [0, 1])
def test_random_plans_of_four_axes_are_equal_to_one_device(seed: int) -> None:
    model, batch = in_float64(zoo.mlp())
    search = Search(recipe="random", seed=seed, cache=False)
    found = autopar.plan(model, batch, cluster="cpu", axes=dict.fromkeys("abcd", 2), search=search)
    assert len({p for layout in found.parameters.values() for p in layout}) > 1  # something is split
    assert (
        autopar.verify(
            model.double(), {k: v.double() for k, v in batch.items()}, dict(found.axes), plan=found
        ).max_error
        < 1e-10
    )


@pytest.mark.deep
def test_three_axes_are_solved_to_the_gap() -> None:
    """Where they are alike, labelings that cost nearly the same are many, and the first ones found are far off."""
    program = zoo.captured("bert")[0]
    search = Search(pins={"overlap": "none"}, cache=False)
    certificate = solve(program, {"a": 2, "b": 2, "c": 2}, Cluster.preset("cpu"), search=search).certificate
    assert certificate.gap <= 1e-3


@pytest.mark.deep
def test_a_bound_of_later_weights_ends_the_search_for_a_faster_plan() -> None:
    """It is about all plans of a variant; the bound of the first weights, which the certificate had, is far off."""
    program, dims, _ = zoo.captured("encoder")
    search = Search(cache=False, padding=False)
    job = Job({"a": 2, "b": 2}, Cluster.preset("h100"), search=search)
    bounds: list[float] = []
    plan = find_plan(program, dims, replace(job, progress=lambda _, incumbent, bound: bounds.append(bound)))
    known = plan.certificate
    cutoff = Cutoff(known.lower_bound)
    assert min(b for b in bounds if b > 0) < cutoff.enough  # the first weights do not end it
    with pytest.raises(PrunedError) as caught:
        find_plan(program, dims, replace(job, cutoff=cutoff))
    assert cutoff.enough <= caught.value.bound <= known.objective


def test_within_a_budget_three_axes_have_the_bound_of_all_plans() -> None:
    program = zoo.captured("mlp")[0]
    axes, cluster = {"a": 2, "b": 2, "c": 2}, Cluster.preset("cpu")
    search = Search(cache=False, pins={"overlap": "none", "microbatches": 1})
    free = solve(program, axes, cluster, search=search)
    peak = sum(free.predicted.memory_bytes.values())
    found = solve(program, axes, cluster, memory=0.9 * peak, search=search)
    assert sum(found.predicted.memory_bytes.values()) <= 0.9 * peak
    assert free.certificate.lower_bound * (1 - 1e-9) <= found.certificate.lower_bound <= found.certificate.objective


@pytest.mark.slow
def test_weights_and_the_price_of_memory_raise_the_bound_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The raised bound is verified apart from the search, and the fastest plan is the same as without it."""
    model, batch = zoo.mlp(hidden=64, ffn=256)
    program = program_of(model, batch)
    cluster, axes = Cluster.preset("cpu"), {"a": 2, "b": 2}
    search = Search(check=True, cache=False, padding=False, pins={"microbatches": 1})
    free = solve(program, axes, cluster, memory="1GiB", search=search)
    memory = 0.7 * sum(free.predicted.peak_bytes.values())
    raised = solve(program, axes, cluster, memory=memory, search=search).certificate
    monkeypatch.setattr(Rounds, "price_memory", lambda self, weights, memory, frontier: 0.0)
    known = solve(program, axes, cluster, memory=memory, search=search).certificate
    assert raised.binds
    assert known.lower_bound < raised.lower_bound <= raised.objective == known.objective
    assert raised.checked == pytest.approx(raised.lower_bound, rel=2e-3)


def test_where_all_strategies_are_decided_there_is_one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a batch of another length, which a call waits for: other weights would find the same plan."""
    program, cluster = zoo.captured("mlp")[0], Cluster.preset("cpu")
    search, axes = Search(padding=False, cache=False), {"a": 2, "b": 2}
    before = solve(program, axes, cluster, search=search)
    alike = strategies_of(before, program, program, tie=True)
    searches: list[int] = []
    once = Rounds.search

    def counted(rounds: Rounds, weights: Weights) -> None:
        searches[-1] += 1
        once(rounds, weights)

    monkeypatch.setattr(Rounds, "search", counted)
    monkeypatch.setattr(Rounds, "cut_in_vain", lambda self: True)  # so that there is more than one
    for decided in (dict(list(alike.items())[1:]), alike):
        searches.append(0)
        again = solve(program, axes, cluster, search=search, restrictions=Restrictions(strategies=decided))
        assert again.predicted.step_seconds == pytest.approx(before.predicted.step_seconds, rel=1e-2)
    assert searches[0] > searches[1] == 1


def test_where_nothing_that_overlaps_is_found_the_bound_is_of_these_plans_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the search found none within the memory does not prove that there is none."""
    model, batch = zoo.mlp(hidden=64, ffn=256)
    program, cluster = program_of(model, batch), Cluster.preset("cpu")
    faster = solve(program, {"a": 4}, cluster, memory=1e9)

    first = Rounds.first

    def nothing(rounds: Rounds) -> autopar.Plan:
        raise InfeasibleError("none was found", least=first(rounds))

    monkeypatch.setattr(Rounds, "first", nothing)
    one_by_one = solve(program, {"a": 4}, cluster, memory=1e9, search=Search(check=True))
    assert not one_by_one.overlap
    bound = faster.certificate.lower_bound
    assert one_by_one.certificate.lower_bound == pytest.approx(bound, rel=1e-6)
    assert one_by_one.certificate.checked is not None
    assert one_by_one.certificate.checked <= faster.predicted.step_seconds
    with pytest.raises(PrunedError) as pruned:
        find_plan(program, analyze(program), Job({"a": 4}, cluster, 1e9, cutoff=Cutoff(1e-9)))
    assert pruned.value.bound <= faster.predicted.step_seconds
