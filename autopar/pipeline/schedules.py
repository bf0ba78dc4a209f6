"""Pipeline schedules: the order in which each device works on its stages' microbatches.

Sources: GPipe (arXiv 1811.06965), 1F1B (PipeDream-Flush, arXiv 2006.09503), interleaved 1F1B (Megatron, arXiv
2104.04473), looped breadth-first (arXiv 2211.05953), ZB-H1 and ZBV (zero bubble, arXiv 2401.10241), DualPipeV
(arXiv 2412.19437 and its sequel). The orders are those of torch.distributed.pipelining.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from autopar._torch_compat import torch_schedule
from autopar.ir.plan import Plan
from autopar.pipeline.custom_schedule import checked, is_table, parse, text_of

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
    """The properties in which schedules differ.

    Attributes:
        ahead: forwards that a device runs before its first backward, for each device after it; None: all there are.
        interleaved: whether a device may have several stages.
        split: whether the backward is split, so that the part for the weights fills bubbles.
        torch: name of the schedule in torch.distributed.pipelining, if its order comes from there.
        two: whether each device has exactly two stages, the first device the first and the last one (a V).
        stage_by_stage: whether a device takes all microbatches through one stage before the next, which works for any
            number of microbatches.
    """

    ahead: int | None
    interleaved: bool = False
    split: bool = False
    torch: str = ""
    two: bool = False
    stage_by_stage: bool = False


SCHEDULES = {
    "gpipe": Schedule(ahead=None),
    "1f1b": Schedule(ahead=1),
    "interleaved": Schedule(ahead=2, interleaved=True),
    "looped-bfs": Schedule(ahead=None, interleaved=True, torch="LoopedBFS"),
    "zb-h1": Schedule(ahead=1, split=True),
    "breadth-first": Schedule(ahead=None, interleaved=True, stage_by_stage=True),
    "breadth-first-v": Schedule(ahead=None, interleaved=True, stage_by_stage=True, two=True),
    "zbv": Schedule(ahead=None, interleaved=True, split=True, torch="ZBVZeroBubble", two=True),
    "dualpipe-v": Schedule(ahead=None, interleaved=True, split=True, torch="DualPipeV", two=True),
}


def order(schedule: str, stages: int, microbatches: int, virtual: int = 1) -> Order:
    """What each device of a pipeline does.

    Stage ``i`` of the ``stages * virtual`` ones is on device ``i % stages``; with ``zbv`` and ``dualpipe-v`` the second
    half goes back, from the last device to the first. A device first runs forwards (the warm-up), then forwards and
    backwards alternately, then the remaining backwards. ZB-H1's device ``i`` runs the part for the weights ``i``
    backwards later than that for the input, so that no device holds more than ``stages`` microbatches.

    Args:
        schedule: a key of `SCHEDULES`, or the text of a table, see `autopar.pipeline.custom_schedule`.
        stages: of the pipeline: its devices.
        microbatches: of a step.
        virtual: stages on each device.

    Raises:
        ValueError: the schedule is not known, or does not work for these numbers; says for which it does.

    >>> [" ".join(a.kind + str(a.microbatch) for a in device) for device in order("1f1b", 2, 3)]
    ['F0 F1 B0 F2 B1 B2', 'F0 B0 F1 B1 F2 B2']
    """
    if is_table(schedule):
        return _actions(checked(schedule, stages, microbatches, virtual))
    rule = _rule(schedule, stages, microbatches, virtual)
    if rule.torch:
        return _actions(torch_schedule(rule.torch, stages, microbatches, virtual))
    if rule.stage_by_stage:
        own = [
            [n * stages + (stages - 1 - device if rule.two and n % 2 else device) for n in range(virtual)]
            for device in range(stages)
        ]
        return _stage_by_stage(own, microbatches)
    # Megatron's interleaving: a device runs a round of microbatches (as many as there are devices, if these divide)
    # through its first stage, then the same through its next.
    round_size = microbatches // max(1, microbatches // stages)
    count = microbatches * virtual
    rows = []
    for device in range(stages):
        warmup = count
        if rule.ahead is not None:
            warmup = min(count, (virtual - 1) * round_size + rule.ahead * (stages - 1 - device))
        row = []
        for kind, step in _turns(count, warmup, device if rule.split else None):
            local, microbatch = _stage_and_microbatch(step, round_size, virtual)
            local = local if kind == FORWARD else virtual - 1 - local  # backwards begin with the last stage
            row.append(Action(local * stages + device, kind, microbatch))
        rows.append(tuple(row))
    return tuple(rows)


def require_numbers(schedule: str, stages: int, microbatches: int, virtual: int = 1) -> None:
    """Refuse numbers for which a schedule does not work; the arguments are those of `order`.

    Raises:
        ValueError: says for which it does.
    """
    if is_table(schedule):
        checked(schedule, stages, microbatches, virtual)
    else:
        _rule(schedule, stages, microbatches, virtual)


def _actions(rows: Sequence[Sequence[tuple[int, str, int]]]) -> Order:
    return tuple(tuple(Action(stage, kind, n) for stage, kind, n in row) for row in rows)  # type: ignore[arg-type]


def _stage_by_stage(own: Sequence[Sequence[int]], microbatches: int) -> Order:
    """All microbatches through one stage after the other, of each device's own stages."""
    rows = []
    for stages in own:
        forward = [Action(stage, FORWARD, n) for stage in stages for n in range(microbatches)]
        back = [Action(stage, BACKWARD, n) for stage in reversed(stages) for n in range(microbatches)]
        rows.append((*forward, *back))
    return tuple(rows)


