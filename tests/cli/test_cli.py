import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from autopar import cli
from autopar.ir.plan import Plan

SOURCE = """
import torch
from torch import nn
from beside import WIDTH

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 16)

    def forward(self, x):
        return (self.down(self.up(x).relu()) - x).square().mean()

class Outputs(Net):
    def forward(self, x):
        return self.down(self.up(x).relu())

def make():
    torch.manual_seed(0)
    return Net(), (torch.randn(8, 16),)

def make_with_loss():
    return Outputs(), (torch.randn(8, 16),), lambda output, batch: (output - batch[0]).square().mean()

class Losses(Net):
    def forward(self, x):
        return {"total": super().forward(x), "largest": self.up(x).abs().max()}

def make_with_name():
    return Losses(), (torch.randn(8, 16),), "total"

def no_model(): return "model", ()
def no_pair(): return Net()
def broken(): return 1 / 0
number = 3
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    path = list(sys.path)
    (tmp_path / "two_layers.py").write_text(SOURCE)
    (tmp_path / "beside.py").write_text("WIDTH = 32\n")
    monkeypatch.chdir(tmp_path)
    yield "two_layers.py"
    sys.path[:] = path
    sys.modules.pop("beside", None)
    sys.modules.pop("two_layers", None)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def plan(model: str, *more: str) -> Result:
    return run("plan", "--model", model, "--cluster", "cpu", "--axes", "a=2,b=2", *more)


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


def test_json_is_the_plan_and_nothing_else(model: str) -> None:
    result = plan(f"{model}:make", "--json", "--memory", "1GiB", "--optimizer", "sgd", "--check")
    assert result.exit_code == 0, result.output
    loaded = Plan.from_dict(json.loads(result.stdout))
    assert loaded.optimizer == "sgd"
    assert loaded.certificate.gap <= 3e-3
    assert 0 < loaded.certificate.checked <= loaded.certificate.objective


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
            reference=report.reference, note=report.note, first_difference=first,
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


def test_pipelines_are_planned_simulated_and_verified(model: str, tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    stages = ("--stages", "2", "--stage-axis", "b", "--microbatches", "2", "--schedule", "own.csv")
    assert plan(f"{model}:make", *stages, "--save", "plan.json").exit_code == 0
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.pipeline is not None and loaded.pipeline.axis == "b"
    assert [str(p) for p in loaded.parameters["down.weight"]][1] == "@1"
    found = run("simulate", "--model", f"{model}:make", "--plan", "plan.json", "--json")
    facts = json.loads(found.stdout)
    assert facts["schedule"] == "a custom schedule"
    assert facts["step_seconds"] == pytest.approx(loaded.predicted.step_seconds)
    assert [d["peak_microbatches"] for d in facts["devices"]] == [2, 1]
    verify = ("verify", "--model", f"{model}:make", "--axes", "a=2,b=2")
    assert run(*verify, "--plan", "plan.json").exit_code == 0
    assert run(*verify, "--stages", "down", "--schedule", "zb-h1", "--plan", "random", "--seed", "3").exit_code == 0


@pytest.mark.parametrize(
    ("command", "more", "expected"),
    [
        ("plan", ("--stages", "2", "--microbatch", "1"), "--microbatch and --recompute are for plans without --stages"),
        ("plan", ("--stages", "nowhere", "--microbatches", "2"), "no stage can begin at 'nowhere'"),
        ("plan", ("--stages", "2", "--schedule", "absent.csv"), "No such file"),
        ("plan", ("--schedule", "gpipe"), "or --stages for a pipeline that runs"),
        ("plan", ("--stage-axis", "a"), "--stage-axis belongs to a pipeline: add --stages"),
        ("verify", ("--virtual", "2"), "--virtual belongs to a pipeline: add --stages"),
    ],
)
def test_options_of_pipelines_say_what_is_wrong(model: str, command: str, more: tuple[str, ...], expected: str) -> None:
    own = ("--cluster", "cpu") if command == "plan" else ()
    result = run(command, "--model", f"{model}:make", "--axes", "a=2,b=2", *own, *more)
    assert result.exit_code == 2
    assert expected in result.stderr


COSTS = ("--forward", "18.522", "--backward-input", "18.086", "--backward-weight", "9.337", "--communication", "0.601")


def simulate(*more: str) -> Result:
    """Where an option is given again, the last one counts."""
    return run("simulate", "--schedule", "1f1b", "--stages", "4", "--microbatches", "8", *COSTS, *more)


def test_simulate_prints_a_table_of_the_devices() -> None:
    result = simulate("--communication", "0")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [(row[0], row[-1]) for row in rows if row and row[0].isdigit()] == [*zip("0123", "4321", strict=True)]
    assert "1f1b: 4 stages, 8 microbatches" in result.stdout
    assert "27.3% of the step" in result.stdout  # 3 of 11 slots


def test_simulate_prints_json_and_writes_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    result = simulate(
        "--schedule", "interleaved", "--virtual", "2", "--communication", "0", "--trace", str(path), "--json"
    )
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["bubble"] == pytest.approx(3 / (2 * 8 + 3))
    assert facts["step_seconds"] == pytest.approx((8 + 3 / 2) * 45.945e-3)
    assert facts["devices"][0] == {
        "device": 0,
        "busy_seconds": pytest.approx(8 * 45.945e-3),
        "bubble": pytest.approx(3 / 19),
        "exposed_communication_seconds": 0,
        "peak_microbatches": 5.5,
    }
    assert f"saved {path}" in result.stderr
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 4 * 2 * 8 * 2


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (("--schedule", "2f1b"), "unknown schedule '2f1b'; one of gpipe"),
        (("--stages", "0"), "stages 0: a pipeline needs 1 or more"),
        (("--virtual", "2"), "1f1b has one stage a device; take interleaved"),
        (("--schedule", "interleaved", "--microbatches", "9"), "take a multiple of 4"),
        (("--backward-input", "-1"), "--backward-input -1.0: give milliseconds, 0 or more"),
        (("--communication", "nan"), "--communication nan: give milliseconds, 0 or more"),
        (("--trace", "nowhere/trace.json"), "--trace nowhere/trace.json: there is no folder"),
    ],
)
def test_simulate_says_in_one_line_what_is_wrong(more: tuple[str, ...], expected: str) -> None:
    result = simulate(*more)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert expected in result.stderr
    assert result.stdout == ""


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


HYBRID = ("plan", "--model", "gpt_model.py:make", "--cluster", "a100-80gb", "--axes", "pp=2,dp=2,tp=2")


@pytest.fixture
def gpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    path = list(sys.path)
    text = "from benchmarks.gpt import GPT, batch_of\n\ndef make(): return GPT(32, 4, 4, 16, 96), batch_of(32, 16)\n"
    (tmp_path / "gpt_model.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    yield
    sys.path[:] = path
    sys.modules.pop("gpt_model", None)


@pytest.mark.usefixtures("gpt")
def test_plan_predicts_stages() -> None:
    from autopar.explain.hybrid.predict import predict_hybrid
    from benchmarks.gpt import GPT, batch_of

    options = (*HYBRID, "--recipe", "megatron", "--microbatch", "2", "--recompute", "full")
    printed = run(*options, "--json")
    assert printed.exit_code == 0, printed.output
    found = predict_hybrid(
        GPT(32, 4, 4, 16, 96), batch_of(32, 16), cluster="a100-80gb", axes={"pp": 2, "dp": 2, "tp": 2}, microbatch=2,
        recompute="full",
    )  # fmt: skip
    assert json.loads(printed.stdout) == json.loads(json.dumps(found.to_dict()))
    shown = run(*options)
    assert "predicted step" in shown.stdout
    assert "8 microbatches of one data rank" in shown.stdout


@pytest.mark.usefixtures("gpt")
@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ((), 2, "predicted for --recipe megatron or megatron-sequence; add it"),
        (("--axes", "gpu=2", "--schedule", "gpipe"), 2, "predicted for --recipe megatron or megatron-sequence; add it"),
        (("--recipe", "megatron", "--roles", "tp=tensor"), 2, "the names of the axes (pp, dp, tp) decide"),
        (("--recipe", "megatron", "--stage-axis", "pp"), 2, "for a pipeline that runs: add --stages"),
        (("--recipe", "megatron", "--save", "plan.json"), 2, "one with stages is only predicted"),
        (("--recipe", "megatron", "--schedule", "2f2b"), 2, "unknown schedule '2f2b'"),
        (("--recipe", "megatron", "--recompute", "some"), 2, 'there are "none", "selective" and "full"'),
        (("--recipe", "megatron", "--memory", "1KiB"), 3, "more than the budget of 1.0 KiB"),
    ],
)
def test_stages_that_cannot_be_predicted(options: tuple[str, ...], code: int, message: str) -> None:
    result = run(*HYBRID, *options)
    assert result.exit_code == code, result.output
    assert message in result.stderr


def test_simulate_runs_the_graph_of_a_plan(model: str, tmp_path: Path) -> None:
    model, path, trace = f"{model}:make", tmp_path / "plan.json", tmp_path / "trace.json"
    assert plan(model, "--save", str(path)).exit_code == 0
    result = run("simulate", "--model", model, "--plan", str(path), "--trace", str(trace), "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["step_seconds"] >= facts["busy_seconds"] > 0
    assert (
        facts["peak_memory_bytes"]["parameters"]
        == json.loads(path.read_text())["predicted"]["memory_bytes"]["parameters"]
    )
    assert any(event["name"] == "memory" for event in json.loads(trace.read_text())["traceEvents"])
    assert "peak memory" in run("simulate", "--model", model, "--plan", str(path)).stdout


@pytest.mark.parametrize(
    "options", [(), ("--model", "m.py:f"), ("--plan", "p.json"), ("--schedule", "1f1b", "--plan", "p.json")]
)
def test_simulate_wants_a_plan_or_a_schedule(options: tuple[str, ...]) -> None:
    result = run("simulate", *options)
    assert result.exit_code == 2
    assert "either --model and --plan, or a --schedule" in result.stderr


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (("--model", "m.py:f", "--plan", "p.json", "--stages", "2"), "durations are for a --schedule"),
        (("--model", "m.py:f", "--plan", "p.json", "--forward", "2"), "durations are for a --schedule"),
        (("--schedule", "1f1b", "--precision", "bf16"), "--precision is for a --plan"),
    ],
)
def test_simulate_refuses_options_of_the_other_kind(options: tuple[str, ...], wrong: str) -> None:
    result = run("simulate", *options)
    assert result.exit_code == 2
    assert wrong in result.stderr
