"""Commands about plans: what they print, save and refuse."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from autopar.ir.plan import Plan
from tests.cli.command import plan, run


def test_plan_prints_a_table_and_saves_what_can_be_loaded(model: str, tmp_path: Path) -> None:
    result = plan(f"{model}:make", "--save", "plan.json")
    assert result.exit_code == 0, result.output
    assert "a=2, b=2 (4 devices)" in result.stdout
    assert "lower bound" in result.stdout
    assert "saved plan.json" in result.stderr
    assert "saved plan.json" not in result.stdout
    loaded = Plan.load(tmp_path / "plan.json")
    assert dict(loaded.axes) == {"a": 2, "b": 2}
    assert set(loaded.parameters) == {"up.weight", "up.bias", "down.weight", "down.bias"}


@pytest.mark.slow
def test_json_is_the_plan_and_nothing_else(model: str) -> None:
    result = plan(f"{model}:make", "--json", "--memory", "1GiB", "--optimizer", "sgd", "--check")
    assert result.exit_code == 0, result.output
    loaded = Plan.from_dict(json.loads(result.stdout))
    assert loaded.optimizer == "sgd"
    assert loaded.certificate.gap <= 3e-3
    assert 0 < loaded.certificate.checked <= loaded.certificate.objective


@pytest.mark.slow
def test_recipes_are_compared_with_the_plan(model: str) -> None:
    result = plan(f"{model}:make")
    assert result.exit_code == 0, result.output
    table = result.stdout[result.stdout.index("compared with recipes") :]
    assert table.index("this plan") < table.index("ddp") < table.index("fsdp") < table.index("megatron")
    assert "not applicable" in table  # the model has no sequence
    assert "megatron-sequence" in table[table.index("not applicable") :]
    rows = {row["recipe"]: row for row in json.loads(plan(f"{model}:make", "--json").stdout)["recipes"]}
    assert list(rows) == ["ddp", "zero1", "zero2", "fsdp", "hsdp", "megatron", "megatron-sequence", "context"]
    assert rows["ddp"]["ratio"] >= 1 - 1e-3
    assert rows["fsdp"]["memory_bytes"] < rows["hsdp"]["memory_bytes"] < rows["ddp"]["memory_bytes"]
    assert "sequence" in rows["megatron-sequence"]["reason"]


@pytest.mark.slow
def test_what_it_costs_to_lose_devices_is_said_of_plan_and_recipes(model: str) -> None:
    result = plan(f"{model}:make", "--survive", "1")
    assert result.exit_code == 0, result.output
    table = result.stdout[result.stdout.index("survives 1 device of 4") :]
    assert table.index("this plan") < table.index("ddp") < table.index("fsdp") < table.index("start of the script")
    found = json.loads(plan(f"{model}:make", "--survive", "1", "--json").stdout)["survival"]
    assert {name: found[name]["copies"] for name in ("ddp", "fsdp", "hsdp")} == {"ddp": 0, "fsdp": 1, "hsdp": 0}
    assert found["fsdp"]["recovery_seconds"] > found["fsdp"]["meet_seconds"] == 18
    for more, expected in (
        (("--survive", "4"), "--survive 4: the mesh has 4 devices, and one must be left; survive at most 3"),
        (("--survive", "1", "--stages", "2"), "--survive is not predicted for a plan with stages"),
        (("--survive", "1", "--roles", "a=local", "--inexact", "local"), "is not for workers of role 'local'"),
    ):
        refused = plan(f"{model}:make", *more)
        assert refused.exit_code == 2 and expected in " ".join(refused.stderr.split()), refused.stderr


@pytest.mark.deep
def test_recipes_that_do_not_fit_say_what_they_need(model: str) -> None:
    rows = {r["recipe"]: r for r in json.loads(plan(f"{model}:make", "--memory", "9.5KiB", "--json").stdout)["recipes"]}
    assert "step_seconds" in rows["fsdp"]
    assert rows["ddp"]["reason"].startswith("needs ")
    assert rows["ddp"]["reason"].endswith(" KiB more than the budget of 9.5 KiB")


def test_a_recipe_and_roles_can_be_planned(model: str, tmp_path: Path) -> None:
    result = plan(f"{model}:make", "--recipe", "megatron", "--roles", "a=tensor,b=data", "--save", "plan.json")
    assert result.exit_code == 0, result.output
    loaded = Plan.load(tmp_path / "plan.json")
    assert [str(p) for p in loaded.parameters["up.weight"]] == ["S(0.0)", "R"]
    assert [str(p) for p in loaded.batch["0"]] == ["R", "S(0.0)"]


def test_explain_solves_again_with_other_placements(model: str) -> None:
    options = ("--model", f"{model}:make", "--cluster", "cpu", "--axes", "a=2,b=2")
    result = run("explain", "up.weight", *options, "--why-not", "Shard(1)@b")
    assert result.exit_code == 0, result.output
    assert "times as long; what differs:" in result.stdout
    assert "with Shard(1)@b" in result.stdout
    facts = json.loads(run("explain", "up.weight", *options, "--json").stdout)
    assert facts["name"] == "up.weight"
    assert len(facts["answers"]) == 4
    assert all(row["ratio"] >= 1 - 1e-3 for row in facts["answers"])
    wrong = run("explain", "up.wait", *options)
    assert wrong.exit_code == 2 and "up.weight" in wrong.stderr


def test_explain_says_what_a_module_keeps(model: str) -> None:
    options = ("--model", f"{model}:make", "--cluster", "cpu", "--axes", "a=2,b=2")
    result = run("explain", "relu", *options)
    assert result.exit_code == 0, result.output
    assert "(relu)" in result.stdout and "for the backward pass" in result.stdout
    facts = json.loads(run("explain", "up", *options, "--json").stdout)
    assert facts["name"] == "up" and "answers" not in facts
    assert {t["state"] for t in facts["tensors"]} <= {"not saved", "saved"}
    wrong = run("explain", "uup", *options, "--why-not", "Shard(1)@b")
    assert wrong.exit_code == 2 and "or module with one output tensor is called 'uup'; there are up" in wrong.stderr


@pytest.mark.slow
def test_layouts_of_modules_are_pinned_and_asked_for(model: str) -> None:
    """A question about a module is answered by the plan that a pin of it gives."""
    options = ("--model", f"{model}:make", "--cluster", "cpu", "--axes", "a=2,b=2")
    asked = json.loads(run("explain", "up", *options, "--why-not", "S(1)@a,R@b", "--json").stdout)
    pinned = json.loads(run("plan", *options, "--pin", "up=S(1)@a,R@b", "--json").stdout)
    assert pinned["forced_consumer_layouts"]
    assert all(pinned["consumer_layouts"][n] == ["S(1.0)", "R"] for n in pinned["forced_consumer_layouts"])
    seconds = asked["answers"][0]["ratio"] * asked["step_seconds"]
    assert seconds == pytest.approx(pinned["predicted"]["step_seconds"], rel=1e-3)
    again = json.loads(run("explain", "up", *options, "--why-not", "R@a", "--pin", "up=S(1)@a", "--json").stdout)
    assert again["layout"].startswith("S(1.0)@a")
    for text, message in (("up", "is not NAME=PLACEMENT@AXIS"), ("up=S(1)@c", "names axis 'c'; the mesh has a, b")):
        wrong = run("plan", *options, "--pin", text)
        assert wrong.exit_code == 2 and message in wrong.stderr


@pytest.mark.slow
def test_diff_exits_with_1_where_plans_differ(model: str) -> None:
    assert plan(f"{model}:make", "--save", "free.json").exit_code == 0
    assert plan(f"{model}:make", "--save", "fsdp.json", "--recipe", "fsdp").exit_code == 0
    same = run("diff", "free.json", "free.json")
    assert same.exit_code == 0, same.output
    assert "the same layouts" in same.stdout
    other = run("diff", "free.json", "fsdp.json")
    assert other.exit_code == 1
    assert "layouts that differ" in other.stdout
    facts = json.loads(run("diff", "free.json", "fsdp.json", "--json").stdout)
    assert {row["name"] for row in facts["layouts"]} >= {"up.weight", "down.weight"}
    missing = run("diff", "free.json", "nowhere.json")
    assert missing.exit_code == 2 and "nowhere.json" in missing.stderr


@pytest.mark.slow
def test_calibrate_writes_a_cluster_that_plans_can_use(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("scipy")
    from autopar.costs.calibrate import run as module
    from autopar.costs.calibrate.kernels import SMALL
    from tests.costs.calibrate.samples import CPU, INNER, collectives, kernels

    samples = kernels(CPU, SMALL) + collectives(INNER, 0, 2)
    monkeypatch.setattr(module, "measure_over_processes", lambda *_: samples)
    result = run("calibrate", "--save", "mine.toml", "--plot", "mine.svg", "--dtypes", "float32,float64")
    assert result.exit_code == 0, result.output
    assert "median error" in result.stdout and "link Gloo over loopback" in result.stdout
    assert "saved mine.toml" in result.stderr
    assert (tmp_path / "mine.svg").read_text().startswith("<svg")
    planned = run("plan", "--model", f"{model}:make", "--cluster", "mine.toml", "--axes", "a=2")
    assert planned.exit_code == 0, planned.output
    facts = json.loads(run("calibrate", "--save", "mine.toml", "--json").stdout)
    assert facts["errors"]["matmul"]["worst"] < 0.05
    wrong = run("calibrate", "--save", "mine.toml", "--dtypes", "float31")
    assert wrong.exit_code == 2 and "float31" in wrong.stderr


def test_a_loss_function_may_come_third(model: str) -> None:
    result = plan(f"{model}:make_with_loss", "--json")
    assert result.exit_code == 0, result.output


@pytest.mark.slow
def test_which_output_is_the_loss_may_come_third(model: str) -> None:
    result = plan(f"{model}:make_with_name", "--save", "named.json", "--json")
    assert result.exit_code == 0, result.output
    result = run("verify", "--model", f"{model}:make_with_name", "--axes", "a=2,b=2", "--plan", "named.json")
    assert result.exit_code == 0, result.output


def test_verify_accepts_the_plan_of_a_file_and_a_random_one(model: str) -> None:
    assert plan(f"{model}:make", "--save", "plan.json").exit_code == 0
    for chosen in ("plan.json", "random"):
        result = run("verify", "--model", f"{model}:make", "--axes", "a=2,b=2", "--plan", chosen, "--seed", "1")
        assert result.exit_code == 0, result.output
        assert "up.weight" in result.stdout
        assert "verdict   equal" in result.stdout


def test_verify_exits_with_1_when_something_differs(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("autopar.verify.verify")  # `autopar.verify` is the function
    original = module.verify

    def worse(*arguments: object, **options: object) -> SimpleNamespace:
        report = original(*arguments, **options)
        errors = {**report.errors, "up.weight": 2e-9, "up.bias": float("nan")}
        first = report.first_difference or "aten.mm (node mm)"
        return SimpleNamespace(
            errors=errors, loss=report.loss, reference_loss=report.reference_loss, plan=report.plan,
            reference=report.reference, note=report.note, lost=report.lost, first_difference=first,
        )  # fmt: skip

    monkeypatch.setattr(module, "verify", worse)
    arguments = ("verify", "--model", f"{model}:make", "--axes", "a=2")
    result = run(*arguments)
    assert result.exit_code == 1
    assert "DIFFERENT: largest error nan (up.bias)" in result.stdout
    assert "first     aten.mm (node mm)" in result.stdout
    facts = json.loads(run(*arguments, "--json").stdout)
    assert facts["equal"] is False
    assert (facts["reference"], facts["first_difference"]) == ("eager", "aten.mm (node mm)")
    assert facts["max_error"] == facts["errors"]["up.bias"] == "nan"
    assert facts["errors"]["up.weight"] == 2e-9


@pytest.mark.slow
def test_what_does_not_fit_exits_with_3(model: str) -> None:
    result = plan(f"{model}:make", "--memory", "1KiB")
    assert result.exit_code == 3
    assert "missing" in result.stderr
    assert result.stderr.count("error: ") == 1


@pytest.mark.parametrize(
    ("name", "more", "expected"),
    [
        ("make", ("--cluster", "h10"), "did you mean 'h100'"),
        ("make", ("--axes", "a=2,b"), "'b' is not NAME=SIZE"),
        ("make", ("--axes", "a=0"), "'a=0' is not NAME=SIZE"),
        ("make", ("--axes", "a=2,a=2"), "names axis 'a' twice"),
        ("make", ("--memory", "lots"), "cannot read 'lots' as a size"),
        ("make", ("--optimizer", "adamv"), "optimizer='adamv': expected one of 'adamw'"),
        ("make", ("--save", "nowhere/plan.json"), "there is no folder"),
        ("make", ("--recipe", "fdsp"), "did you mean 'fsdp'"),
        ("make", ("--recipe", "ddp", "--roles", "a=tensor"), "recipe 'ddp' decides the roles"),
        ("make", ("--roles", "a"), "'a' is not AXIS=ROLE"),
        ("make", ("--roles", "c=data"), "names axis 'c'; the mesh has a, b"),
        ("absent", (), "has no function 'absent'"),
        ("number", (), "has no function 'number'"),
        ("no_model", (), "returned a str as the model"),
        ("no_pair", (), "must return (model, batch)"),
        ("other_names", (), "a batch that does not fit its model's forward: Net.forward() got an unexpected keyword"),
        ("broken", (), "ZeroDivisionError: division by zero"),
    ],
)
def test_wrong_input_is_one_clear_line(model: str, name: str, more: tuple[str, ...], expected: str) -> None:
    result = plan(f"{model}:{name}", *more)
    assert result.exit_code == 2
    assert expected in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")  # a slow machine says before what it does
    assert result.stderr.count("error: ") == 1
    assert result.stdout == ""


@pytest.mark.parametrize("spec", ["two_layers.py", "nowhere.py:make", ":make", "two_layers.py:1"])
def test_a_model_must_be_a_file_and_a_function(model: str, spec: str) -> None:
    result = plan(spec)
    assert result.exit_code == 2
    assert "FILE.py:FUNCTION" in result.stderr


def test_an_error_at_import_names_the_users_line(model: str, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("x = 1\nraise RuntimeError('no')\n")
    result = plan("bad.py:make")
    assert result.exit_code == 2
    assert "bad.py:2: RuntimeError: no" in result.stderr


def test_debug_adds_the_traceback(model: str) -> None:
    result = plan(f"{model}:broken", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr


def test_doctor(tmp_path: Path) -> None:
    assert "preset h100" in run("doctor").stdout
    assert "h100" in json.loads(run("doctor", "--json").stdout)["presets"]
    file = tmp_path / "two.toml"
    file.write_text(
        'name = "two"\n[[groups]]\npreset = "a100-80gb"\nnodes = 2\n'
        '[[groups]]\npreset = "h100"\nnodes = 1\nspeed = 0.5\n'
    )
    (*groups, between) = json.loads(run("doctor", "--json", "--cluster", str(file)).stdout)["cluster"]["groups"]
    assert [g.split(":")[0] for g in groups] == ["a100-80gb", "h100"] and "at 0.5 of its speed" in groups[1]
    assert between.startswith("between groups")


def test_a_plan_file_of_another_model_is_refused(model: str) -> None:
    assert plan(f"{model}:make", "--save", "plan.json").exit_code == 0
    result = run("verify", "--model", f"{model}:make_with_loss", "--axes", "a=2", "--plan", "plan.json")
    assert result.exit_code == 2
    assert "axes" in result.stderr
    result = run("verify", "--model", f"{model}:make", "--axes", "a=2", "--plan", "absent.json")
    assert result.exit_code == 2
    assert "absent.json" in result.stderr


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "autopar.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("autopar ")
