"""Min-sum messages for a whole color of the graph at a time, in numpy: no Python for each node.

Sequential reweighted message passing as in `message_passing` (Kolmogorov, PAMI 2015), in the order of a coloring: nodes of
a color share no edge, and so are visited at once. A sweep of such a short order raises the bound by less than one of a long
one, and takes a hundredth of its time. Tables stay as they are; messages are what has been moved out of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.search.solver.intervals.instance import Instance
from autopar.search.solver.problem import Floats, Ints


@dataclass(frozen=True)
class _Color:
    """Nodes that share no edge, with their labels and what is sent to these.

    Attributes:
        nodes: of the color.
        labels: theirs, one node after the other.
        starts: of each node, its first of `labels`.
        of_label: the position in `nodes` of each label's node.
        messages: those to these labels, as a range of all messages.
        entries: the same of table entries.
        rows: where each message's row of entries begins, from the first of `entries`.
        label: of each message, the position in `labels`.
        later: whether its edge leads to a later color; the others lead to an earlier one.
        weight: the share of a node's cost that each of its onward edges takes.
    """

    nodes: Ints
    labels: Ints
    starts: Ints
    of_label: Ints
    messages: slice
    entries: slice
    rows: Ints
    label: Ints
    later: Ints
    weight: Floats


class Messages:
    """Reparametrized costs: `table - message to its row - message to its column`, and labels plus all their messages.

    Attributes:
        price: seconds that are added to each label for its memory, [L].
        labels: of each node, the label that was cheapest when a sweep last visited it, [n].
    """

    def __init__(self, instance: Instance) -> None:
        """Put tables in order, each once from either end, targets by color.

        Args:
            instance: the problem. Forbidden labels and pairs get a cost above that of any labeling without.
        """
        self._instance = instance
        self.price: Floats = np.zeros_like(instance.cost)
        self.labels: Ints = np.zeros(len(instance.begin), dtype=np.int64)
        finite = (np.where(np.isfinite(x), x, 0.0) for x in (instance.cost, instance.table))
        self._forbidden = sum(float(np.abs(x).sum()) for x in finite) + 1.0
        self._cost = np.minimum(instance.cost, self._forbidden)
        sizes, edges = instance.sizes, len(instance.u)
        color = coloring(len(sizes), instance.u, instance.v)
        target, other = np.concatenate([instance.u, instance.v]), np.concatenate([instance.v, instance.u])
        order = np.lexsort((target, color[target]))
        edge, flipped = np.tile(np.arange(edges), 2)[order], np.repeat([False, True], edges)[order]
        target, other = target[order], other[order]
        position = np.empty((2, edges), dtype=np.int64)
        position[flipped.astype(np.int64), edge] = np.arange(2 * edges)
        opposite = position[1 - flipped.astype(np.int64), edge]
        rows, columns = sizes[target], sizes[other]
        first_entry, first_message = _starts(rows * columns), _starts(rows)
        # Entry (a, b) of the table of directed edge d, targets in rows.
        d = np.repeat(np.arange(2 * edges), rows * columns)
        at = np.arange(first_entry[-1]) - first_entry[d]
        a, b = at // columns[d], at % columns[d]
        source = instance.edge_first[:-1][edge][d] + np.where(flipped[d], b * rows[d] + a, at)
        self._table = np.minimum(instance.table[source], self._forbidden)
        self._column = (first_message[opposite][d] + b).astype(np.int32)
        self._first_entry, self._entries_of_row = first_entry, np.repeat(columns, rows)
        of_message = np.repeat(np.arange(2 * edges), rows)
        within = np.arange(first_message[-1]) - first_message[of_message]
        self._row = first_entry[of_message] + within * columns[of_message]
        self._label, self._other = instance.first[target][of_message] + within, other[of_message]
        self._message: Floats = np.zeros(first_message[-1])
        later = color[other] > color[target]
        onward = np.maximum(np.bincount(target, later, len(sizes)), np.bincount(target, ~later, len(sizes)))
        weight = 1.0 / np.maximum(onward, 1.0)
        self._colors = []
        for shade in range(int(color.max()) + 1):
            low, high = np.searchsorted(color[target], [shade, shade + 1])
            messages = slice(int(first_message[low]), int(first_message[high]))
            entries = slice(int(first_entry[low]), int(first_entry[high]))
            nodes = np.flatnonzero(color == shade)
            starts = _starts(sizes[nodes])
            of_label = np.repeat(np.arange(len(nodes)), sizes[nodes])
            labels = instance.first[nodes][of_label] + np.arange(starts[-1]) - starts[of_label]
            place = np.searchsorted(labels, self._label[messages])
            is_later = later[of_message[messages]]
            self._colors.append(
                _Color(
                    nodes, labels, starts[:-1], of_label, messages, entries, self._row[messages] - entries.start, place,
                    is_later, weight[target[of_message[messages]]],
                )
            )  # fmt: skip

    def sweep(self, forward: bool) -> None:
        """Visit all nodes once, color by color: pull the minima of their edges, push shares to the edges that lead on."""
        for color in self._colors if forward else reversed(self._colors):
            unary = self._cost[color.labels] + self.price[color.labels]
            low = self._pulled(color)
            unary = unary + np.bincount(color.label, low, len(unary))
            self.labels[color.nodes], least = _cheapest(unary, color)
            onward = color.later if forward else ~color.later
            share = np.where(onward, color.weight * (unary - least[color.of_label])[color.label], 0.0)
            self._message[color.messages] = low - share

    def bound(self) -> float:
        """No labeling costs less, priced as it is: the sum of all minima."""
        unary = self._cost + self.price + np.bincount(self._label, self._message, len(self._cost))
        nodes = float(np.minimum.reduceat(unary, self._instance.first[:-1]).sum())
        if not len(self._table):
            return nodes
        left = self._table - self._message[self._column] - np.repeat(self._message, self._entries_of_row)
        # Each table is there from either end.
        return nodes + float(np.minimum.reduceat(left, self._first_entry[:-1]).sum()) / 2

    def decoded(self) -> Ints:
        """Labels read off the messages: colors in order, each node given those before, messages for those after."""
        labels = np.zeros_like(self.labels)
        for color in self._colors:
            given = self._table[self._row[color.messages] + labels[self._other[color.messages]]]
            arriving = np.where(color.later, self._pulled(color), given)
            unary = self._cost[color.labels] + self.price[color.labels]
            unary = unary + np.bincount(color.label, arriving, len(unary))
            labels[color.nodes], _ = _cheapest(unary, color)
        return labels

    def colors(self) -> list[tuple[Ints, Ints, Ints]]:
        """Of each color: its nodes, its labels one node after the other, and the position of each label's node."""
        return [(c.nodes, c.labels, c.of_label) for c in self._colors]

    def given(self, number: int, labels: Ints) -> Floats:
        """What each label of a color costs, without its price, given the labels of all other nodes."""
        color = self._colors[number]
        pairs = self._table[self._row[color.messages] + labels[self._other[color.messages]]]
        found: Floats = self._cost[color.labels] + np.bincount(color.label, pairs, len(color.labels))
        return found

    def _pulled(self, color: _Color) -> Floats:
        if color.entries.start == color.entries.stop:
            return np.zeros(0)
        left = self._table[color.entries] - self._message[self._column[color.entries]]
        found: Floats = np.minimum.reduceat(left, color.rows)
        return found


def _cheapest(unary: Floats, color: _Color) -> tuple[Ints, Floats]:
    """The first of the cheapest labels of each node of a color, and what it costs."""
    least = np.minimum.reduceat(unary, color.starts)
    at = np.flatnonzero(unary <= least[color.of_label])
    _, which = np.unique(color.of_label[at], return_index=True)
    return at[which] - color.starts, least


def _starts(sizes: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def coloring(nodes: int, u: Ints, v: Ints) -> Ints:
    """A color for each node that none of its neighbors has: greedily, nodes of most neighbors first."""
    around: list[list[int]] = [[] for _ in range(nodes)]
    for a, b in zip(u.tolist(), v.tolist(), strict=True):
        around[a].append(b)
        around[b].append(a)
    colors = [-1] * nodes
    for node in sorted(range(nodes), key=lambda n: -len(around[n])):
        taken = {colors[n] for n in around[node]}
        color = 0
        while color in taken:
            color += 1
        colors[node] = color
    return np.array(colors, dtype=np.int64)
