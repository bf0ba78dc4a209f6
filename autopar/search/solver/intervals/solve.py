"""One entry: exactly where the instance is small, by multipliers of its limits otherwise."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from autopar.search.solver.highs import requested
from autopar.search.solver.intervals.exact import close
from autopar.search.solver.intervals.feasible import settled, squeezed
from autopar.search.solver.intervals.forests import grown, move
from autopar.search.solver.intervals.instance import Instance
from autopar.search.solver.intervals.messages import Messages
from autopar.search.solver.intervals.multipliers import Best, ascend
from autopar.search.solver.intervals.restrict import Entries, restrict, without_separable
from autopar.search.solver.intervals.tables import Tables
from autopar.search.solver.intervals.window import cheaper
from autopar.search.solver.problem import Floats, Ints

MOST_ENTRIES = 500_000
"""Costs of pairs of an instance that is tried exactly; of others presolve alone would take the time."""

FIRST_SHARE, EXACT_SHARE = 0.02, 0.5
"""Of the time of a small instance: multipliers, for a first bound, and the ILP."""

ASCENT_SHARE, FITTED_SHARE, WINDOW_SHARE = 0.3, 0.6, 0.75
"""Of the time, when multipliers are done, when first labels within the limits are there, and when windows are done;
what is left goes to cheaper labels within the limits."""

WALLS = (30.0, 300.0, 3e3, np.inf)
"""At most what a pair costs while labels are looked for, in means of the bound over nodes, one after the other."""

FIRST_WALLS = (np.inf, 30.0, 1.0)
"""The same where limits are enforced, the next where one does not do."""

VARIED, HOT, WARM, COLD = 30, 5.0, 0.5, 0.005
"""Forests under noise; and its mean, at most, at first below a wall, and at the end, in the same means."""

SETTLED = 20
"""Forests in a row that find nothing cheaper until no more are tried."""

POOL, MERGE_SECONDS, MOST_POINTS = 6, 8.0, 20
"""Labelings that are merged at a time, for how long, and points whose limits the ILP has from the beginning."""


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        labels: of each node, [n], within the limit at each point; None if none were found.
        value: what they cost, inf without.
        bound: no labels within the limit cost less; inf: there are none.
        method: ``MIP`` where it ended by the gap, ``multipliers``, or ``time limit``.
    """

    labels: Ints | None
    value: float
    bound: float
    method: str


def solve(instance: Instance, seconds: float, gap: float) -> Found:
    """Minimize within the limit of each program point.

    Args:
        instance: the problem.
        seconds: time limit; it ends up to a few seconds later.
        gap: relative, at which it stops.
    """
    begin, best = time.monotonic(), Best()
    joined = without_separable(instance)
    small = len(joined.table) <= MOST_ENTRIES
    messages = Messages(joined)
    multiplier = ascend(joined, messages, best, begin + (FIRST_SHARE if small else ASCENT_SHARE) * seconds)
    solved = small and close(joined, best, begin + EXACT_SHARE * seconds, gap)
    if not solved:
        if small:
            multiplier = ascend(joined, messages, best, begin + (EXACT_SHARE + FIRST_SHARE) * seconds)
        _look(joined, messages, multiplier, best, begin, seconds, gap)
    ended = "MIP" if solved else "multipliers" if best.within(gap) else "time limit"
    # Moved costs may round differently.
    value = instance.value(best.labels) if best.labels is not None else np.inf
    return Found(best.labels, value, min(best.bound, value), ended)


def _look(
    instance: Instance,
    messages: Messages,
    multiplier: Floats,
    best: Best,
    begin: float,
    seconds: float,
    gap: float,
) -> None:
    """Labels of least cost with their prices first; then, over and over, some within the limits from these."""
    draw, tables, entries = np.random.default_rng(0), messages.tables, Entries.of(instance)
    scale, deadline = abs(best.bound) or 1.0, begin + seconds
    mean = scale / len(instance.begin)

    def varied(labels: Ints, warm: float, tables: Tables = tables) -> Ints:
        for k in range(VARIED):
            if time.monotonic() > deadline:
                break
            noise = mean * warm * (COLD / warm) ** (k / VARIED) * draw.exponential(size=len(tables.cost))
            labels = move(
                instance, tables, grown(tables, len(labels), draw), labels, tables.cost + messages.price + noise
            )
        return labels

    def annealed(labels: Ints) -> Ints:
        for wall in WALLS:
            # Low walls first: forbidden pairs may be crossed on the way to where there are none.
            low = replace(tables, entry=np.minimum(tables.entry, mean * wall))
            labels = varied(labels, WARM, low)
        return labels

    def fitted(start: Ints, level: int, until: float) -> Ints | None:
        """Labels within the limits, from others; none where time is up before there are some."""
        found = squeezed(instance, tables, start, multiplier, scale, mean * FIRST_WALLS[level], until, draw)
        if found is not None:
            for price in (messages.price, np.zeros_like(messages.price)):
                found = settled(instance, tables, found, price, SETTLED, until, draw)
            best.offer(instance, found)
        return found

    labels = annealed(messages.labels)
    # Some that fit come first: of a large instance windows may take all the time that is left.
    fitted(labels, 0, begin + FITTED_SHARE * seconds)
    if best.labels is not None:
        labels = cheaper(instance, entries, messages, labels, begin + WINDOW_SHARE * seconds)
    pool, start, again, level = [labels], labels, False, 0
    while time.monotonic() < deadline and not requested() and not best.within(gap):
        start = varied(start, COLD * (HOT / COLD) ** draw.random())
        found = fitted(start, level, deadline)
        if found is None:
            level = (level + 1) % len(FIRST_WALLS)
            start = labels if level else annealed(labels)
            continue
        # From the best within the limits, or once more from what costs least with its prices.
        start, again = best.labels if again and best.labels is not None else labels, not again
        pool.append(found)
        if len(pool) > POOL:
            _merge(instance, entries, pool, multiplier, best, min(deadline, time.monotonic() + MERGE_SECONDS), gap)
            pool = [labels]


def _merge(
    instance: Instance, entries: Entries, pool: list[Ints], multiplier: Floats, best: Best, deadline: float, gap: float
) -> None:
    """The best labels within the limits of which each node has its label in one of a pool, or in the best so far."""
    allowed = np.zeros(len(instance.cost), dtype=bool)
    for labels in pool if best.labels is None else [*pool, best.labels]:
        allowed[instance.first[:-1] + labels] = True
    left = restrict(instance, entries, allowed)
    if left is None:
        return
    merged = Best()
    points = [p for p in np.argsort(-multiplier)[:MOST_POINTS].tolist() if multiplier[p] > 0]
    close(left.instance, merged, deadline, gap, tuple(points))
    if merged.labels is not None:
        best.offer(instance, left.spread(instance, merged.labels))
