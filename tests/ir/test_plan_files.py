"""Plan files that somebody has changed: an error that names the field, and bounds are claims."""

from __future__ import annotations

import copy
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import PlanError
from autopar.ir.plan import Plan

WRONG: list[Any] = [
    None, True, -1, 0, float("inf"), float("nan"), "", "x", [], {}, [1], {"a": 1}, "S(0)", 1.5, 10**30, "\0", [[1]],
    {"a": {"b": []}}, "R",
]  # fmt: skip

TOLD: dict[str, Any] = {"loss_fn": lambda o, _: o.square().mean()}


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)))
    plan = autopar.plan(
        layers, (torch.zeros(64, 64),), cluster="h100", axes={"a": 2, "b": 2}, loss_fn=lambda o, _: o.square().mean(),
        search=autopar.Search(recipe="fsdp"),
    )  # fmt: skip
    return plan.to_dict()


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every entry of nested data."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [p for key, v in inner for p in ((*path, key), *places(v, (*path, key)))]


@pytest.mark.some(1)
@pytest.mark.parametrize("seed", range(3))
def test_changed_files_are_plans_or_errors(data: dict[str, Any], seed: int) -> None:
    draw, every = random.Random(seed), places(data)
    refused = 0
    for _ in range(400):
        changed, (*path, last) = copy.deepcopy(data), draw.choice(every)
        holder: Any = changed
        for key in path:
            holder = holder[key]
        if draw.random() < 0.3:
            del holder[last]
        else:
            holder[last] = draw.choice(WRONG)
        try:
            plan = Plan.from_dict(json.loads(json.dumps(changed)))
        except PlanError:
            refused += 1
            continue
        assert plan.summary() and plan.to_dict()
    assert refused > 100


def test_errors_name_the_field(data: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    for path, value, message in (
        (("predicted", "memory_bytes", "parameters"), "much", r"Expected `float`, got `str` - at `\$\.predicted"),
        (("axes", "a"), 0, r"`int` >= 1 - at `\$\.axes"),
        (("certificate", "objective"), float("nan"), r"certificate\.objective is nan"),
        (("certificate", "lower_bound"), 1e9, r"certificate\.lower_bound is .*the plan itself takes"),
        (("certificate", "checked"), 1e9, r"certificate\.checked is .*the plan itself takes"),
    ):
        changed: Any = copy.deepcopy(data)
        holder = changed
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = value
        file.write_text(json.dumps(changed))
        with pytest.raises(PlanError, match=rf"plan file .*plan\.json: corrupt: .*{message}"):
            Plan.load(file)


def test_a_plan_that_has_lost_a_parameter_is_refused() -> None:
    batch: Any = (torch.ones(8, 8),)
    told: dict[str, Any] = {"loss_fn": lambda o, _: o.square().mean()}
    plan = autopar.plan(nn.Linear(8, 8), batch, cluster="h100", axes={"a": 2}, **told).to_dict()
    del plan["parameters"]["bias"]
    with pytest.raises(PlanError, match="the plan says nothing of parameter 'bias', which the model has; plan again"):
        Plan.from_dict(plan).check(nn.Linear(8, 8), batch, **told)


@pytest.fixture(scope="module")
def staged() -> dict[str, Any]:
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    pins = {"stages": 2, "stage_axis": "a", "microbatches": 2, "schedule": "1f1b"}
    plan = autopar.plan(
        layers, (torch.zeros(8, 8),), cluster="h100", axes={"a": 2, "b": 2}, **TOLD, search=autopar.Search(pins=pins)
    )
    return plan.to_dict()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("pipeline", "axis"), "c", r"pipeline\.axis is 'c', and there are 2 stages: expected an axis among a, b"),
        (("stages",), [["0"]], r"there are 1 stages: expected"),
        (("stages",), [["0"], ["1"], ["2"]], r"there are 3 stages: expected an axis among a, b whose size divides"),
        (("stages",), [], r"length >= 1 - at `\$\.stages`"),
        (("stages",), [["0"], []], r"length >= 1 - at `\$\.stages\[1\]`"),
        (("pipeline",), None, "there are 2 stages and no pipeline"),
        (("parameters", "0.weight"), ["@2", "R"], r"parameters '0\.weight' is @2 along axis 'a'"),
        (("parameters", "0.weight"), ["@0", "@0"], r"parameters '0\.weight' is @0 along axis 'b'"),
        (("batch", "0"), ["S(0)", "R"], r"batch '0' is S\(0\.0\) along axis 'a'"),
        (("choices", "f"), ["x", "R"], r"choices 'f' is 'x' along axis 'a': expected R"),
    ],
)  # fmt: skip
def test_stages_of_a_file_fit_together(staged: dict[str, Any], path: tuple[str, ...], value: Any, message: str) -> None:
    changed = copy.deepcopy(staged)
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    with pytest.raises(PlanError, match=message):
        Plan.from_dict(changed)


