"""Plans as files: the same back, clear errors, the same bytes in every process."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.compiler import rewrite, solve
from autopar.errors import PlanError
from autopar.ir.layout import Replicate, Split
from autopar.ir.plan import Certificate, Plan
from autopar.ir.plan.file import VERSION
from autopar.ir.program import Program
from tests import models

FORMER = Path(__file__).with_name("plan_version_1.json")
ROOT = Path(__file__).resolve().parents[2]
AXES = {"a": 2, "b": 2}


@cache
def solved() -> tuple[Program, Plan]:
    program, _, _ = models.captured("mlp")
    return program, solve(program, AXES, "h100")


def test_round_trip(tmp_path: Path) -> None:
    _, plan = solved()
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "plan.json").read_bytes()


def test_a_file_from_before_the_price_of_memory() -> None:
    _, plan = solved()
    data = plan.to_dict()
    assert data["certificate"].pop("memory_price") == 0.0
    assert Plan.from_dict(data) == plan


def test_a_loaded_plan_rewrites(tmp_path: Path) -> None:
    program, plan = solved()
    plan.save(tmp_path / "plan.json")
    one, other = rewrite(program, plan), rewrite(program, Plan.load(tmp_path / "plan.json"))
    assert str(one.graph.graph) == str(other.graph.graph)


def test_file_is_readable(tmp_path: Path) -> None:
    _, plan = solved()
    plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["autopar_plan"] == VERSION
    assert data["axes"] == AXES
    assert set(data["parameters"]) == {"up.weight", "up.bias", "down.weight", "down.bias"}
    assert all(len(v) == 2 and all(p[0] in "RS" for p in v) for v in data["parameters"].values())
    assert data["certificate"]["gap"] == plan.certificate.gap


def broken(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    data = solved()[1].to_dict()
    change(data)
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda d: d.update(autopar_plan=VERSION + 1),
            f"version {VERSION + 1} of the format, this autopar reads 1 to {VERSION}",
        ),
        (lambda d: d.pop("autopar_plan"), "no plan of autopar"),
        (lambda d: d.pop("choices"), "corrupt: ValidationError: Object missing required field `choices`"),
        (
            lambda d: d["parameters"].update({"up.weight": ["R"]}),
            "'parameters up.weight' does not have one placement for each",
        ),
        (lambda d: d["parameters"].update({"up.weight": ["R", "Q"]}), "not a placement: 'Q'"),
        (lambda d: d["choices"].update(more=["R"]), "'choices more' does not have one placement"),
        (lambda d: d.update(axes=[1, 2]), "corrupt"),
        (lambda d: d.update(cluster="not toml ["), "corrupt"),
        (lambda d: d["certificate"].pop("objective"), "corrupt"),
        (lambda d: d["predicted"].update(unknown=1), "corrupt: ValueError: predicted has 'unknown'"),
        (lambda d: d.update(parameters=None), "corrupt"),
    ],
)
def test_wrong_file(tmp_path: Path, change: Callable[[dict[str, Any]], Any], reason: str) -> None:
    path = broken(tmp_path, change)
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)


def test_a_file_of_version_1_is_read() -> None:
    """Written before values that are re-gathered, and methods of certificates, were called what they are called now."""
    former = json.loads(FORMER.read_text())
    plan = Plan.load(FORMER)
    assert plan.to_dict()["autopar_plan"] == VERSION
    assert plan.consumer_layouts.keys() == former["relays"].keys() != set()
    again = [name.replace("relay ", "consumer ").replace("each ", "per use ") for name in former["recompute"]]
    assert list(plan.recompute) == again and any(name.startswith("consumer ") for name in again)
    assert plan.certificate.method == "Lagrangian" and former["certificate"]["method"] == "prices"
    assert Plan.from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '"plan"', "\x00"])
def test_file_that_is_no_plan(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=str(path)):
        Plan.load(path)


def test_missing_file_and_bytes(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot read plan file .*: No such file"):
        Plan.load(tmp_path / "none.json")
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="not a text file in UTF-8"):
        Plan.load(tmp_path / "plan.json")


def test_plan_for_another_model() -> None:
    _, plan = solved()
    other, _, _ = models.captured("mlp", hidden=8)
    with pytest.raises(PlanError, match=rf"another graph \(fingerprint {plan.fingerprint}.*plan again"):
        rewrite(other, plan)


def test_plan_for_other_axes() -> None:
    model, batch = models.mlp()
    with pytest.raises(ValueError, match=r"for axes \{'a': 2, 'b': 2\}, not \{'a': 4\}"):
        autopar.verify(model, batch, {"a": 4}, plan=solved()[1])


def test_unknown_strategy_and_missing_choice() -> None:
    program, plan = solved()
    key = next(k for k in plan.choices if " mm " in k)
    with pytest.raises(
        PlanError, match=r"wants strategy 'z\.9' of aten\.mm\.default \(node mm\w*\), which has none such"
    ):
        rewrite(program, replace(plan, choices={**plan.choices, key: ("z.9", "R")}))
    with pytest.raises(PlanError, match=r"says nothing of aten\.mm\.default \(node mm\w*, .*\.py:\d+\)"):
        rewrite(program, replace(plan, choices={k: v for k, v in plan.choices.items() if k != key}))


def test_splits_that_do_not_divide() -> None:
    program, plan = solved()
    odd = replace(plan, axes=(("a", 3), ("b", 2)))
    with pytest.raises((PlanError, ValueError), match=r"unequal parts|does not have"):
        rewrite(program, replace(odd, choices={k: ("m.0" if " mm " in k else "R", "R") for k in plan.choices}))


def test_gap() -> None:
    assert Certificate(2.0, 1.0, "", "").gap == 0.5
    assert Certificate(0.0, 0.0, "", "").gap == 0.0
    assert Certificate(1.0, 1.0 + 1e-12, "", "").gap == 0.0


def test_prediction_of_a_solved_plan() -> None:
    _, plan = solved()
    assert plan.predicted.step_seconds >= plan.predicted.compute_seconds > 0
    assert set(plan.predicted.memory_bytes) == {"parameters", "gradients", "optimizer", "buffers"}
    assert set(plan.predicted.communication_bytes) == set(AXES)
    assert plan.certificate.objective == pytest.approx(plan.predicted.step_seconds, rel=1e-6)
    assert sum(m.seconds for m in plan.modules) == pytest.approx(plan.predicted.device_seconds)
    assert all(p in (Replicate(), Split(0), Split(1)) for v in plan.parameters.values() for p in v)


SCRIPT = """
import hashlib, json, sys
import torch
torch.set_num_threads(1)
from autopar.compiler import solve
from tests import models
program, _, _ = models.captured(sys.argv[1])
plan = solve(program, {"node": 2, "gpu": 4}, "h100")
sys.stdout.write("plan " + hashlib.sha256(json.dumps(plan.to_dict()).encode()).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.thorough  # as the other process does
@pytest.mark.parametrize("name", ["mlp", *(pytest.param(n, marks=pytest.mark.deep) for n in ("encoder", "gpt2"))])
def test_same_plan_under_any_hash_seed(name: str) -> None:
    """This process has a seed of its own, another one has its."""
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, name]
    other = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert other.returncode == 0, other.stderr[-2000:]
    plan = solve(models.captured(name)[0], {"node": 2, "gpu": 4}, "h100")
    assert other.stdout.rpartition("plan ")[2] == hashlib.sha256(json.dumps(plan.to_dict()).encode()).hexdigest()
