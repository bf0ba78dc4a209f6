"""Changed files are refused in clear words, or as good as they were: no tracebacks, no hangs, no wrong plans."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.fuzz.files.kinds import KINDS
from tests.fuzz.files.run import files

CHUNK, DEEP = 250, 2000


def check(kind: str, seeds: range, folder: Path) -> Counter[str]:
    kinds: Counter[str] = Counter()
    for seed, outcome in files(kind, seeds, folder):
        assert outcome.kind in ("equal", "error"), f"{kind} {seed}: {outcome.kind} {outcome.detail}: {outcome.text}"
        kinds[outcome.kind] += 1
    return kinds


@pytest.mark.parametrize("kind", ["index"])
def test_some_changed_files(kind: str, tmp_path: Path) -> None:
    """Of the kinds whose own tests change none: plans, clusters and manifests are in theirs."""
    assert len(check(kind, range(40), tmp_path)) == 2


@pytest.mark.deep
@pytest.mark.parametrize("first", range(0, DEEP, CHUNK))
@pytest.mark.parametrize("kind", KINDS)
def test_many_changed_files(kind: str, first: int, tmp_path: Path) -> None:
    assert len(check(kind, range(first, first + CHUNK), tmp_path)) == 2
