"""What is installed is all of it: a wheel in an environment of its own plans from another folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

MODEL = """
import torch
from torch import nn

class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()

def make():
    return Mlp(), (torch.randn(32, 64),)
"""


def run(*command: str | Path, cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy: building leaves files in the tree, which the next wheel would have
    for name in run("git", "ls-files", cwd=ROOT).splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", folder, source, cwd=folder)
    (found,) = folder.glob("autopar-*.whl")
    return found


def test_a_wheel_has_every_file(wheel: Path) -> None:
    tracked = run("git", "ls-files", "autopar", "passes", "strategies", cwd=ROOT).split()
    links = {"autopar/passes", "autopar/strategies"}
    wanted = {name if name.startswith("autopar/") else f"autopar/{name}" for name in tracked} - links
    assert wanted - set(zipfile.ZipFile(wheel).namelist()) == set()


@pytest.mark.deep
def test_a_wheel_plans_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    """In an environment that sees the libraries of this one, and not its editable installation."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    own = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    zipfile.ZipFile(wheel).extractall(own)
    # A path in a .pth file is searched, and .pth files there are not read: so editable installations are not seen.
    (own / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (tmp_path / "task.py").write_text(MODEL)
    where = run(python, "-c", "import autopar; print(autopar.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(own)
    words = [
        "plan",
        "--model",
        "task.py:make",
        "--cluster",
        "h100",
        "--axes",
        "gpu=4",
        "--json",
        "--report",
        "page.html",
    ]
    printed = run(python, "-m", "autopar.cli", *words, cwd=tmp_path)
    assert json.loads(printed)["axes"] == {"gpu": 4}
    assert "<html" in (tmp_path / "page.html").read_text()
