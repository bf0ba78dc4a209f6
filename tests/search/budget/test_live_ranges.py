"""What is kept is chosen so that the most that is held at once is the least: by a program, and by trying everything."""

from __future__ import annotations

import itertools
import random

import pytest

from autopar.search.budget.live_ranges import LiveRanges, minimize_peak, minimize_peak_at


def chain() -> LiveRanges:
    """``a`` to ``b`` to ``c``; operator 0 takes ``c``, operator 2 ``b`` and operator 3 ``a``."""
    return LiveRanges(
        base=[0.0, 100.0, 0.0, 0.0],
        size={"a": 1.0, "b": 10.0, "c": 10.0},
        first={"c": 0, "b": 2, "a": 3},
        last={"c": 0, "b": 2, "a": 3},
        sources={"a": set(), "b": {"a"}, "c": {"b"}},
        fixed={"a"},
    )


def test_what_is_kept_waits_for_what_is_made_again_of_it() -> None:
    ranges = chain()
    assert ranges.intervals(())["b"] == (0, 2)
    assert ranges.intervals({"b"})["b"] == (2, 2)
    assert ranges.intervals({"b", "c"})["b"] == (0, 2)  # made for ``c``, and held for operator 2
    ranges.last.pop("a")
    ranges.first.pop("a")
    assert ranges.intervals(())["a"] == (0, -1)  # nobody takes it
    assert ranges.intervals({"b"})["a"] == (0, 1)  # until ``b`` is recomputed, before operator 2


def test_to_make_more_again_may_need_more() -> None:
    ranges = chain()
    bound, again = minimize_peak(ranges)
    assert again & {"b", "c"} == {"b"}
    assert bound == pytest.approx(101.0, rel=1e-3)
    assert ranges.held({"b", "c"}).max() == 111.0


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_needs_less(seed: int) -> None:
    """Random values that are made of up to two others, and taken by up to two operators."""
    draw = random.Random(seed)
    operators, names = 6, [*range(8)]
    ranges = LiveRanges(base=[float(draw.randrange(20)) for _ in range(operators)])
    for s in names:
        ranges.size[s] = float(1 + draw.randrange(10))
        ranges.sources[s] = set(draw.sample(names[:s], min(s, draw.randrange(3))))
        taken = sorted(draw.sample(range(operators), draw.randrange(3)))
        if taken:
            ranges.first[s], ranges.last[s] = taken[0], taken[-1]
    ranges.fixed.update(draw.sample(names, 2))
    free = [s for s in names if s not in ranges.fixed]
    sets = (set(c) for n in range(len(free) + 1) for c in itertools.combinations(free, n))
    best = min(float(ranges.held(again).max()) for again in sets)
    bound, again = minimize_peak_at(ranges, range(operators))
    assert not again & ranges.fixed
    assert 0.9 * best <= bound <= best * (1 + 1e-6)  # which need not make values again in front of their first users
    assert best <= ranges.held(again).max() <= 1.1 * best


def test_no_less_is_looked_for_than_is_enough_and_then_little_is_made_again() -> None:
    ranges, cost = chain(), {"b": 1.0, "c": 1.0}
    _, again = minimize_peak(ranges, enough=200.0, cost=cost)
    assert not again
