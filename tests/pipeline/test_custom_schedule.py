"""Schedules by hand: what they may say, and that they compute what one device does."""

from __future__ import annotations

import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.compiler import program_of, solve
from autopar.errors import InfeasibleError
from autopar.ir.plan import Plan
from autopar.pipeline.custom_schedule import as_text, parse, text_of
from autopar.pipeline.schedules import SCHEDULES, any_count, device_of, order
from autopar.search.options import Search
from tests import models as zoo
from tests.pipeline.test_pipelines import BOUND, staged

TABLE = [["0F0", "0F1", "", "0B0", "0I1", "0W1"], ["1F0", "1I0", "1F1", "1W0", "1B1"]]
"""Whole and split backwards, mixed."""

BENT = [
    ["0F0", "1F0", "0F1", "1F1", "1B0", "0B0", "1B1", "0B1"],
    ["2F0", "3F0", "3B0", "2B0", "2F1", "3F1", "3B1", "2B1"],
]
"""Stages that follow each other on one device."""


@pytest.mark.parametrize(("table", "virtual"), [(TABLE, 1), (BENT, 2)])
def test_by_hand(table: list[list[str]], virtual: int) -> None:
    pins = {"stages": 2, "virtual": virtual, "microbatches": 2, "schedule": table}
    report = staged("cnn", {"stage": 2}, pins)
    assert report.max_error < BOUND, report.worst
    assert Plan.from_dict(report.plan.to_dict()).pipeline == report.plan.pipeline
    assert "a custom schedule" in report.plan.summary()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_names_stand_for(schedule: str) -> None:
    virtual = 2 if SCHEDULES[schedule].interleaved else 1
    known = order(schedule, 2, 4, virtual)
    assert order(text_of(known), 2, 4, virtual) == known


def test_files_of_torch(tmp_path: Path) -> None:
    from torch.distributed.pipelining.schedules import get_schedule_class

    stages = [SimpleNamespace(num_stages=4, group_size=2, group_rank=0, stage_index=i, submod=None) for i in range(2)]
    schedule: Any = get_schedule_class("DualPipeV")(stages, 4)  # type: ignore[arg-type]
    file = tmp_path / "dual.csv"
    for detail in ("compute_only", "compute_comms"):
        schedule._dump_csv(str(file), detail)
        assert "OVERLAP" in file.read_text()
        assert order(as_text(file), 2, 4, 2) == order("dualpipe-v", 2, 4, 2)


def test_another_number_of_microbatches() -> None:
    text = any_count(as_text(BENT), 2, 3, 2)
    assert device_of(order(text, 2, 3, 2)) == [0, 0, 1, 1]
    assert any_count(text, 2, 3, 2) == text


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ([["0F0", "0B0"]], "has 1 rows for 2 devices"),
        ([["0F0", "0B0"], ["1F0", "1X0"]], "device 1 of the schedule's table does '1X0'"),
        ([["0F0", "0B0"], ["1F0", "1B0", "2F0"]], "does 2F0, but there are 2 stages and 1 microbatches"),
        ([["0F0", "0B0"], ["1F0", "1B1"]], "does 1B1, but there are 2 stages and 1 micro"),
        ([["0F0", "1B0"], ["1F0", "0B0"]], "stage 1 of the schedule's table is on devices 0 and 1"),
        ([["0F0", "0B0"], ["1F0", "1I0"]], "microbatch 0 through stage 1 with F, I; it needs"),
        ([["0F0", "0B0", "0B0"], ["1F0", "1B0"]], "microbatch 0 through stage 0 with F, B, B"),
        ([["0B0", "0F0"], ["1F0", "1B0"]], "comes to no end: .*device 0 at 0B0 for 0F0,1I0"),
        ([["0F0", "0W0", "0I0"], ["1F0", "1B0"]], "device 0 at 0W0 for 0I0"),
        ([["0F0", 7], ["1F0", "1B0"]], "neither a name nor a table"),
        (7, "neither a name nor a table"),
    ],
)
def test_what_is_wrong_is_said(table: Any, says: str) -> None:
    program = program_of(*zoo.mlp())
    with pytest.raises((InfeasibleError, ValueError), match=says):
        solve(
            program,
            {"a": 2},
            "cpu",
            search=Search(pins={"stages": 2, "microbatches": 1, "schedule": table}, cache=False),
        )


def test_text_and_back() -> None:
    assert text_of(parse(as_text(BENT))) == as_text(BENT)


def changed(draw: random.Random, text: str) -> str:
    cells = [line.split(",") for line in text.splitlines()]
    row = draw.choice(cells)
    i = draw.randrange(len(row))
    match draw.randrange(6):
        case 0:
            row[i] = draw.choice(["", "9" * 5000 + "F0", "0F" + "9" * 30, "0f0", "-1F0", "٣F0", "0F0;0B0", "\0", "("])
        case 1:
            del row[i]
        case 2:
            row.insert(i, draw.choice([*draw.choice(cells), "", " ", "0SEND_F0", "1RECV_B1"]))
        case 3:
            cells.remove(row)
        case 4:
            cells.append(list(row))
        case _:
            wrong = draw.choice(["\n", ",", "B", "9", " ", '"', "\u2028"])
            at = draw.randrange(len(text))
            return text[:at] + wrong + text[at + 1 :]
    return "\n".join(",".join(row) for row in cells)


def changed_files(seed: int, count: int, file: Path) -> int:
    """How many changed files are refused, each with an error that says why; others are schedules."""
    draw, refused = random.Random(seed), 0
    for _ in range(count):
        text, virtual = draw.choice([(as_text(TABLE), 1), (as_text(BENT), 2)])
        for _ in range(draw.choice([1, 1, 2])):
            text = changed(draw, text) or text
        file.write_text(text)
        try:
            rows = order(as_text(file), 2, 2, virtual)
        except ValueError as e:
            refused += 1
            assert "table" in str(e), e
            continue
        done = [step for row in rows for step in row]
        assert len(done) == len(set(done)) and {stage for stage, _, _ in done} == set(range(2 * virtual))
    return refused


def test_changed_files_are_schedules_or_errors(tmp_path: Path) -> None:
    assert 75 < changed_files(0, 150, tmp_path / "schedule.csv") < 150


@pytest.mark.deep
def test_many_changed_files_are_schedules_or_errors(tmp_path: Path) -> None:
    assert 1000 < changed_files(1, 2000, tmp_path / "schedule.csv") < 2000


def test_only_regular_files_that_hold_a_table_are_read(tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    for text in ("", "1f1b", "hello"):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"schedule\.csv holds no table of a schedule; write rows"):
            as_text(file)
    file.write_text("0F0,0B0\n1F0,1X0")
    with pytest.raises(ValueError, match=r"schedule\.csv: device 1 of the schedule's table does '1X0'"):
        as_text(str(file))
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"schedule\.csv: not a text file in UTF-8"):
        as_text(file)
    with file.open("wb") as opened:
        opened.truncate(2**40)
    with pytest.raises(ValueError, match=r"schedule\.csv has \d+ bytes, more than"):
        as_text(file)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ValueError, match=r"schedule\.csv is a pipe"):
        as_text(file)
