"""A folder of plans of a test's own, and what is searched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autopar import Search
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.search import cache
from autopar.search import padding as padded
from autopar.search.options import Job
from autopar.sharding.dims import Dims


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "plans"))
    return tmp_path / "plans"


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Search]:
    """Grows by one with every search."""
    ran: list[Search] = []
    real = padded.find_plan

    def counted(program: Program, dims: Dims, job: Job, *rest: Any) -> Plan:
        ran.append(job.search)
        return real(program, dims, job, *rest)

    monkeypatch.setattr(padded, "find_plan", counted)
    return ran
