"""Plans of earlier searches: the second is read."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import autopar
from autopar import Search, cli
from autopar.ir.plan import Plan
from autopar.search import cache
from tests import models as zoo
from tests.search.cache.planned import planned


def test_the_second_search_is_read(kept: Path, searches: list[Search], caplog: pytest.LogCaptureFixture) -> None:
    phases: list[str] = []
    first = planned()
    assert len(searches) == len(list(kept.iterdir())) == 1
    with caplog.at_level(logging.INFO, "autopar"):
        again = planned(progress=lambda phase, incumbent, bound: phases.append(phase))
    assert again == first
    assert len(searches) == 1
    assert "plan of an earlier search, from" in caplog.text
    assert [p for p in phases if "earlier search" in p]


def test_parallelize_reads_what_it_searched(kept: Path, searches: list[Search]) -> None:
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        model, batch = zoo.mlp()
        parallel = autopar.parallelize(model, None, batch)
        losses.append(float(parallel(**batch).detach()))
    assert len(searches) == 1
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "search",
    [Search(recipe="random"), Search(cache=False), Search(time_limit=0.0), Search(check=True)],
    ids=["random", "off", "cut short", "checked"],
)
def test_what_is_not_kept(kept: Path, search: Search) -> None:
    planned(search=search)
    assert not kept.exists()


@pytest.mark.parametrize("off", ["", "0"])
def test_the_variable_turns_it_off(off: str, monkeypatch: pytest.MonkeyPatch, searches: list[Search]) -> None:
    monkeypatch.setenv(cache.VARIABLE, off)
    assert cache.folder() is None
    planned()
    planned()
    assert len(searches) == 2


def test_the_default_is_below_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(cache.VARIABLE)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / ".cache" / "autopar"


@pytest.mark.parametrize(
    "pins", [{"stages": 2, "microbatches": 2}, {"microbatches": 2}], ids=["stages", "microbatches"]
)
def test_plans_of_pipelines_are_read_too(pins: dict[str, Any], kept: Path) -> None:
    phases: list[str] = []
    first = planned(search=Search(pins=pins))
    again = planned(search=Search(pins=pins), progress=lambda phase, incumbent, bound: phases.append(phase))
    assert again == first
    assert [p for p in phases if "earlier search" in p]


SEARCH = """
import autopar
from torch import nn, zeros

plan = autopar.plan(nn.Linear(16, 16), (zeros(8, 16),), cluster="cpu", axes={"a": 2, "b": 2})
"""


@pytest.mark.deep
def test_another_process_reads_it(kept: Path, searches: list[Search]) -> None:
    """Under another hash seed."""
    environment = {**os.environ, "PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", SEARCH], env=environment, check=True)
    names: dict[str, Any] = {}
    exec(SEARCH, names)
    assert searches == []
    assert [Plan.load(file) for file in kept.iterdir()] == [names["plan"]]


def test_the_command_can_search_anew(kept: Path, tmp_path: Path, searches: list[Search]) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "def make():\n    return nn.Linear(16, 16), (torch.zeros(8, 16),), lambda output, batch: output.sum()\n"
    )
    words = ["plan", "--model", f"{tmp_path / 'net.py'}:make", "--cluster", "cpu", "--axes", "a=2"]
    counts, shown = [], []
    for more in ([], [], ["--no-cache"]):
        shown.append(CliRunner().invoke(cli.app, [*words, *more]).stdout)
        counts.append(len(searches))
    assert 0 < counts[0] == counts[1] < counts[2]
    assert shown[0] == shown[2]
    # What is read is the same but for one line: its bound is a claim.
    new = [line for line in shown[1].splitlines() if line not in shown[0].splitlines()]
    assert new and new[0].startswith("verified     not here: these are the words of a file")
