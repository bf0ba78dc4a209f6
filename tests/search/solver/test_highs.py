"""HiGHS as searches run it: silent from its first solver on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from autopar.search.solver import highs

SCRIPT = """
import highspy, sys
from autopar.search.solver.highs import new_solver
solver = new_solver(5.0)
solver.addVars(1, [0.0], [1.0])
solver.run()
print("done", solver.getSolution().col_value)
"""


def test_nothing_is_printed() -> None:
    """In a process of its own: a banner is for the first solver only."""
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    assert (run.stdout, run.stderr) == ("done [0.0]\n", "")


def test_a_process_without_output_has_solvers(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(number: int) -> int:
        raise OSError("bad file descriptor")

    monkeypatch.setattr(os, "dup", closed)
    highs._print_banner.cache_clear()
    assert highs.new_solver(1.0, mip_rel_gap=0.25).getOptionValue("mip_rel_gap")[1] == 0.25
