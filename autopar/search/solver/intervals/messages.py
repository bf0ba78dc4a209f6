"""Min-sum messages for a whole level of the graph at a time, in numpy: no Python for each node.

Sequential reweighted message passing as in `message_passing` (Kolmogorov, PAMI 2015), in the order of the nodes: those
of a level share no edge, and so are visited at once. Tables stay as they are; messages are what has been moved out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.search.solver.intervals.instance import Instance
from autopar.search.solver.intervals.tables import Tables, cheapest, starts
from autopar.search.solver.problem import Floats, Ints


@dataclass(frozen=True)
class _Level:
    """Nodes that share no edge, with their labels and what is sent to these.

    Attributes:
        nodes: of the level.
        labels: theirs, one node after the other.
        starts: of each node, its first of `labels`.
        of_label: the position in `nodes` of each label's node.
        messages: those to these labels, as a range of all messages.
        entries: the same of table entries.
        rows: where each message's row of entries begins, from the first of `entries`.
        label: of each message, the position in `labels`.
        later: whether its edge leads to a later level; the others lead to an earlier one.
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
    later: NDArray[np.bool_]
    weight: Floats


class Messages:
    """Reparametrized costs: `table - message to its row - message to its column`, and labels plus all their messages.

    Attributes:
        tables: of the instance.
        price: seconds that are added to each label for its memory, [L].
        labels: of each node, the label that was cheapest when a sweep last visited it, [n].
    """

    def __init__(self, instance: Instance) -> None:
        """Begin with no messages and no prices."""
        self._instance = instance
        self.tables = t = Tables.of(instance)
        self.price: Floats = np.zeros_like(instance.cost)
        self.labels: Ints = np.zeros(len(instance.begin), dtype=np.int64)
        sizes = instance.sizes
        columns = sizes[t.other]
        first_message = starts(sizes[t.target])
        # Of each entry, the message to its column: one that the opposite edge sends.
        within = np.arange(t.first[-1]) - np.repeat(t.row, columns[t.edge])
        self._column = (np.repeat(first_message[t.opposite], np.diff(t.first)) + within).astype(np.int32)
        self._entries_of_row = columns[t.edge]
        self._message: Floats = np.zeros(first_message[-1])
        later = t.level[t.other] > t.level[t.target]
        onward = np.maximum(np.bincount(t.target, later, len(sizes)), np.bincount(t.target, ~later, len(sizes)))
        weight = 1.0 / np.maximum(onward, 1.0)
        place = np.empty(len(t.owner), dtype=np.int64)
        self._levels = []
        by_level = np.argsort(t.level, kind="stable")
        first_node = starts(np.bincount(t.level))
        bounds = np.searchsorted(t.level[t.target], np.arange(len(first_node)))
        for k in range(len(first_node) - 1):
            messages = slice(int(first_message[bounds[k]]), int(first_message[bounds[k + 1]]))
            entries = slice(int(t.first[bounds[k]]), int(t.first[bounds[k + 1]]))
            nodes = by_level[first_node[k] : first_node[k + 1]]
            begin = starts(sizes[nodes])
            of_label = np.repeat(np.arange(len(nodes)), sizes[nodes])
            labels = instance.first[nodes][of_label] + np.arange(begin[-1]) - begin[of_label]
            place[labels] = np.arange(len(labels))
            edge = t.edge[messages]
            self._levels.append(
                _Level(
                    nodes, labels, begin[:-1], of_label, messages, entries, t.row[messages] - entries.start,
                    place[t.label[messages]], later[edge], weight[t.target[edge]],
                )
            )  # fmt: skip

    def sweep(self, forward: bool) -> None:
        """Visit all nodes once, level by level: pull the minima of edges, push shares to the edges that lead on."""
        cost = self.tables.cost + self.price
        for level in self._levels if forward else reversed(self._levels):
            unary = cost[level.labels]
            if level.entries.start == level.entries.stop:
                self.labels[level.nodes], _ = cheapest(unary, level.starts, level.of_label)
                continue
            left = self.tables.entry[level.entries] - self._message[self._column[level.entries]]
            low = np.minimum.reduceat(left, level.rows)
            unary = unary + np.bincount(level.label, low, len(unary))
            self.labels[level.nodes], least = cheapest(unary, level.starts, level.of_label)
            onward = level.later if forward else ~level.later
            share = np.where(onward, level.weight * (unary - least[level.of_label])[level.label], 0.0)
            self._message[level.messages] = low - share

    def bound(self) -> float:
        """No labeling costs less, priced as it is: the sum of all minima."""
        nodes, _, edges = self._reparametrized()
        # Each table is there from either end.
        return float(nodes.sum()) + float(edges.sum()) / 2

    def reduced(self) -> Floats:
        """What each label costs at least beyond the bound, seen from its node and its edges, [L]."""
        t = self.tables
        nodes, unary, edges = self._reparametrized()
        found = unary - nodes[t.owner]
        if not len(t.entry):
            return found
        low = np.minimum.reduceat(self._left(), t.row) - edges[t.edge]
        return found + np.bincount(t.label, low, len(found))

    def _reparametrized(self) -> tuple[Floats, Floats, Floats]:
        """The least cost of each node, the costs of all labels, and the least cost of each directed edge."""
        unary = self.tables.cost + self.price + np.bincount(self.tables.label, self._message, len(self.price))
        nodes = np.minimum.reduceat(unary, self._instance.first[:-1])
        edges = np.minimum.reduceat(self._left(), self.tables.first[:-1]) if len(self.tables.entry) else np.zeros(0)
        return nodes, unary, edges

    def _left(self) -> Floats:
        found: Floats = self.tables.entry - self._message[self._column]
        found -= np.repeat(self._message, self._entries_of_row)
        return found
