"""Folders of checkpoints: the last whole one is found, whatever killed writers have left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autopar.runtime.checkpoint import folders


def saved(root: Path, step: int) -> str:
    name = folders.new_name(step)
    folders.begin(root, name)
    assert folders.publish(root, name, f"manifest {step}") == root / name
    return name


def test_the_last_one_is_found(tmp_path: Path) -> None:
    names = [saved(tmp_path, step) for step in (1, 2, 10)]
    assert folders.find(tmp_path) == tmp_path / names[2]
    assert folders.find(tmp_path / names[0]) == tmp_path / names[0]
    assert folders.whole(tmp_path) == names
    again = saved(tmp_path, 2)  # a run that went back
    assert folders.find(tmp_path) == tmp_path / again
    assert (tmp_path / again / folders.MANIFEST).read_text() == "manifest 2"


def test_a_run_that_went_back_keeps_its_own(tmp_path: Path) -> None:
    names = [saved(tmp_path, step) for step in (10, 3)]
    for age, name in enumerate(reversed(names)):
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    newest = saved(tmp_path, 4)
    folders.prune(tmp_path, 2, newest)
    assert folders.whole(tmp_path) == [names[1], newest]
    (tmp_path / folders.LATEST).unlink()
    assert folders.find(tmp_path) == tmp_path / newest


def test_what_is_not_whole_is_not_found(tmp_path: Path) -> None:
    name = saved(tmp_path, 1)
    folders.begin(tmp_path, folders.new_name(2))
    (tmp_path / folders.new_name(3)).mkdir()  # no manifest
    (tmp_path / "step-00000004-00000000").symlink_to(tmp_path / name)
    assert folders.find(tmp_path) == tmp_path / name


@pytest.mark.parametrize("pointer", ["", "step-00000009-00000000", "../..", "\x00", None])
def test_a_pointer_that_says_nothing(tmp_path: Path, pointer: str | None) -> None:
    """Its writer was killed, or somebody has written to it: the newest whole one counts."""
    names = [saved(tmp_path, step) for step in (1, 2)]
    (tmp_path / folders.LATEST).unlink() if pointer is None else (tmp_path / folders.LATEST).write_text(pointer)
    assert folders.find(tmp_path) == tmp_path / names[1]


def test_nothing_there(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FileNotFoundError, match=r"no checkpoint in .*checkpoint\.save"):
            folders.find(folder)


def test_those_of_workers_alone(tmp_path: Path) -> None:
    for worker in range(2):
        (tmp_path / f"worker-{worker}").mkdir()
        saved(tmp_path / f"worker-{worker}", 1)
    with pytest.raises(FileNotFoundError, match=r"of each worker, worker-0, worker-1, .* the folder of one of them"):
        folders.find(tmp_path)


def test_pruning_keeps_the_last(tmp_path: Path) -> None:
    names = [saved(tmp_path, step) for step in (1, 2, 3, 4)]
    left = folders.begin(tmp_path, folders.new_name(5))
    (left / "file").write_text("")
    (tmp_path / "mine").mkdir()
    folders.prune(tmp_path, 2, names[3])
    assert sorted(os.listdir(tmp_path)) == sorted([*names[2:], "latest", "mine"])
    folders.prune(tmp_path, 1, names[2])
    assert folders.whole(tmp_path) == [names[2]]
