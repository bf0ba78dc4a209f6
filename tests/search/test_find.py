"""`Search`, and what `find_plan` makes of it."""

from __future__ import annotations

import pytest

import autopar
from autopar import Search
from autopar.ir.layout import Split
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


def test_bound_on_three_axes_is_below_the_exact_optimum_of_two() -> None:
    """An axis of size one changes nothing: what two axes solve exactly, three must not claim to beat."""
    model, batch = zoo.mlp(hidden=64, ffn=256)
    exact = autopar.plan(model, batch, cluster="cpu", axes={"a": 2, "b": 2}).certificate
    third = autopar.plan(model, batch, cluster="cpu", axes={"a": 2, "b": 2, "c": 1}).certificate
    assert third.lower_bound <= exact.objective * (1 + 1e-9)
    assert third.objective >= exact.lower_bound * (1 - 1e-9)
    assert third.method == "axis by axis"
