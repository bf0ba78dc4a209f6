"""A custom schedule: a table of actions, as `torch.distributed.pipelining` writes it to CSV files.

One row a device, in its order. ``2F0`` is microbatch 0 forward through stage 2, ``2B0`` its backward, ``2I0`` and
``2W0`` the parts of that for the input and for the weights. Empty cells are ignored, and so are cells of communication,
which follows from the others. Plans contain the text of the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from autopar.costs.read_file import MIB, read_text

MOST_BYTES = 16 * MIB
"""Of a file: a thousand devices and a thousand microbatches have ten."""

Step = tuple[int, str, int]
"""Stage, kind (``F``, ``B``, ``I`` or ``W``) and microbatch."""

# The spellings of torch's `_Action.__repr__`: actions that compute, those of communication and FSDP, and a forward that
# overlaps a backward, which here run one after the other.
_STEP = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
_COMMUNICATION = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])\d*")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")


def as_text(schedule: object) -> str:
    r"""The pin ``schedule`` as plans contain it: a name, or the text of a table.

    Args:
        schedule: a name, rows of actions, the text of a table, or the path of a CSV file.

    Raises:
        ValueError: it is none of these, or the file is no text.
        OSError: the file does not exist or cannot be read.

    >>> as_text([["0F0", "0B0"], ["1F0", "1B0"]])
    '0F0,0B0\n1F0,1B0'
    """
    if isinstance(schedule, Path) or (isinstance(schedule, str) and schedule.endswith(".csv")):
        text = read_text(schedule, MOST_BYTES).strip()
        if not is_table(text):
            raise ValueError(f"{schedule} holds no table of a schedule; write rows such as 0F0,0B0, one a device")
        try:
            parse(text)
        except ValueError as e:
            raise ValueError(f"{schedule}: {e}") from e
        return text
    if isinstance(schedule, str):
        return schedule
    if isinstance(schedule, Iterable):
        rows = [[row] if isinstance(row, str) or not isinstance(row, Iterable) else list(row) for row in schedule]
        if rows and all(isinstance(cell, str) for row in rows for cell in row):
            return "\n".join(",".join(row) for row in rows)
    raise ValueError(
        f"pin 'schedule': {schedule!r} is neither a name nor a table; write rows of actions such as "
        '[["0F0", "0B0"], ["1F0", "1B0"]], one row a device, or the path of a CSV file'
    )


def is_table(schedule: str) -> bool:
    """Whether a schedule is a table, and not a name."""
    # A table has at least two actions, a forward and a backward; no name has a comma.
    return "," in schedule or "\n" in schedule


def text_of(rows: Iterable[Iterable[Step]]) -> str:
    """Inverse of `parse`."""
    return "\n".join(",".join(f"{stage}{kind}{microbatch}" for stage, kind, microbatch in row) for row in rows)


def parse(text: str) -> list[list[Step]]:
    r"""What each device does.

    Raises:
        ValueError: a cell is no action that computes; names it.

    >>> parse("0F0,0B0\n1F0,,1I0,1W0")
    [[(0, 'F', 0), (0, 'B', 0)], [(1, 'F', 0), (1, 'I', 0), (1, 'W', 0)]]
    """
    return [[step for cell in line.split(",") for step in _steps(cell, n)] for n, line in enumerate(text.splitlines())]


def _steps(cell: str, device: int) -> list[Step]:
    cell = cell.strip()
    overlap = _OVERLAP.fullmatch(cell)
    steps = []
    for part in (overlap[1] if overlap else cell).split(";"):
        match = _STEP.fullmatch(part.strip())
        if match:
            steps.append((int(match[1]), match[2], int(match[3])))
        elif part.strip() and not _COMMUNICATION.fullmatch(part.strip()):
            raise ValueError(
                f"device {device} of the schedule's table does {cell!r}; write stage, F, B, I or W and microbatch, "
                "such as 0F0"
            )
    return steps


def checked(text: str, devices: int, microbatches: int, virtual: int) -> list[list[Step]]:
    """A table's rows, if they contain all of a step, once, in an order without deadlock.

    Args:
        text: of the table.
        devices: of the pipeline.
        microbatches: of a step.
        virtual: stages on each device, on average.

    Raises:
        ValueError: says what is wrong with which action.
    """
    rows = parse(text)
    if len(rows) != devices:
        raise ValueError(f"the schedule's table has {len(rows)} rows for {devices} devices; write one a device")
    _require_all(rows, devices * virtual, microbatches)
    _require_end(rows, devices * virtual)
    return rows


def _require_all(rows: Sequence[Sequence[Step]], stages: int, microbatches: int) -> None:
    """Every microbatch goes once through each stage, which is on one device, forward and backward."""
    device_of: dict[int, int] = {}
    kinds: dict[tuple[int, int], list[str]] = {(s, n): [] for s in range(stages) for n in range(microbatches)}
    for device, row in enumerate(rows):
        for stage, kind, microbatch in row:
            if (stage, microbatch) not in kinds:
                raise ValueError(
                    f"device {device} of the schedule's table does {stage}{kind}{microbatch}, but there are {stages} "
                    f"stages and {microbatches} microbatches, counted from 0; change the table, or the pins "
                    "'stages', 'virtual' and 'microbatches'"
                )
            if device_of.setdefault(stage, device) != device:
                raise ValueError(
                    f"stage {stage} of the schedule's table is on devices {device_of[stage]} and {device}; take one"
                )
            kinds[stage, microbatch].append(kind)
    for (stage, microbatch), own in kinds.items():
        if sorted(own) not in (["B", "F"], ["F", "I", "W"]):
            raise ValueError(
                f"the schedule's table takes microbatch {microbatch} through stage {stage} with "
                f"{', '.join(own) or 'nothing'}; it needs one F, and one B or one I and one W"
            )


def _require_end(rows: Sequence[Sequence[Step]], stages: int) -> None:
    """Every action comes after those that it waits for, on whatever device: else the devices deadlock."""
    done: set[Step] = set()
    remaining = [list(row) for row in rows]
    # Let every device run as far as it can, until all are done or none gets any further.
    while any(remaining):
        before = len(done)
        for row in remaining:
            while row and _needs(row[0], stages) <= done:
                stage, kind, microbatch = row.pop(0)
                # What waits for a backward waits for its part for the input: a whole one has it.
                done.add((stage, "I" if kind == "B" else kind, microbatch))
        if len(done) == before:
            stuck = [(device, row[0]) for device, row in enumerate(remaining) if row]
            said = ", ".join(
                f"device {device} at {text_of([[step]])} for {text_of([sorted(_needs(step, stages) - done)])}"
                for device, step in stuck
            )
            raise ValueError(f"the schedule's table comes to no end: waiting are {said}; put these first (I: or B)")


def _needs(step: Step, stages: int) -> set[Step]:
    """What comes before an action; a whole backward counts as its part for the input."""
    stage, kind, microbatch = step
    if kind == "F":
        return {(stage - 1, "F", microbatch)} if stage else set()
    if kind == "W":
        return {(stage, "I", microbatch)}
    next_stage = {(stage + 1, "I", microbatch)} if stage + 1 < stages else set()
    return {(stage, "F", microbatch), *next_stage}
