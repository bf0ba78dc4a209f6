"""Sends and receives of pipelines: each in time, in one order on both ends, beside what is computed."""

from __future__ import annotations

from itertools import combinations

import pytest

from autopar.pipeline.custom_schedule import as_text
from autopar.pipeline.schedules import SCHEDULES, Order, device_of, order
from autopar.simulate import pipeline, simulate
from autopar.simulate.p2p_order import Step, communicate, receives
from tests.pipeline.test_custom_schedule import BENT, TABLE

SIZES = [(2, 2), (2, 8), (3, 6), (4, 8), (8, 24)]


def cases() -> list[tuple[str, Order]]:
    found = [("by hand", order(as_text(TABLE), 2, 2)), ("bent", order(as_text(BENT), 2, 2, 2))]
    for name, rule in SCHEDULES.items():
        for devices, count in SIZES:
            if not rule.two or count >= 2 * devices:
                found.append((f"{name} {devices} {count}", order(name, devices, count, 1 + rule.interleaved)))
    return found


CASES = [pytest.param(actions, id=name) for name, actions in cases()]


def message(step: Step) -> tuple[int, str, int]:
    """By the stage that sends, in which direction and of which microbatch."""
    stage, kind, microbatch = step
    part, letter = kind.split("_")
    return (stage if part == "SEND" else stage - 1 if letter == "F" else stage + 1), letter, microbatch


@pytest.mark.parametrize("actions", CASES)
def test_both_ends_have_one_order(actions: Order) -> None:
    rows, devices = communicate(actions), device_of(actions)
    assert [[s for s in row if "_" not in s[1]] for row in rows] == [[tuple(a) for a in row] for row in actions]
    for pair in combinations(range(len(rows)), 2):
        ends: list[list[tuple[int, str, int]]] = []
        for device, other in (pair, pair[::-1]):
            own = [message(s) for s in rows[device] if "_" in s[1]]
            ends.append([m for m in own if other in (devices[m[0]], devices[m[0] + (1 if m[1] == "F" else -1)])])
        assert ends[0] == ends[1]
        assert len(set(ends[0])) == len(ends[0])


@pytest.mark.parametrize("actions", CASES)
def test_no_circle_where_links_do_one_thing_after_another(actions: Order) -> None:
    """A message ends when both ends have begun it and all before it between the two devices have ended."""
    rows, devices = [list(row) for row in communicate(actions)], device_of(actions)
    begun: dict[tuple[int, int], list[list[tuple[int, str, int]]]] = {}
    arrived, done = set(), set()
    progress = True
    while any(rows) and progress:
        progress = False
        for device, row in enumerate(rows):
            while row and ("_" in row[0][1] or _is_ready(row[0], arrived, done, devices)):
                step = row.pop(0)
                progress = True
                if "_" not in step[1]:
                    done.add((step[0], "F" if step[1] == "F" else step[1], step[2]))
                    continue
                sent = message(step)
                to = devices[sent[0] + (1 if sent[1] == "F" else -1)]
                low, high = sorted((devices[sent[0]], to))
                queues = begun.setdefault((low, high), [[], []])
                queues[device == high].append(sent)
                while queues[0] and queues[1]:
                    assert queues[0][0] == queues[1][0]
                    arrived.add(queues[0].pop(0))
                    queues[1].pop(0)
    assert not any(rows), "the devices wait for one another"


def _is_ready(
    step: Step, arrived: set[tuple[int, str, int]], done: set[tuple[int, str, int]], devices: list[int]
) -> bool:
    stage, kind, microbatch = step
    if kind == "W":
        return True
    source, letter = (stage - 1, "F") if kind == "F" else (stage + 1, "B")
    if not 0 <= source < len(devices):
        return True
    if devices[source] != devices[stage]:
        return (source, letter, microbatch) in arrived
    return any((source, k, microbatch) in done for k in (["F"] if letter == "F" else ["B", "I"]))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("delay", [0.02, 0.2, 0.5])
def test_what_is_sent_is_under_way_beside_what_is_computed(schedule: str, delay: float) -> None:
    """As if every receive began at once, or nearly; in front of its action only, it would not."""
    actions = order(schedule, 4, 16, 1 + SCHEDULES[schedule].interleaved)
    at_once = simulate(pipeline(actions, 1, 1, 1, delay)).step_seconds
    found = simulate(pipeline(actions, 1, 1, 1, delay, received=receives(actions))).step_seconds
    assert at_once <= found <= 1.02 * at_once
    late = {a: row[i - 1] if i else None for row in actions for i, a in enumerate(row)}
    if SCHEDULES[schedule].ahead is None and not SCHEDULES[schedule].two:
        assert simulate(pipeline(actions, 1, 1, 1, delay, received=late)).step_seconds > found * (1 + delay / 4)