def suits_one_microbatch(schedule: str) -> bool:
    """Whether a schedule is meant for a single microbatch, too."""
    return is_table(schedule) or SCHEDULES[schedule].stage_by_stage


def splits(schedule: str) -> bool:
    """Whether a schedule splits the backward."""
    if is_table(schedule):
        return any(kind == BACKWARD_INPUT for row in parse(schedule) for _, kind, _ in row)
    return SCHEDULES[schedule].split


def in_two_parts(order: Order) -> bool:
    """Whether backward passes are: that for the gradient of the input, and later that for the weights."""
    return any(action.kind == BACKWARD_INPUT for row in order for action in row)


def any_count(schedule: str, stages: int, microbatches: int, virtual: int) -> str:
    """The schedule, or one that has each stage on the same device and works for this number of microbatches."""
    try:
        order(schedule, stages, microbatches, virtual)
    except ValueError:
        # Parameters are on their stages, and must stay there: only the order of the actions may change.
        if is_table(schedule):
            own = [sorted({stage for stage, _, _ in row}) for row in parse(schedule)]
            return text_of(_stage_by_stage(own, microbatches))
        return "breadth-first-v" if SCHEDULES[schedule].two else "breadth-first"
    return schedule


def placed(order: Order, places: Sequence[int]) -> Order:
    """The same with the first row on the device with the first of these numbers, and so on; none: as they are.

    >>> [row[0].stage for row in placed(order("1f1b", 2, 3), (1, 0))]
    [1, 0]
    """
    return tuple(order[places.index(device)] for device in range(len(order))) if places else order


def order_of(plan: Plan) -> Order:
    """What each device along the axis of a plan's pipeline does."""
    assert plan.pipeline is not None
    devices = dict(plan.axes)[plan.pipeline.axis]
    rows = order(plan.pipeline.schedule, devices, plan.microbatches, len(plan.stages) // devices)
    return placed(rows, plan.pipeline.places)


def device_of(order: Order) -> list[int]:
    """The device of each stage.

    Raises:
        ValueError: a stage is on no device, or on two.
    """
    devices: dict[int, int] = {}
    for device, row in enumerate(order):
        for action in row:
            if devices.setdefault(action.stage, device) != device:
                raise ValueError(f"stage {action.stage} is on devices {devices[action.stage]} and {device}; take one")
    missing = sorted(set(range(max(devices, default=-1) + 1)) - devices.keys())
    if missing or not devices:
        raise ValueError(f"no device works on stage {(missing or [0])[0]}; each stage needs one")
    return [devices[stage] for stage in range(len(devices))]


def _rule(schedule: str, stages: int, microbatches: int, virtual: int) -> Schedule:
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}; one of {', '.join(SCHEDULES)}")
    for name, number in (("stages", stages), ("microbatches", microbatches), ("virtual", virtual)):
        if number < 1:
            raise ValueError(f"{name} {number}: a pipeline needs 1 or more")
    rounds = max(1, microbatches // stages)
    # torch's V schedules need two microbatches a device.
    least = 1 if SCHEDULES[schedule].stage_by_stage else 2 * stages
    if SCHEDULES[schedule].two and (virtual != 2 or microbatches < least):
        raise ValueError(
            f"{schedule} on {stages} devices has two stages on each and at least {2 * stages} microbatches, not "
            f"{virtual} and {microbatches}"
        )
    if virtual > 1 and not SCHEDULES[schedule].interleaved:
        raise ValueError(f"virtual {virtual}: {schedule} has one stage a device; take interleaved")
    if schedule == "interleaved" and microbatches % rounds:
        raise ValueError(
            f"microbatches {microbatches}: interleaved does {rounds} rounds on {stages} stages, all alike; "
            f"take a multiple of {stages}"
        )
    return SCHEDULES[schedule]


def _stage_and_microbatch(step: int, round_size: int, virtual: int) -> tuple[int, int]:
    """Which of a device's stages its step-th forward runs, and which microbatch: in each round, all stages in turn.

    >>> [_stage_and_microbatch(step, 2, 2) for step in range(6)]
    [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3)]
    """
    turn, within = divmod(step, round_size)
    return turn % virtual, turn // virtual * round_size + within


def _turns(count: int, warmup: int, lag: int | None) -> list[tuple[Kind, int]]:
    """Kinds and numbers of a device's actions; with a lag, the part for the weights comes that many backwards later."""
    # A forward before a backward in each turn, as in 1F1B's steady state; the backwards left at the end cool down.
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
