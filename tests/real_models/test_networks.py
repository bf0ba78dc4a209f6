"""Networks of timm, diffusers and PEFT compute and train as in eager PyTorch, under searched and random plans."""

from __future__ import annotations

import copy

import pytest

import autopar
from autopar.search.options import Search
from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import slow_devices
from tests.real_models.steps import parallel_of, train_beside
from tests.real_models.zoo import EXAMPLES, SPREAD

TOLERANCE = 1e-9
SEEDS = 2

every_network = pytest.mark.parametrize("name", EXAMPLES)


@every_network
def test_one_device(name: str) -> None:
    example = EXAMPLES[name]()
    errors = train_beside(parallel_of(example, None), example, steps=2)
    assert max(errors.values()) < TOLERANCE, errors


@every_network
@pytest.mark.parametrize("axes", [{"a": 2}, {"a": 2, "b": 2}], ids=["2", "2x2"])
def test_plans(name: str, axes: dict[str, int]) -> None:
    example = EXAMPLES[name]()
    model, batch, loss_fn = example.model, example.batch(0), example.loss_fn
    searched = autopar.plan(
        copy.deepcopy(model), batch, cluster=slow_devices(), axes=axes, loss_fn=loss_fn, search=Search(time_limit=30)
    )
    assert any(set(names) != {"R"} for names in searched.choices.values())
    for plan, seed in ((searched, 0), *(("random", seed) for seed in range(SEEDS))):
        report = autopar.verify(model, batch, axes, loss_fn=loss_fn, plan=plan, seed=seed)
        assert report.max_error < TOLERANCE, (seed, report.worst)
        assert report.capture_error < TOLERANCE


def train(rank: int, name: str, sizes: tuple[int, ...], recipe: str | None) -> dict[str, float]:
    example = EXAMPLES[name]()
    search = Search(recipe=recipe, seed=1, time_limit=30)
    parallel = parallel_of(example, mesh_of(*sizes), search=search, cluster=slow_devices(), timeout=5 * WAIT)
    return train_beside(parallel, example, steps=3)


@pytest.mark.distributed
@every_network
@pytest.mark.parametrize(("sizes", "recipe"), [((4,), None), ((2, 2), "random")], ids=["searched", "random"])
def test_three_steps_on_ranks(ranks: Ranks, name: str, sizes: tuple[int, ...], recipe: str | None) -> None:
    for errors in ranks.run(train, name, sizes, recipe):
        assert max(errors.values()) < SPREAD.get(name, TOLERANCE), errors
