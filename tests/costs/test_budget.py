"""What is set aside of a device's memory by default: stated terms, and messages that say so."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from autopar.compiler import default_memory, plan
from autopar.costs.budget import KINDS, MIB, NCCL_CONNECTION, DefaultBudget, communicators, naming_default, reserve_of
from autopar.costs.cluster import PRESETS, Cluster
from autopar.costs.device import KIND_NAMES
from autopar.errors import InfeasibleError

GIB = 2**30


def test_communicators_are_of_axes_and_of_all_devices() -> None:
    assert communicators({}) == communicators({"a": 1}) == 0
    assert communicators({"a": 8}) == communicators({"a": 8, "b": 1}) == 1  # a mesh of one axis has all devices
    assert communicators({"a": 2, "b": 2}) == 3
    assert communicators({"a": 2, "b": 2, "c": 2}) == 4


def test_the_terms_of_a_gpu() -> None:
    assert NCCL_CONNECTION == 9_633_792
    two = reserve_of("cuda", 80e9, {"node": 32, "gpu": 8})
    assert {t.name: t.size for t in two.terms()} == {
        "process": 600 * MIB,
        "communicators": 3 * 32 * 9_633_792,
        "workspace": 128 * MIB,
        "fragments": 4e9,
    }
    assert two.total == sum(t.size for t in two.terms())
    assert two.budget == 80e9 - two.total
    assert "3 communicators" in dict((t.name, t.reason) for t in two.terms())["communicators"]
    alone = reserve_of("cuda", 80e9, {"gpu": 1})
    assert "communicators" not in {t.name for t in alone.terms()}
    assert alone.budget > two.budget


def test_a_process_of_a_cpu_sets_aside_what_it_takes_itself() -> None:
    cpu = reserve_of("cpu", 4 * GIB, {"a": 2, "b": 2})
    assert [(t.name, t.size) for t in cpu.terms()] == [("process", 400 * MIB)]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_leaves_most_of_its_memory(name: str) -> None:
    machine = Cluster.preset(name)
    assert machine.device.kind == {"cpu": "cpu", "mi300x": "rocm"}.get(name, "cuda")
    for axes in ({"gpu": 8}, {"pp": 4, "dp": 32, "tp": 8}):
        budget = default_memory(machine, axes)
        assert 0.8 < budget / machine.device.memory < 0.96


def test_kinds_of_devices() -> None:
    assert set(KINDS) == set(KIND_NAMES)
    assert Cluster.from_toml(Cluster.preset("mi300x").to_toml()).device.kind == "rocm"
    text = Cluster.preset("cpu").to_toml().replace('kind = "cpu"\n', "")
    assert Cluster.from_toml(text).device.kind == "cuda"  # it sets more aside
    with pytest.raises(ValueError, match="kind 'gpu' is not known"):
        Cluster.from_toml(Cluster.preset("cpu").to_toml().replace('kind = "cpu"', 'kind = "gpu"'))


def test_a_device_that_is_too_small_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"no memory is left .* memory= .* kind = \"cpu\"") as error:
        DefaultBudget(reserve_of("cuda", 512 * MIB, {"a": 2}))
    assert "process 600.0 MiB" in str(error.value)


def test_a_default_budget_is_a_number_that_knows_its_terms() -> None:
    budget = DefaultBudget(reserve_of("cuda", 80e9, {"a": 2}))
    for same in (copy.deepcopy(budget), pickle.loads(pickle.dumps(budget))):
        assert (same, same.reserve) == (budget, budget.reserve)
    assert not isinstance(budget * 0.5, DefaultBudget)


def test_errors_that_name_the_default_budget_say_what_it_is_made_of() -> None:
    def fail(memory: object, budget: float | None) -> str:
        with pytest.raises(InfeasibleError) as error, naming_default(memory):
            raise InfeasibleError("too much", needed=2.0, budget=budget)
        assert (error.value.needed, error.value.budget) == (2.0, budget)
        return str(error.value)

    budget = DefaultBudget(reserve_of("cpu", 4 * GIB, {}))
    said = "too much. The budget is the default: 4.0 GiB of the device less 400.0 MiB (process 400.0 MiB)"
    assert fail(budget, 1.0) == said
    assert fail(budget, None) == fail(3e9, 1.0) == "too much"


def test_plans_say_it() -> None:
    with torch.device("meta"):
        large, x = nn.Linear(32768, 32768), torch.empty(64, 32768)
    loss = {"loss_fn": lambda output, batch: output.square().mean()}
    with pytest.raises(InfeasibleError, match=r"The budget is the default: 4\.0 GiB of the device less") as error:
        plan(large, (x,), cluster="cpu", axes={"a": 2}, **loss)
    assert error.value.budget == int(default_memory(Cluster.preset("cpu"), {"a": 2}))
    with pytest.raises(InfeasibleError) as given:
        plan(large, (x,), cluster="cpu", axes={"a": 2}, memory="3GiB", **loss)
    assert "default" not in str(given.value)
