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
