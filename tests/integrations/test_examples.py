"""The examples run, on four processes and then on two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.distributed, pytest.mark.deep]


def run(*command: str) -> str:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize(
    ("example", "longer"), [("hf_trainer", ("--steps", "24")), ("hf_accelerate", ("--epochs", "1"))]
)
def test_under_torchrun(example: str, longer: tuple[str, str], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    words = (f"examples/{example}.py", "--output", str(tmp_path))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    assert "loss" in run(*torchrun, "4", *words)
    assert "loss" in run(*torchrun, "2", *words, *longer, "--resume")


def test_under_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    words = (sys.executable, "examples/ray_train.py", "--output", str(tmp_path))
    assert "loss" in run(*words)
    assert "loss" in run(*words, "--steps", "30", "--workers", "2")


def test_by_lightnings_own_launcher(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    words = (sys.executable, "examples/lightning_strategy.py", "--output", str(tmp_path))
    assert "loss" in run(*words)
    (saved,) = tmp_path.rglob("*.ckpt")
    assert "loss" in run(*words, "--devices", "2", "--steps", "24", "--resume", str(saved))
