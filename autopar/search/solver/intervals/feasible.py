"""Labels within the limits: multipliers that rise until nothing is exceeded, and cheaper labels where there is room."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from autopar.search.solver.intervals.forests import grown, move
from autopar.search.solver.intervals.instance import Instance
from autopar.search.solver.intervals.multipliers import seconds_a_byte
from autopar.search.solver.intervals.tables import Tables
from autopar.search.solver.problem import Floats, Ints

MOST_ROUNDS, WALL_RISE = 100, 1.25
"""Forests until labels fit, and what walls grow by from one to the next."""

FIRST_RISE, RISE, LAST_RISE = 1e-2, 1.5, 10.0
"""What multipliers of exceeded points rise by at first, how that grows, and where it ends, as shares of the value."""

MOST_HALVINGS = 8
NOTICED = 1e-6


def squeezed(
    instance: Instance,
    tables: Tables,
    labels: Ints,
    multiplier: Floats,
    value: float,
    wall: float,
    deadline: float,
    draw: np.random.Generator,
) -> Ints | None:
    """Labels within the limits and without forbidden pairs, from some that exceed them; None if rounds do not suffice.

    Args:
        instance: the problem.
        tables: its.
        labels: to begin from.
        multiplier: of each point, in seconds a byte; those of points that are exceeded rise.
        value: about what labels cost.
        wall: the most that a pair costs at first, inf for no such limit: where many nodes must change at once, they
            cross forbidden pairs on the way.
        deadline: of the monotonic clock.
        draw: what forests are drawn with.
    """
    multiplier, rise, low = multiplier.copy(), FIRST_RISE, wall
    unit = abs(value) / max(float(instance.limit.max()), 1.0)
    for _ in range(MOST_ROUNDS):
        if time.monotonic() > deadline:
            break
        price = instance.memory * seconds_a_byte(instance, multiplier)[tables.owner]
        walled = replace(tables, entry=np.minimum(tables.entry, low)) if np.isfinite(low) else tables
        labels = move(instance, walled, grown(tables, len(labels), draw), labels, tables.cost + price)
        worst = instance.exceeded(labels)
        if not worst and np.isfinite(instance.value(labels)):
            return labels
        low *= WALL_RISE
        if worst:
            if rise > LAST_RISE:
                break
            # Behind high walls, labels that fit may be out of reach: once more from low ones, with higher multipliers.
            multiplier[worst] += rise * unit
            rise, low = rise * RISE, wall
    return None


def settled(
    instance: Instance,
    tables: Tables,
    labels: Ints,
    price: Floats,
    patience: int,
    deadline: float,
    draw: np.random.Generator,
) -> Ints:
    """Cheaper labels that still fit, tree by tree of some forests.

    Args:
        instance: the problem.
        tables: its.
        labels: within the limits, [n].
        price: seconds that are added to each label, [L].
        patience: forests in a row that may gain next to nothing.
        deadline: of the monotonic clock.
        draw: what forests are drawn with.
    """
    cost, since = tables.cost + price, 0
    value = instance.value(labels) + float(price[instance.first[:-1] + labels].sum())
    barred = 2 * float(tables.cost.max() + tables.entry.max(initial=0.0)) + 1.0
    while since < patience and time.monotonic() < deadline:
        slack = instance.limit - instance.usage(labels)
        room = np.maximum(_least(slack, instance.begin, instance.end), 0.0)
        more = instance.memory - instance.memory[instance.first[:-1] + labels][tables.owner]
        forest = grown(tables, len(labels), draw)
        found = move(instance, tables, forest, labels, np.where(more <= room[tables.owner], cost, cost + barred))
        trees = np.unique(forest.root[found != labels])
        # Each label has room alone, and all together may not: then half of the trees that change, and half of these.
        for _ in range(MOST_HALVINGS):
            if not len(trees) or instance.fits(found):
                break
            trees = trees[draw.random(len(trees)) < 0.5]
            found = np.where(np.isin(forest.root, trees), found, labels)
        since += 1
        if instance.fits(found):
            labels, before = found, value
            value = instance.value(labels) + float(price[instance.first[:-1] + labels].sum())
            since = 0 if value < before - NOTICED * abs(before) else since
    return labels


def _least(slack: Floats, begin: Ints, end: Ints) -> Floats:
    """The least of a range of `slack` for each pair of ends, inf for an empty range, by doubling."""
    levels = [slack]
    while 2 ** len(levels) <= len(slack):
        half = 2 ** (len(levels) - 1)
        levels.append(np.minimum(levels[-1][:-half], levels[-1][half:]))
    length = np.maximum(end - begin, 0)
    found: Floats = np.full(len(begin), np.inf)
    level = np.frexp(np.maximum(length, 1))[1] - 1
    for k in np.unique(level[length > 0]).tolist():
        mine = np.flatnonzero((level == k) & (length > 0))
        low = levels[k]
        found[mine] = np.minimum(low[begin[mine]], low[end[mine] - 2**k])
    return found
