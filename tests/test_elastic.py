"""`autopar.elastic` in one process that is started anew; tests/distributed/test_elastic.py has several nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import autopar
from autopar.checkpoint import elastic as elastic_module
from autopar.errors import AutoparError
from tests.distributed.elastic_nodes import MODEL, expected

Start = Callable[..., tuple[Any, Callable[[], float]]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts the run anew: what is left of it is in files."""
    names: dict[str, Any] = {}
    exec(MODEL, names)
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv("AUTOPAR_SNAPSHOTS", str(tmp_path / "memory"))
    monkeypatch.setattr("autopar.checkpoint.elastic.memory_root", lambda: tmp_path / "none")

    def begin(**settings: Any) -> tuple[Any, Callable[[], float]]:
        model, optimizer, scheduler, sampler, data = names["made"](lambda m, batch: autopar.parallelize(m, None, batch))
        run = autopar.elastic(model, optimizer, scheduler=scheduler, sampler=sampler, **settings)
        return run, lambda: names["train"](model, optimizer, scheduler, sampler, data)

    return begin


def go(run: Any, train: Callable[[], float], total: int, *, cut: int | None = None) -> dict[int, float]:
    """Losses of the steps that are left, up to one in the midst of which the process is lost."""
    losses = {}
    for step in run.steps(total):
        losses[step] = train()
        if step == cut:
            break
    return losses


@pytest.mark.slow
def test_a_process_that_is_lost_goes_on_where_it_was(start: Start, tmp_path: Path) -> None:
    losses: dict[int, float] = {}
    for begins, cut in ((0, 0), (0, 4), (4, 4), (4, 6), (6, None)):
        run, train = start()
        assert (run.step, run.source) == (begins, "memory" if losses else "start") and run.same_random_numbers
        losses |= go(run, train, 8, cut=cut)
        # The two last steps, and nothing of the starts before.
        assert len(list((tmp_path / "memory").iterdir())) == min(2, run.step - begins + 1)
    assert [losses[i] for i in range(8)] == pytest.approx(expected(8)[0], abs=1e-12)
    run, train = start()
    assert run.step == 8 and not go(run, train, 8)


@pytest.mark.slow
def test_what_is_not_in_memory_is_in_the_last_checkpoint(start: Start, tmp_path: Path) -> None:
    def lose() -> None:
        for path in (tmp_path / "memory").iterdir():
            path.unlink()

    settings = {"folder": tmp_path / "saved", "save_every": 2}
    losses = go(*start(**settings), 8, cut=1)
    lose()
    run, train = start(**settings)
    assert (run.step, run.source) == (0, "checkpoint")  # that of the start
    losses |= go(run, train, 8, cut=5)
    lose()
    run, train = start(**settings, every=3)
    assert (run.step, run.source) == (4, "checkpoint")
    losses |= go(run, train, 8, cut=7)
    # Of step 6 there is a snapshot and a checkpoint.
    run, train = start(**settings)
    assert (run.step, run.source) == (6, "memory")
    losses |= go(run, train, 8)
    assert [losses[i] for i in range(8)] == pytest.approx(expected(8)[0], abs=1e-12)


def test_a_process_that_dies_as_it_writes(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had half written is no snapshot; the one before it is there, and so is the loss curve."""
    real = elastic_module.write_snapshot

    def half(folder: Path, moment: Any, *rest: Any) -> Path:
        written = real(folder, moment, *rest)
        if moment.step == 3:
            whole = written.read_bytes()
            written.unlink()
            written.with_suffix(".partial").write_bytes(whole[: len(whole) // 2])
            raise KeyboardInterrupt
        return written

    losses: dict[int, float] = {}
    run, train = start()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(elastic_module, "write_snapshot", half)
        for step in run.steps(5):
            losses[step] = train()
    assert [p.suffix for p in (tmp_path / "memory").iterdir()].count(".partial") == 1
    run, train = start()
    assert (run.step, run.source) == (2, "memory")
    again = go(run, train, 5)
    assert again[2] == losses[2] and [(losses | again)[i] for i in range(5)] == pytest.approx(expected(5)[0], abs=1e-12)


def test_a_state_that_is_nowhere_is_not_begun_anew(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPAR_HELD", "1")  # as the launcher says where other nodes had one
    with pytest.raises(AutoparError, match=r"all nodes that had the state of this run are lost, and .*another --name"):
        start()
    monkeypatch.setenv("AUTOPAR_HELD", "0")
    go(*start(folder=tmp_path / "saved", save_every=1), 2)
    for path in (tmp_path / "memory").iterdir():
        path.unlink()
    monkeypatch.setenv("AUTOPAR_HELD", "1")
    run, _ = start(folder=tmp_path / "saved")
    assert (run.step, run.source) == (2, "checkpoint")


def test_memory_that_has_no_room(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(
        AutoparError, match=r"three of each are kept, and .*memory has room for 1000 more; .*--shm-size"
    ):
        start()


def test_snapshots_of_another_model_are_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    go(*start(), 2)
    other = autopar.parallelize(torch.nn.Linear(2, 2), None, (torch.zeros(1, 2),), loss_fn=lambda o, b: o.sum())
    with pytest.raises(AutoparError, match="is of another model, optimizer or loop"):
        autopar.elastic(other)


def test_wrong_uses(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    undecided = autopar.parallelize(torch.nn.Linear(2, 2), None, loss_fn=lambda o, b: o.sum())
    with pytest.raises(ValueError, match=r"layouts that are decided: pass batch= to parallelize"):
        autopar.elastic(undecided)
    run, _ = start()
    with pytest.raises(ValueError, match="total=-1"):
        next(run.steps(-1))
    monkeypatch.setattr(type(run._model), "data_world_size", 4)
    with pytest.raises(ValueError, match=r"total=10: so many rows cannot be divided evenly over the 4 parts"):
        run.rows(10)
    monkeypatch.setattr(type(run._model), "data_rank", 2)
    assert run.rows(12) == slice(6, 9)
