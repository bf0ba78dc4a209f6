import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from torch.distributed.pipelining import schedules

from autopar.pipeline.schedules import device_of
from autopar.simulate import SCHEDULES, Action, order, pipeline, simulate


def text(row: tuple[Action, ...]) -> str:
    return " ".join(f"{kind}{microbatch}" for _, kind, microbatch in row)


def test_gpipe() -> None:
    assert [text(row) for row in order("gpipe", 2, 3)] == ["F0 F1 F2 B0 B1 B2"] * 2


def test_one_forward_one_backward() -> None:
    assert [text(row) for row in order("1f1b", 3, 4)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_zero_bubble_delays_the_weights_more_on_later_stages() -> None:
    assert [text(row) for row in order("zb-h1", 3, 4)] == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def test_interleaved_goes_through_all_stages_of_a_device_in_rounds() -> None:
    rows = order("interleaved", 2, 4, virtual=2)
    assert [action.stage % 2 for row in rows for action in row] == [0] * 16 + [1] * 16
    forwards = [(stage, microbatch) for stage, kind, microbatch in rows[0] if kind == "F"]
    assert forwards == [(0, 0), (0, 1), (2, 0), (2, 1), (0, 2), (0, 3), (2, 2), (2, 3)]
    backwards = [(stage, microbatch) for stage, kind, microbatch in rows[0] if kind == "B"]
    assert backwards == [(2, 0), (2, 1), (0, 0), (0, 1), (2, 2), (2, 3), (0, 2), (0, 3)]


EVERY_SIZE = [
    (schedule, stages, microbatches, virtual)
    for schedule, rule in SCHEDULES.items()
    for stages, microbatches in [(1, 1), (1, 3), (2, 1), (2, 6), (3, 2), (4, 4), (4, 12)]
    for virtual in (1, 2, 3)
    if rule.interleaved or virtual == 1
    if not rule.two or (virtual == 2 and microbatches >= 2 * stages)
]


@pytest.mark.parametrize(("schedule", "stages", "microbatches", "virtual"), EVERY_SIZE)
def test_every_action_comes_once_and_none_waits_for_ever(
    schedule: str, stages: int, microbatches: int, virtual: int
) -> None:
    rows = order(schedule, stages, microbatches, virtual)
    found = Counter(tuple(action) for row in rows for action in row)
    assert set(found.values()) == {1}
    for stage, microbatch in itertools.product(range(stages * virtual), range(microbatches)):
        kinds = "".join(k for k in "FBIW" if (stage, k, microbatch) in found)
        assert kinds in (("FIW", "FB") if SCHEDULES[schedule].split else ("FB",))
    if not SCHEDULES[schedule].two:
        assert device_of(rows) == [stage % stages for stage in range(stages * virtual)]
    else:
        assert device_of(rows) == [*range(stages), *reversed(range(stages))]
    assert simulate(pipeline(rows, 1, 1, 1, 0.5)).step_seconds >= 3 * microbatches * virtual


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f2b", 2, 2), "unknown schedule '1f2b'; one of gpipe, 1f1b, interleaved, "),
        (("1f1b", 0, 2), "stages 0: a pipeline needs 1 or more"),
        (("1f1b", 2, -1), "microbatches -1: a pipeline needs 1 or more"),
        (("interleaved", 2, 2, 0), "virtual 0: a pipeline needs 1 or more"),
        (("zb-h1", 2, 2, 2), "virtual 2: zb-h1 has one stage a device; take interleaved"),
        (("interleaved", 4, 9, 2), "microbatches 9: .* 2 rounds on 4 stages, all alike; take a multiple of 4"),
    ],
)
def test_what_a_schedule_cannot_do_is_refused(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        order(*arguments)


# Torch's schedules run these orders. They need a process group only to be constructed, so that here a stand-in goes
# through the steps of GPipe and 1F1B (whose tables are for display, and name a microbatch too many on the last stage),
# and the others make their tables from the numbers that they use.


def steps_of_torch(kind: Any, rank: int, stages: int, microbatches: int) -> list[tuple[int, str, int]]:
    schedule = MagicMock(_n_microbatches=microbatches, _num_stages=stages)
    schedule._check_inputs.return_value = [()] * microbatches, [{}] * microbatches
    schedule._stage.stage_index = rank
    for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(schedule._stage, name).return_value = []
    kind._step_microbatches(schedule)
    kinds = {"forward_one_chunk": "F", "backward_one_chunk": "B"}
    return [(rank, kinds[call[0]], call.args[0]) for call in schedule._stage.mock_calls if call[0] in kinds]


def table_of_torch(kind: Any, rank: int, stages: int, microbatches: int, virtual: int) -> list[tuple[int, str, int]]:
    a_round = microbatches // max(1, microbatches // stages)
    numbers = {"pp_group_size": stages, "n_local_stages": virtual, "microbatches_per_round": a_round}
    schedule = SimpleNamespace(_n_microbatches=microbatches, **numbers)
    row = kind._calculate_single_rank_operations(schedule, rank)
    return [(a.stage_index, a.computation_type.value, a.microbatch_index) for a in row if a is not None]


@pytest.mark.parametrize(
    ("schedule", "name", "stages", "microbatches", "virtual"),
    [
        ("gpipe", "GPipe", 4, 6, 1),
        ("1f1b", "1F1B", 2, 2, 1),
        ("1f1b", "1F1B", 4, 9, 1),
        ("1f1b", "1F1B", 4, 2, 1),
        ("interleaved", "Interleaved1F1B", 2, 4, 2),
        ("interleaved", "Interleaved1F1B", 4, 4, 3),
        ("interleaved", "Interleaved1F1B", 4, 10, 2),
        ("interleaved", "Interleaved1F1B", 4, 3, 2),
        ("interleaved", "Interleaved1F1B", 8, 24, 3),
        ("zb-h1", "InterleavedZeroBubble", 2, 3, 1),
        ("zb-h1", "InterleavedZeroBubble", 4, 2, 1),
        ("zb-h1", "InterleavedZeroBubble", 8, 24, 1),
    ],
)
def test_orders_are_those_of_torch(schedule: str, name: str, stages: int, microbatches: int, virtual: int) -> None:
    kind = schedules.get_schedule_class(name)
    for rank, row in enumerate(order(schedule, stages, microbatches, virtual)):
        if schedule in ("gpipe", "1f1b"):
            theirs = steps_of_torch(kind, rank, stages, microbatches)
        else:
            theirs = table_of_torch(kind, rank, stages, microbatches, virtual)
        assert [tuple(action) for action in row] == theirs
