"""Ctrl-C: the best plan so far, and an end at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autopar import cli
from autopar.explain import recipes
from autopar.ir.plan import Plan
from autopar.search.solver.certify import verified_bound
from autopar.search.solver.duals import relax
from autopar.search.solver.highs import requested, stoppable
from autopar.search.solver.minimize import Limits
from tests.search.brute import random_problem

# A search that waits for Ctrl-C; how well it obeys is the argument.
SLOW = """
import sys, time
from autopar import cli
from autopar.search.budget import within_budget as budget
from autopar.search.solver.certify import verified_bound
from autopar.search.solver.duals import relax
from autopar.search.solver.highs import requested
from autopar.search.budget.lagrangian import solve
import torch
from torch import nn

def slowly(problem, **options):
    print("searching", file=sys.stderr, flush=True)
    while sys.argv[-1] == "deaf" or not requested():
        time.sleep(0.01)
    if sys.argv[-1] == "deaf":
        raise AssertionError("nobody gets here")
    return solve(problem, **options)

def make():
    return nn.Linear(16, 16), (torch.zeros(8, 16),), lambda output, batch: output.square().mean()

if __name__ == "__main__":
    budget.solve = slowly
    words = ["plan", "--model", f"{__file__}:make", "--cluster", "cpu", "--axes", "a=2,b=2", "--save", "plan.json"]
    cli.app(words)
"""


@contextmanager
def searching(folder: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    """A command that has begun to search."""
    (folder / "slow.py").write_text(SLOW)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "slow.py", how]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes)
    try:
        assert process.stderr is not None
        while (line := process.stderr.readline()) != "searching\n":
            assert line, "the command ended before it searched"
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_ctrl_c_gives_the_best_plan_so_far(tmp_path: Path) -> None:
    with searching(tmp_path, "obedient") as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "stopped by Ctrl-C" in out
    assert "gap" in out
    assert "ddp" not in out  # not compared
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.certificate.method == "interrupted"
    assert plan.certificate.lower_bound <= plan.certificate.objective


MODEL = """
import torch
from torch import nn

def make():
    return nn.Linear(16, 16), (torch.zeros(8, 16),), lambda output, batch: output.square().mean()
"""


def test_ctrl_c_leaves_the_plan_and_the_recipes_that_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the fourth recipe is searched."""
    compared = recipes._compared

    def interrupted(found: Any, name: str) -> Any:
        if name == "fsdp":
            signal.raise_signal(signal.SIGINT)
        return compared(found, name)

    monkeypatch.setattr(recipes, "_compared", interrupted)
    (tmp_path / "model.py").write_text(MODEL)
    words = ["plan", "--model", f"{tmp_path / 'model.py'}:make", "--cluster", "cpu", "--axes", "a=2,b=2"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a process in the background ignores
    try:
        run = CliRunner().invoke(cli.app, [*words, "--save", str(tmp_path / "plan.json")])
    finally:
        signal.signal(signal.SIGINT, before)
    assert run.exit_code == 130, run.output
    plan, _, rows = run.stdout.partition("compared with recipes")
    assert "gap" in plan and "zero2" in rows and "fsdp" not in rows
    assert Plan.load(tmp_path / "plan.json").certificate.method != "interrupted"


@pytest.mark.deep
def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    with searching(tmp_path, "deaf") as process:
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines()[-1] == "stopped"
    assert not (tmp_path / "plan.json").exists()


def test_requests_end_with_the_search() -> None:
    said: list[str] = []
    before = signal.getsignal(signal.SIGINT)  # which a process in the background ignores
    with stoppable(lambda: said.append("first")):
        limits = Limits(1e-3, time.monotonic() + 60)
        assert not limits.expired()
        signal.raise_signal(signal.SIGINT)
        assert requested()
        assert limits.expired()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert said == ["first"]
    assert not requested()
    assert signal.getsignal(signal.SIGINT) is before


def test_the_solver_obeys_between_its_steps() -> None:
    """What it has until then proves less."""
    problem = random_problem(0, 60, 3.0, 1e-3, 0.0, 0.5)
    whole = verified_bound(problem, relax(problem, 0.0, 60.0)[0])
    with stoppable(lambda: None):
        signal.raise_signal(signal.SIGINT)
        assert verified_bound(problem, relax(problem, 0.0, 60.0)[0]) < 0.9 * whole
    assert verified_bound(problem, relax(problem, 0.0, 60.0)[0]) == whole
