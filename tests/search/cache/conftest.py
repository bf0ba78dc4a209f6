"""A folder of plans of a test's own, and what is searched."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar import Search
from autopar.ir.program import Program
from autopar.search import cache
from autopar.search import padding as padded
from autopar.search.find import Begun
from autopar.search.options import Job
from autopar.sharding.dims import Dims
from autopar.sharding.layer_classes import LayerClasses


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "plans"))
    return tmp_path / "plans"


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Search]:
    """Grows by one with every search."""
    ran: list[Search] = []
    real = padded.begin

    def counted(program: Program, dims: Dims, job: Job, classes: LayerClasses) -> Begun:
        ran.append(job.search)
        return real(program, dims, job, classes)

    monkeypatch.setattr(padded, "begin", counted)
    return ran