def test_stages_that_begin_nowhere_are_the_plans_fault(staged: dict[str, Any]) -> None:
    model, batch = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), (torch.zeros(8, 8),)
    for stages, message in (
        ([["0"], ["x"]], "a stage of the plan begins at 'x', which is no module"),
        ([["0"], ["0", "1"]], "stages of the plan begin at 0, which is not the order"),
    ):
        plan = Plan.from_dict({**staged, "stages": stages})
        with pytest.raises(PlanError, match=message):
            autopar.verify(model, batch, dict(plan.axes), **TOLD, plan=plan)


@pytest.mark.parametrize(
    ("consumer", "message"),
    [(["S(7)"], "layouts fit no graph: .*cannot have the layout"), (["R" * 5000], "not a placement")],
)
def test_layouts_of_a_file_that_fit_no_graph_are_the_plans_fault(consumer: list[str], message: str) -> None:
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), (torch.ones(8, 8),)
    search = autopar.Search(recipe="ddp")
    data = autopar.plan(model, batch, cluster="h100", axes={"a": 2}, **TOLD, search=search).to_dict()
    (name,) = [n for n in data["choices"] if "forward tanh" in n]
    data["consumer_layouts"][f"{name} 0"] = consumer
    data["forced_consumer_layouts"] = [f"{name} 0"]
    with pytest.raises(PlanError, match=message) as raised:
        autopar.verify(model, batch, {"a": 2}, **TOLD, plan=Plan.from_dict(data))
    assert len(str(raised.value)) < 1000


def test_what_a_file_says_is_a_claim(data: dict[str, Any]) -> None:
    plan = Plan.from_dict(data)
    assert plan.certificate.claimed
    assert "not here: these are the words of a file" in " ".join(plan.summary().split())
    assert plan.to_dict() == data


def test_only_regular_files_of_some_size_and_depth_are_read(data: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    for text in ("[" * 100_000, '{"a":' * 100_000, json.dumps({**data, "axes": 0})[:-1] + ',"x":' + "[" * 100_000):
        file.write_text(text)
        with pytest.raises(PlanError, match=r"plan file .*plan\.json is corrupt: .*; save it again"):
            Plan.load(file)
    changed = {**data, "cluster": "a = " + "[\n" * 5000}
    file.write_text(json.dumps(changed))
    with pytest.raises(PlanError, match=r"plan\.json: corrupt: ValueError: not valid TOML: nested too deep"):
        Plan.load(file)
    with file.open("wb") as opened:
        opened.truncate(2**40)
    with pytest.raises(PlanError, match=r"plan\.json has \d+ bytes, more than"):
        Plan.load(file)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(PlanError, match=r"plan\.json is a pipe; give a regular file"):
        Plan.load(file)
    with pytest.raises(PlanError, match=r"cannot read plan file .*: No such file"):
        Plan.load(tmp_path / "absent.json")
    with pytest.raises(PlanError, match=r"plan file .* is a folder"):
        Plan.load(tmp_path)
