"""The schedules of the LLM Training Puzzles: within the author's targets, as the page shows them, and checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.puzzles import PUZZLES, Machine, Name, Puzzle, last_start, peak, pictures, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "puzzles.md"


@pytest.mark.parametrize("puzzle", PUZZLES, ids=lambda p: p.name)
def test_targets_are_reached(puzzle: Puzzle) -> None:
    machine = puzzle.schedule()
    timeline = machine.run()
    assert last_start(timeline) <= puzzle.time
    assert peak(timeline) <= puzzle.memory
    # Only in the pipeline of whole batches the step ends after the time that the last task is to start at.
    assert timeline.step_seconds <= puzzle.time or (puzzle.name[0] == "5" and timeline.step_seconds < 66.3)
    # Nothing is left out: each batch goes through each layer once, forward and backward.
    computed = sum(task.seconds for task in machine.tasks if task.name[0] in "FB")
    assert computed == 2 * machine.layers * machine.batches


def test_the_page_shows_them() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert table() in page and pictures() in page


def machine() -> Machine:
    found = Machine(1, 2)
    found.load(0, [0])
    found.batch(0, [0])
    found.forward(0, 0, [0])
    found.loss(0, [0])
    return found


def test_what_a_device_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="has no Name"):
        machine().forward(0, 0, [1])
    with pytest.raises(ValueError, match="already has"):
        machine().batch(0, [0])
    sharded = Machine(1, 1, 2)
    sharded.load(0, [0], 2)
    sharded.batch(0, [0])
    with pytest.raises(ValueError, match="kind='weight'"):
        sharded.forward(0, 0, [0])


def test_gradients_have_each_batch_once() -> None:
    missing = machine()
    missing.backward(0, 0, [0])
    with pytest.raises(ValueError, match="gradients of all batches of layer 0"):
        missing.update(0, 0)
    missing.batch(0, [0])
    missing.forward(0, 0, [0])
    missing.loss(0, [0])
    with pytest.raises(ValueError, match=r"batches \[0\] are twice"):
        missing.backward(0, 0, [0])
    two = Machine(1, 2, 2)
    for device in range(2):
        two.load(device, [0])
        two.batch(device, [0])
        two.forward(device, 0, [0])
        two.loss(device, [0])
        two.backward(device, 0, [0])
    with pytest.raises(ValueError, match="has a batch on two devices"):
        two.reduce(0, range(2))


def test_all_weights_are_updated_and_nothing_is_freed_in_use() -> None:
    with pytest.raises(ValueError, match="were updated"):
        machine().run()
    early = Machine(1, 1, 2)
    early.load(0, [0])
    early.batch(0, [0])
    early.forward(0, 0, [0])
    early.send(0, 1, Name("activation", 1, (0,)), keep=True)
    early.loss(0, [0])
    with pytest.raises(ValueError, match="frees what a later task uses"):
        early.run()
