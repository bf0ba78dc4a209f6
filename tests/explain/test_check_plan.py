"""`Plan.check`: what a plan says of its costs and its bound is derived anew, and what differs is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import autopar
from autopar import Search, cli
from autopar.compiler import program_of, solve
from autopar.costs.cluster import Cluster
from autopar.errors import PlanError
from autopar.ir.plan import Plan
from autopar.search.recost import differences, recosted
from tests import models as zoo
from tests.capture.test_repeat import Deep

AXES = {"a": 2, "b": 2}
STAGES = Search(pins={"stages": 2, "microbatches": 2})


def handed_over(plan: Plan) -> Plan:
    """As from a file."""
    return Plan.from_dict(json.loads(json.dumps(plan.to_dict())))


def planned(model: str = "mlp", **options: Any) -> Plan:
    return handed_over(autopar.plan(*zoo.MODELS[model](), cluster="h100", axes=AXES, **options))


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("model", "search", "memory"),
    [
        ("mlp", Search(), None),
        ("mlp", Search(recipe="fsdp"), None),
        ("mlp", STAGES, None),
        ("mlp", Search(pins={"microbatches": 2}), "1GiB"),
        ("residual", Search(tie_layers=False), None),
        pytest.param("cnn", Search(pins={"recompute": "none"}), None, marks=pytest.mark.deep),
    ],
)
def test_a_plan_is_what_it_says(model: str, search: Search, memory: str | None) -> None:
    plan = planned(model, search=search, memory=memory)
    assert plan.certificate.claimed and plan.certificate.checked is None
    found = plan.check(*zoo.MODELS[model](), search=search, memory=memory)
    own, said = found.certificate, plan.certificate
    assert not own.claimed and own.checked is not None
    assert own.objective == pytest.approx(said.objective, rel=1e-6)
    assert own.lower_bound == pytest.approx(said.lower_bound, rel=2e-3)
    assert own.lower_bound * (1 - 1e-6) <= own.checked <= own.objective * (1 + 1e-6)
    assert replace(found, certificate=said) == plan
    assert "not here" not in found.summary() and "verified from duals" in " ".join(found.summary().split())


def test_stages_are_those_of_the_plan_by_default() -> None:
    plan = planned(search=STAGES)
    found = plan.check(*zoo.mlp())
    assert found.certificate.checked is not None
    assert found.certificate.space == plan.certificate.space


@pytest.mark.thorough  # of a random plan nothing is predicted otherwise
def test_random_plans_have_no_bound_but_get_one() -> None:
    plan = planned(search=Search(recipe="random", seed=2))
    assert plan.certificate.objective == 0
    own = plan.check(*zoo.mlp()).certificate
    assert own.objective == plan.predicted.step_seconds
    assert own.checked is not None and 0 < own.checked < own.objective


Change = Callable[[Plan], Plan]


def certified(**changes: Any) -> Change:
    return lambda p: replace(p, certificate=replace(p.certificate, **changes))


def predicted(**changes: Any) -> Change:
    return lambda p: replace(p, predicted=replace(p.predicted, **changes))


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (certified(objective=1.0), r"does not cost here what it says: certificate\.objective is 1 and should be"),
        (predicted(step_seconds=1e-9), r"predicted\.step_seconds is 1e-09 and should be"),
        (predicted(memory_bytes={"parameters": 1.0}), r"predicted\.memory_bytes\.parameters is 1 and should be"),
        (predicted(peak_bytes={"parameters": 1.0}), r"predicted\.peak_bytes\.parameters is 1 and should be"),
        (lambda p: replace(p, fingerprint="0" * 16), "the plan is for another graph"),
        (lambda p: replace(p, choices={}), "plan again"),
    ],
)
def test_what_differs_is_named(change: Change, says: str) -> None:
    plan = change(planned())
    with pytest.raises(PlanError, match=says):
        plan.check(*zoo.mlp())


@pytest.mark.slow
def test_a_bound_that_lies_is_refuted() -> None:
    """The bound is above what the best plan takes, and below what this plan takes."""
    plan = planned(search=Search(recipe="fsdp"))
    best = planned().certificate.objective
    lie = certified(lower_bound=(best + plan.certificate.objective) / 2)(plan)
    with pytest.raises(PlanError, match=r"certificate\.lower_bound is .* s, and there is a plan of .*: check it with"):
        lie.check(*zoo.mlp())
    lie = certified(checked=(best + plan.certificate.objective) / 2, lower_bound=0.0)(plan)
    with pytest.raises(PlanError, match=r"certificate\.checked is .* s, and there is a plan of"):
        lie.check(*zoo.mlp())


def test_a_plan_of_other_plans_is_found_out() -> None:
    """What is asked for is worse than what the plan does: its bound would say nothing of the plan."""
    h100 = Cluster.preset("h100")
    # The host launches as much for all plans, which says nothing of any.
    found = autopar.plan(*zoo.mlp(), cluster=replace(h100, device=replace(h100.device, host=0.0)), axes=AXES)
    with pytest.raises(
        PlanError, match=r"the plan takes .* s, and none takes less than .*; it is none of these: check"
    ):
        certified(lower_bound=0.0)(handed_over(found)).check(*zoo.mlp(), search=Search(recipe="fsdp"))


def test_a_budget_that_the_plan_exceeds() -> None:
    with pytest.raises(PlanError, match=r"the plan's peak of .* is above the budget of 1\.0 KiB; check it with"):
        planned().check(*zoo.mlp(), memory="1KiB")


def test_another_model_or_batch() -> None:
    plan = planned()
    with pytest.raises(PlanError, match="the plan is for another graph"):
        plan.check(*zoo.mlp(hidden=32))
    with pytest.raises(PlanError, match="the plan is for another graph"):
        plan.check(zoo.mlp()[0], zoo.mlp(batch=16)[1])


@pytest.mark.deep
@pytest.mark.parametrize("memory", [None, 1e10])
def test_deep_models_planned_from_three_layers_or_all(memory: float | None) -> None:
    batch = torch.zeros(8, 4), torch.zeros(8, 8)
    of_three = autopar.plan(Deep(9), batch, cluster="h100", axes=AXES, memory=memory)
    of_all = solve(program_of(Deep(9), batch), AXES, "h100", memory=memory)
    for plan in (of_three, of_all):
        found = handed_over(plan).check(Deep(9), batch, memory=memory)
        assert found.certificate.checked is not None
        assert [*differences(plan, found)] == []


def test_plans_of_modules() -> None:
    model, batch = zoo.mlp()
    plan = autopar.parallelize(model, None, batch, cluster="cpu").plan
    assert not plan.certificate.claimed
    assert handed_over(plan).check(*zoo.mlp(), memory="1GiB").certificate.checked is not None


@pytest.mark.deep
@pytest.mark.parametrize("name", zoo.MODELS)
@pytest.mark.parametrize(
    ("search", "axes", "share"),
    [
        (Search(), {"a": 2, "b": 2, "c": 2}, None),
        (Search(pins={"microbatches": 2}), {"a": 2}, None),
        (Search(time_limit=10), {"a": 2}, 0.8),
        (replace(STAGES, time_limit=10), AXES, 1.0),
        (Search(pins={"stages": 2, "microbatches": 4, "virtual": 2}, time_limit=10), AXES, None),
        (Search(recipe="random", seed=5), AXES, None),
    ],
)
def test_what_is_predicted_is_what_is_counted_again(
    name: str, search: Search, axes: dict[str, int], share: float | None
) -> None:
    program, _, _ = zoo.captured(name)
    memory = None
    if share is not None:
        memory = share * sum(solve(program, {"a": 2}, "cpu", memory=1e12).predicted.peak_bytes.values())
    try:
        plan = solve(program, axes, "cpu", memory=memory, search=search)
    except autopar.InfeasibleError:
        pytest.skip("there is none")
    assert [*differences(plan, recosted(program, handed_over(plan)))] == []


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "def make():\n    return nn.Linear(16, 16), (torch.zeros(8, 16),), lambda output, batch: output.sum()\n"
    )
    model, file = f"{tmp_path / 'net.py'}:make", tmp_path / "plan.json"
    words = ["--model", model, "--recipe", "ddp"]
    run = CliRunner().invoke
    made = run(cli.app, ["plan", *words, "--cluster", "h100", "--axes", "a=2", "--save", str(file), "--no-compare"])
    assert made.exit_code == 0, made.output
    shown = run(cli.app, ["check", str(file), *words])
    assert shown.exit_code == 0, shown.output
    assert "verified from duals" in shown.stdout
    data = json.loads(run(cli.app, ["check", str(file), *words, "--json"]).stdout)
    assert 0 < data["certificate"]["checked"] <= data["certificate"]["objective"] * (1 + 1e-6)
    changed = json.loads(file.read_text())
    changed["predicted"]["step_seconds"] /= 2
    file.write_text(json.dumps(changed))
    wrong = run(cli.app, ["check", str(file), *words])
    assert wrong.exit_code == 2
    assert "predicted.step_seconds is" in wrong.stderr
