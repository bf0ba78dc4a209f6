"""Costs of exchanges among workers that train apart."""

from __future__ import annotations

import pytest

from autopar.costs.cluster import Link
from autopar.costs.outer_exchange import SHARE, choose_round, round_cost

LINK = Link("slow", bandwidth=1e6, latency=1e-12)
STEP = 0.1


def test_a_round_by_hand() -> None:
    """Two workers, a million numbers of four bytes over a megabyte a second: four seconds in all."""
    cost = round_cost(10**6, 4, 2, None, LINK, STEP, every=50, fragments=1, delay=0)
    assert cost.sent_bytes == 4e6 and cost.seconds == cost.exposed_seconds == pytest.approx(4.0)
    assert cost.slowdown == pytest.approx(4.0 / 5.0)
    # Four fragments of a second each, eleven steps of 0.1 s to hide each.
    hidden = round_cost(10**6, 4, 2, None, LINK, STEP, every=50, fragments=4, delay=11)
    assert hidden.seconds == pytest.approx(4.0) and hidden.exposed_seconds == 0.0
    late = round_cost(10**6, 4, 2, None, LINK, STEP, every=50, fragments=4, delay=5)
    assert late.exposed_seconds == pytest.approx(4 * 0.5)
    # Of more workers each sends (n - 1) / n of it twice; of eight bits, everybody's bytes come to all.
    assert round_cost(1024, 4, 4, None, LINK, STEP, every=1, fragments=1, delay=0).sent_bytes == 2 * 3 / 4 * 4096
    assert round_cost(1024, 4, 4, 8, LINK, STEP, every=1, fragments=1, delay=0).sent_bytes == 3 * (1024 + 16)
    assert round_cost(1024, 4, 1, None, LINK, STEP, every=1, fragments=1, delay=0).seconds == 0


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("delay", [0, 3])
def test_chosen_rounds_hide_and_shorter_ones_do_not(delay: int, bits: int | None) -> None:
    given = (10**6, 4, 2, bits, LINK, STEP)
    every, fragments = choose_round(*given, fragments=None, delay=delay, blocks=20)
    assert every % fragments == 0 and delay < every and fragments <= 20
    cost = round_cost(*given, every=every, fragments=fragments, delay=delay)
    assert cost.slowdown <= SHARE and cost.seconds <= every * STEP
    shorter = round_cost(*given, every=every - fragments, fragments=fragments, delay=delay)
    assert shorter.slowdown > SHARE or shorter.seconds > shorter.steps * STEP or every == max(fragments, delay + 1)
