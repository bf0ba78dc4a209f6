"""Files and folders of the cache: what is damaged, or what others may have written, does no harm."""

from __future__ import annotations

import os
import re
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autopar import Search
from autopar.ir.plan import Plan
from autopar.search import cache
from autopar.search.options import Job
from tests import models as zoo
from tests.search.cache.planned import AXES, CLUSTER, planned


def corrupt(file: Path, how: str) -> None:
    text = file.read_text()
    file.write_bytes({"empty": b"", "cut": text[: len(text) // 2].encode(), "bytes": b"\xff\x00"}.get(how, b"{}"))
    if how == "another program":
        plan = replace(planned(search=Search(cache=False)), fingerprint="0" * 16)
        plan.save(file)


@pytest.mark.parametrize("how", ["empty", "cut", "bytes", "no plan", "another program"])
def test_a_damaged_file_is_searched_again(
    how: str, kept: Path, searches: list[Search], caplog: pytest.LogCaptureFixture
) -> None:
    first = planned()
    (file,) = kept.iterdir()
    corrupt(file, how)
    searches.clear()
    assert planned() == first
    assert len(searches) == 1
    assert "searched again" in caplog.text
    assert Plan.load(file) == first
    assert planned() == first
    assert len(searches) == 1


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file" / "plans"))
    planned()
    planned()
    assert caplog.text.count("plans are not cached") == 1
    assert cache.VARIABLE in caplog.text


def test_writers_at_the_same_time_do_no_harm(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    program, _, _ = zoo.captured("mlp")
    plan, job = planned(search=Search(cache=False)), Job(AXES, CLUSTER)
    file = kept / "plan.json"
    read: list[Plan | None] = []

    def work() -> None:
        for _ in range(20):
            cache.store(file, plan)
            read.append(cache.load(file, program, job))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read) == 80
    assert all(found == plan for found in read)
    assert "searched again" not in caplog.text
    assert list(kept.iterdir()) == [file]


def test_the_oldest_make_room(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_PLANS", 3)
    plan = planned(search=Search(cache=False))
    for i in range(5):
        cache.store(kept / f"{i}.json", plan)
        os.utime(kept / f"{i}.json", (i, i))
    assert sorted(f.name for f in kept.iterdir()) == ["2.json", "3.json", "4.json"]


def test_the_folder_is_the_users_own(kept: Path) -> None:
    planned()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    assert [stat.S_IMODE(file.stat().st_mode) for file in kept.iterdir()] == [0o600]


def world_writable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.chmod(0o707)


def of_another_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (world_writable, "everybody may write to the folder .*plans; chmod go-w it, or set AUTOPAR_CACHE"),
        (of_another_user, r"the folder .*plans belongs to user \d+, not to \d+; set AUTOPAR_CACHE to your own"),
    ],
)
def test_a_folder_that_others_may_write_to_is_not_used(
    change: Callable[[Path, pytest.MonkeyPatch], None],
    says: str,
    kept: Path,
    searches: list[Search],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    planned()
    (file,) = kept.iterdir()
    written = file.stat().st_mtime_ns
    change(kept, monkeypatch)
    planned()
    assert len(searches) == 2
    assert re.search(f"plans are not cached: {says}", caplog.text)
    assert [f.stat().st_mtime_ns for f in kept.iterdir()] == [written]
    # Also where the folder was made after the first look.
    caplog.clear()
    cache.store(kept / "other.json", planned(search=Search(cache=False)))
    assert re.search(f"the plan is not cached: {says}", caplog.text)
    assert [f.name for f in kept.iterdir()] == [file.name]


def test_a_group_may_write(kept: Path, searches: list[Search]) -> None:
    """As the folders of earlier versions are, where each user is a group."""
    planned()
    kept.chmod(0o775)
    planned()
    assert len(searches) == 1


def fifo(file: Path) -> None:
    os.mkfifo(file)


def link(file: Path) -> None:
    other = file.with_name("elsewhere")
    replace(planned(search=Search(cache=False)), optimizer="sgd").save(other)
    file.symlink_to(other)


def huge(file: Path) -> None:
    with file.open("wb") as opened:
        opened.truncate(2**40)


def deep(file: Path) -> None:
    file.write_text("[" * 100_000)


@pytest.mark.parametrize("put", [fifo, link, huge, deep, Path.mkdir])
def test_only_regular_files_are_read(
    put: Callable[[Path], None], kept: Path, searches: list[Search], caplog: pytest.LogCaptureFixture
) -> None:
    first = planned()
    (file,) = kept.iterdir()
    file.unlink()
    put(file)
    searches.clear()
    assert planned() == first
    assert searches
    assert "searched again" in caplog.text
    if put is not Path.mkdir:  # a folder stays: what is in it is none of ours
        assert file.is_file() and not file.is_symlink()
        assert Plan.load(file) == first


def test_what_killed_writers_have_left_is_deleted(kept: Path) -> None:
    kept.mkdir()
    for name, age in (("old.tmp", 2 * cache.LEFT_BEHIND), ("young.tmp", 1.0), ("others.txt", 1e9)):
        (kept / name).write_text("")
        when = time.time() - age
        os.utime(kept / name, (when, when))
    planned()
    assert sorted(f.suffix for f in kept.iterdir()) == [".json", ".tmp", ".txt"]
    assert (kept / "young.tmp").exists()
