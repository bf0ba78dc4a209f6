"""Pipeline schedules: the order in which each device works on its stages' microbatches.

Sources: GPipe (arXiv 1811.06965), 1F1B (PipeDream-Flush, arXiv 2006.09503), interleaved 1F1B (Megatron, arXiv
2104.04473), ZB-H1 (zero bubble, arXiv 2401.10241). The orders are those of torch.distributed.pipelining.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]

FORWARD: Kind = "F"
BACKWARD: Kind = "B"
BACKWARD_INPUT: Kind = "I"
BACKWARD_WEIGHT: Kind = "W"


class Action(NamedTuple):
    """One microbatch through one stage: forward, the whole backward, or its part for the input or for the weights."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} of stage {self.stage}"


Order = tuple[tuple[Action, ...], ...]
"""What each device does, in order."""


class Schedule(NamedTuple):
    """What sets the schedules apart.

    Attributes:
        ahead: forwards that a device does before its first backward, for each device behind it; None: all there are.
        interleaved: whether a device may have several stages.
        split: whether the backward is split, so that the part for the weights fills gaps.
    """

    ahead: int | None
    interleaved: bool = False
    split: bool = False


SCHEDULES = {
    "gpipe": Schedule(ahead=None),
    "1f1b": Schedule(ahead=1),
    "interleaved": Schedule(ahead=2, interleaved=True),
    "zb-h1": Schedule(ahead=1, split=True),
}


def order(schedule: str, stages: int, microbatches: int, virtual: int = 1) -> Order:
    """What each device of a pipeline does.

    Stage ``i`` of the ``stages * virtual`` ones lies on device ``i % stages``. A device first does forwards (the
    warm-up), then a forward and a backward by turns, then what is left. ZB-H1's device ``i`` is ``i`` backwards behind
    with the weights, so that no device holds more than ``stages`` microbatches.

    Args:
        schedule: a key of `SCHEDULES`.
        stages: of the pipeline: its devices.
        microbatches: of a step.
        virtual: stages on each device, more than one for ``interleaved`` only.

    Raises:
        ValueError: the schedule is not known, or does not work for these numbers; says for which it does.

    >>> [" ".join(a.kind + str(a.microbatch) for a in device) for device in order("1f1b", 2, 3)]
    ['F0 F1 B0 F2 B1 B2', 'F0 B0 F1 B1 F2 B2']
    """
    rule = _rule(schedule, stages, microbatches, virtual)
    a_round = microbatches // max(1, microbatches // stages)
    count = microbatches * virtual
    rows = []
    for device in range(stages):
        warmup = count
        if rule.ahead is not None:
            warmup = min(count, (virtual - 1) * a_round + rule.ahead * (stages - 1 - device))
        row = []
        for kind, step in _turns(count, warmup, device if rule.split else None):
            local, microbatch = _place(step, a_round, virtual)
            local = local if kind == FORWARD else virtual - 1 - local  # backwards begin with the last stage
            row.append(Action(local * stages + device, kind, microbatch))
        rows.append(tuple(row))
    return tuple(rows)


def _rule(schedule: str, stages: int, microbatches: int, virtual: int) -> Schedule:
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}; one of {', '.join(SCHEDULES)}")
    for name, number in (("stages", stages), ("microbatches", microbatches), ("virtual", virtual)):
        if number < 1:
            raise ValueError(f"{name} {number}: a pipeline needs 1 or more")
    rounds = max(1, microbatches // stages)
    if virtual > 1 and not SCHEDULES[schedule].interleaved:
        raise ValueError(f"virtual {virtual}: {schedule} has one stage a device; take interleaved")
    if SCHEDULES[schedule].interleaved and microbatches % rounds:
        raise ValueError(
            f"microbatches {microbatches}: interleaved does {rounds} rounds on {stages} stages, all alike; "
            f"take a multiple of {stages}"
        )
    return SCHEDULES[schedule]


def _place(step: int, a_round: int, virtual: int) -> tuple[int, int]:
    """Which of a device's stages its step-th forward is on, and of which microbatch: rounds, and all stages in each.

    >>> [_place(step, 2, 2) for step in range(6)]
    [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3)]
    """
    turn, within = divmod(step, a_round)
    return turn % virtual, turn // virtual * a_round + within


def _turns(count: int, warmup: int, lag: int | None) -> list[tuple[Kind, int]]:
    """Kinds and numbers of a device's actions; with a lag, the weights' part comes that many backwards later."""
    turns: list[tuple[Kind, int]] = []
    for step in range(count + warmup):
        if step < count:
            turns.append((FORWARD, step))
        if step >= warmup:
            turns.append((BACKWARD if lag is None else BACKWARD_INPUT, step - warmup))
        if lag is not None and step >= warmup + lag:
            turns.append((BACKWARD_WEIGHT, step - warmup - lag))
    if lag is not None:
        turns += [(BACKWARD_WEIGHT, step) for step in range(max(0, count - lag), count)]
    return turns
