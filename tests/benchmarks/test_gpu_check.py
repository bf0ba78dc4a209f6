"""The check of a GPU runs on a CPU: the same code, small models; what needs a GPU says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.costs.calibrate.sample import ATTENTION
from benchmarks import gpu_check
from benchmarks.gpu_parts import attention, costs, setting, training
from benchmarks.gpu_parts.setting import NEEDS_GPU, Setting

CPU = Setting(torch.device("cpu"), small=True)


@pytest.fixture(autouse=True)
def few_models(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (setting, training, costs):
        monkeypatch.setattr(module, "MODELS", {"mlp": setting.MODELS["mlp"]})


def test_attention_runs_on_the_kernels_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "VARIANTS", ("grouped",))
    monkeypatch.setattr(attention, "TOLERANCE", {torch.float32: 1e-4})
    rows = {row["check"]: row for row in attention.attention(CPU)}
    assert [row["passed"] for row in rows.values()] == [True, True, None, None]
    assert {row["note"] for row in rows.values() if row["passed"] is None} == {NEEDS_GPU}


def test_equality_and_a_plan_of_a_cpu() -> None:
    rows = [*training.equality(CPU), *training.cpu_plan(CPU)]
    assert [(r["check"], r["passed"]) for r in rows] == [
        ("mlp, float32", True), ("mlp, bfloat16", True), ("mlp, planned on a CPU", True)
    ]  # fmt: skip


@pytest.mark.deep
def test_masks_of_dropout() -> None:
    assert all(row["passed"] for row in attention.dropout(CPU))


def test_predictions() -> None:
    (peak,) = costs.peak(CPU)
    assert peak["ratio"] == pytest.approx(1, rel=0.02)
    fitted, *errors = costs.calibration(CPU)
    assert fitted["float32_tflops"] > 0 and 0 < fitted["fused"] <= 1
    assert [row["check"] for row in errors] == [f"error of {k}" for k in ("matmul", *ATTENTION, "copy")]
    assert sum(row["kernels"] for row in errors) == 7


class Wrong(nn.Module):
    """Returns something else in every call, so that nothing equals it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.ones(3)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (self.weight * x).sum() * self.calls


def test_a_difference_is_found() -> None:
    model, batch = Wrong(), {"x": torch.randn(3)}
    (_, first), (_, second) = (setting.step(model, batch) for _ in range(2))
    assert setting.difference(second, first) == pytest.approx(1.0)
    assert setting.difference({}, first) == float("inf")
    assert setting.difference({"weight": first["weight"] * float("nan")}, first) == float("inf")


@pytest.mark.deep
def test_parts_that_are_done_are_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                               monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """A part runs in a process of its own; one that does not end in time is wrong, and is run again."""
    file = tmp_path / "found.json"
    arguments = ["--device", "cpu", "--out", str(file), "--part", "calibrate"]
    assert gpu_check.main([*arguments, "--limit", "0.01"]) == 1
    assert json.loads(file.read_text())["parts"]["calibrate"]["status"] == "timed out"
    assert gpu_check.main(arguments) == 0
    before = json.loads(file.read_text())
    assert before["parts"]["calibrate"]["status"] == "done"

    def never(*_: Any) -> None:
        raise AssertionError("it is done")

    monkeypatch.setattr(gpu_check, "run_part", never)
    capsys.readouterr()
    assert gpu_check.main(arguments) == 0
    assert json.loads(file.read_text()) == before
    assert "calibrate: done" in capsys.readouterr().out


def test_another_machine_has_another_file(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    file.write_text(json.dumps({"device": "a GPU", "torch": "1.0", "parts": {}}))
    with pytest.raises(SystemExit, match="give another --out"):
        gpu_check.main(["--device", "cpu", "--out", str(file)])


def test_what_is_wrong() -> None:
    done: dict[str, Any] = {"status": "done", "seconds": 1.0, "rows": [{"check": "a", "passed": True, "error": 0.0}]}
    skipped = {**done, "rows": [{"check": "b", "passed": None, "note": NEEDS_GPU}]}
    assert not gpu_check.wrong([done, skipped])
    assert gpu_check.wrong([{**done, "rows": [{"check": "a", "passed": False}]}])
    assert gpu_check.wrong([{"status": "failed", "error": "x", "seconds": 0.0}])
    shown = gpu_check.table({"device": "cpu", "torch": "2", "parts": {"one": done, "two": skipped}})
    assert "right" in shown and "skipped" in shown and NEEDS_GPU in shown
