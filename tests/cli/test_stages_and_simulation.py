"""Commands about pipelines, and `autopar simulate`."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import Result

from autopar.ir.plan import Plan
from tests.cli.command import plan, run


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.some(3)
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
