"""Rates of asynchronous workers: closed forms, and the rule by which they wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.costs.cluster import Link
from autopar.simulate.stale_workers import Run, stale_rate
from tests.module.low_communication.stale_reference import require_bounded

FAST = Link("fast", bandwidth=1e12, latency=1e-12)


def test_without_messages_the_slowest_decides_in_the_long_run_and_not_from_step_to_step() -> None:
    same = stale_rate([[0.5]] * 4, 0, FAST, staleness=0, owners=4)
    assert same.steps_per_second == pytest.approx(8) and same.waiting == pytest.approx(0)
    assert same.most == 3 and 0 < same.staleness < 3  # of four that come together the last finds three
    # One is always slow: staleness defers the wait, and does not end it.
    rates = [stale_rate([[1.0], [3.0]], 0, FAST, staleness=s, owners=2).steps_per_second for s in (0, 1, 8)]
    assert rates == pytest.approx([2 / 3] * 3, rel=0.05)
    # Each is slow in its turn: a step of waiting is all that they need of one another.
    turns = [[3.0, 1.0], [1.0, 3.0]]
    assert stale_rate(turns, 0, FAST, staleness=0, owners=2).steps_per_second == pytest.approx(2 / 3, rel=0.02)
    assert stale_rate(turns, 0, FAST, staleness=1, owners=2).steps_per_second == pytest.approx(1.0, rel=0.02)


def test_messages_of_workers_in_step() -> None:
    link = Link("l", bandwidth=1e6, latency=0.01)
    # Halves of 2 MB go to the other one and come back, both ways at once.
    found = stale_rate([[1.0]] * 2, 2e6, link, staleness=0, owners=2)
    assert found.steps_per_second == pytest.approx(2 / (1 + 2 * (1.0 + 0.01)))
    assert found.waiting == pytest.approx(1 - 1 / 3.02, abs=0.01)
    # Links that are busy: of each step a server of all takes four gradients, and with five owners each sends 8 / 5 MB.
    server = stale_rate([[0.01]] * 5, 2e6, link, staleness=50, owners=1)
    # Its own worker needs no link.
    assert server.steps_per_second == pytest.approx(0.5 * 5 / 4, rel=0.1)
    shared = stale_rate([[0.01]] * 5, 2e6, link, staleness=50, owners=5)
    assert shared.steps_per_second == pytest.approx(5 / (2 * 1.6), rel=0.1)


@given(
    st.lists(st.lists(st.floats(0.1, 5), min_size=1, max_size=3), min_size=2, max_size=4),
    st.integers(0, 3), st.integers(1, 2), st.floats(0, 3e6),
)  # fmt: skip
def test_workers_wait_as_owners_say(seconds: list[list[float]], staleness: int, owners: int, size: float) -> None:
    run = Run(seconds, size, Link("l", bandwidth=1e6, latency=0.01), staleness, owners)
    run.run(6)
    for log in run.arrivals:
        require_bounded(log, len(seconds), staleness)
    assert max(run.steps) - min(run.steps) <= staleness + 1


def test_steps_that_take_no_time() -> None:
    with pytest.raises(ValueError, match="expected seconds above 0"):
        stale_rate([[1.0], []], 0, FAST, staleness=1, owners=2)
