"""Feasible labelings from nearly feasible ones: fewer bytes where a point exceeds its limit, then cheaper labels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from autopar.search.solver.intervals.instance import Instance
from autopar.search.solver.intervals.messages import Messages
from autopar.search.solver.problem import Floats, Ints

MOST_PASSES = 30
MOST_REPAIRS = 100


def descend(instance: Instance, messages: Messages, labels: Ints, price: Floats) -> Ints:
    """Give nodes cheaper labels, one at a time or a color at once, as long as no program point exceeds its limit.

    Args:
        instance: the problem.
        messages: its tables, by color.
        labels: within the limit; not written, [n].
        price: seconds added to each label, [L].

    Returns:
        Labels within the limit that no change of one node makes cheaper, or the last ones after some passes.
    """
    labels = labels.copy()
    slack = instance.limit - instance.usage(labels)
    for _ in range(MOST_PASSES):
        changed = 0
        for number, (nodes, of_color, of_label) in enumerate(messages.colors()):
            score = messages.given(number, labels) + price[of_color]
            now = instance.first[nodes] + labels[nodes]
            more = instance.memory[of_color] - instance.memory[now][of_label]
            room = _least(slack, instance.begin[nodes], instance.end[nodes])
            score = np.where(more <= np.maximum(room, 0.0)[of_label], score, np.inf)
            starts = np.searchsorted(of_label, np.arange(len(nodes)))
            best = np.minimum.reduceat(score, starts)
            current = score[starts + labels[nodes]]
            better = np.flatnonzero(best < current - 1e-9 * np.abs(current))
            if not len(better):
                continue
            at = np.flatnonzero(score <= best[of_label])
            _, which = np.unique(of_label[at], return_index=True)
            choice = at[which] - starts
            gain = current - best
            for i in better[np.argsort(-gain[better], kind="stable")].tolist():
                changed += _change(instance, labels, slack, int(nodes[i]), int(choice[i]))
        if not changed:
            break
    return labels


def _change(instance: Instance, labels: Ints, slack: Floats, node: int, label: int) -> bool:
    """Give a node a label if there is room at all of its program points; writes both arrays."""
    first = int(instance.first[node])
    more = float(instance.memory[first + label] - instance.memory[first + int(labels[node])])
    alive = slice(int(instance.begin[node]), int(instance.end[node]))
    if more and alive.start < alive.stop:
        if more > 0 and more > slack[alive].min():
            return False
        slack[alive] -= more
    labels[node] = label
    return True


def repair(instance: Instance, messages: Messages, labels: Ints) -> Ints | None:
    """Take bytes where points exceed the limit, by the changes that cost least for what they take, the worst point first.

    Returns:
        Labels within the limit; None where no change of one node helps.
    """
    labels = labels.copy()
    slack = instance.limit - instance.usage(labels)
    tolerance = 1e-12 * instance.limit
    for _ in range(MOST_REPAIRS):
        point = int(np.argmin(slack))
        if slack[point] >= -tolerance:
            break
        best: tuple[float, int, Ints, Ints, Floats] | None = None
        for nodes, of_color, of_label, score in _scores(instance, messages, labels, point):
            starts = np.searchsorted(of_label, np.arange(len(nodes)))
            less = instance.memory[instance.first[nodes] + labels[nodes]][of_label] - instance.memory[of_color]
            worse = score - score[starts + labels[nodes]][of_label]
            possible = np.flatnonzero(less > 0)
            if not len(possible):
                continue
            ratio = worse[possible] / np.minimum(less[possible], -slack[point])
            if best is None or ratio.min() < best[0]:
                order = possible[np.argsort(ratio, kind="stable")]
                best = (
                    float(ratio.min()),
                    point,
                    nodes[of_label[order]],
                    order - starts[of_label[order]],
                    np.sort(ratio),
                )
        if best is None:
            return None
        # Of one color, whose nodes do not see each other; as long as none is much worse than the best of all.
        done: set[int] = set()
        for node, label, ratio_ in zip(best[2].tolist(), best[3].tolist(), best[4].tolist(), strict=True):
            if slack[point] >= -tolerance or (done and ratio_ > 2 * max(best[0], 0.0)):
                break
            if node not in done:
                done.add(node)
                _change(instance, labels, slack, node, label)
    return labels if slack.min() >= -tolerance else None


def _scores(
    instance: Instance, messages: Messages, labels: Ints, point: int
) -> Iterator[tuple[Ints, Ints, Ints, Floats]]:
    """Of each color, its nodes that live at a point, their labels, the position of each label's node, and its cost."""
    for number, (nodes, of_color, of_label) in enumerate(messages.colors()):
        alive = (instance.begin[nodes] <= point) & (point < instance.end[nodes])
        if alive.any():
            mine = alive[of_label]
            place = np.cumsum(alive) - 1
            yield nodes[alive], of_color[mine], place[of_label[mine]], messages.given(number, labels)[mine]


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
