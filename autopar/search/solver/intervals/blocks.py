"""Better labels for a few hundred nodes at a time, all others as they are: exactly, by the solver without memory limits.

Where single changes leave a forbidden pair, several nodes around it have to change at once.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from functools import partial

import numpy as np

from autopar.search.solver.intervals.instance import Instance
from autopar.search.solver.minimize import Limits, minimize
from autopar.search.solver.problem import Edge, Floats, Ints, Node, Problem
from autopar.search.solver.workspace import build

BLOCK_NODES, BLOCK_ENTRIES = 200, 200_000
"""Most nodes, and entries of tables, of a block: some tenths of a second each."""

BLOCK_SECONDS, BLOCK_GAP = 2.0, 1e-4


@dataclass(frozen=True)
class Neighbors:
    """Edges by node.

    Attributes:
        first: of each node, its first, [n + 1].
        edge: numbers of edges, [2 E].
        node: the node at the other end, [2 E].
    """

    first: Ints
    edge: Ints
    node: Ints

    @staticmethod
    def of(instance: Instance) -> Neighbors:
        """Of an instance."""
        near, far = np.concatenate([instance.u, instance.v]), np.concatenate([instance.v, instance.u])
        order = np.argsort(near, kind="stable")
        first = np.searchsorted(near[order], np.arange(len(instance.begin) + 1))
        return Neighbors(first.astype(np.int64), np.tile(np.arange(len(instance.u)), 2)[order], far[order])

    def around(self, node: int) -> list[tuple[int, int]]:
        """(edge, other node) of each edge of a node."""
        mine = slice(int(self.first[node]), int(self.first[node + 1]))
        return list(zip(self.edge[mine].tolist(), self.node[mine].tolist(), strict=True))


class Blocks:
    """Looks for better labels block by block; `labels` are always within the limit, and `value` is what they cost."""

    def __init__(self, instance: Instance, neighbors: Neighbors, labels: Ints) -> None:
        """Begin from labels within the limit, which may have forbidden pairs."""
        self._instance, self._neighbors = instance, neighbors
        self._edge_first = instance.edge_first
        self.labels = labels.copy()
        self._slack = instance.limit - instance.usage(labels)

    def improve(self, seeds: list[int], price: Floats, deadline: float) -> None:
        """Solve a block around each seed that is in none before it.

        Args:
            seeds: nodes.
            price: seconds that are added to each label for its memory, [L].
            deadline: of the monotonic clock.
        """
        seen: set[int] = set()
        for seed in seeds:
            if time.monotonic() > deadline:
                break
            if seed not in seen:
                block = self._grown(seed)
                seen.update(block)
                self._solve(block, price, deadline)

    def _grown(self, seed: int) -> list[int]:
        """Nodes around a seed, nearest first; those of very many edges stay out, since they would fix all others."""
        block, waiting, entries = {seed: None}, deque([seed]), 0
        while waiting:
            for edge, other in self._neighbors.around(waiting.popleft()):
                degree = self._neighbors.first[other + 1] - self._neighbors.first[other]
                if other in block or degree > BLOCK_NODES:
                    continue
                entries += int(self._edge_first[edge + 1] - self._edge_first[edge])
                if len(block) >= BLOCK_NODES or entries > BLOCK_ENTRIES:
                    return list(block)
                block[other] = None
                waiting.append(other)
        return list(block)

    def _solve(self, block: list[int], price: Floats, deadline: float) -> bool:
        """Give a block better labels if it has any within the limit."""
        inst, place = self._instance, {n: i for i, n in enumerate(block)}
        costs = [inst.cost[inst.first[n] : inst.first[n + 1]] for n in block]
        edges: list[Edge] = []
        for i, n in enumerate(block):
            for e, other in self._neighbors.around(n):
                entries = slice(int(self._edge_first[e]), int(self._edge_first[e + 1]))
                table = inst.table[entries].reshape(-1, inst.sizes_of(int(inst.v[e])))
                if other not in place:
                    chosen = int(self.labels[other])
                    costs[i] = costs[i] + (table[:, chosen] if inst.u[e] == n else table[chosen])
                elif inst.u[e] == n:
                    edges.append(Edge(i, place[other], np.arange(table.shape[0]), np.arange(table.shape[1]), table))
        now = self.labels[block]
        own = [slice(int(inst.first[n]), int(inst.first[n + 1])) for n in block]
        plain = Problem(tuple(Node(str(n), c, c) for n, c in zip(block, costs, strict=True)), tuple(edges))

        def value_of(labels: Ints, problem: Problem = plain) -> float:
            nodes = sum(float(n.cost[x]) for n, x in zip(problem.nodes, labels.tolist(), strict=True))
            return nodes + sum(float(e.table[labels[e.u], labels[e.v]]) for e in problem.edges)

        before = value_of(now)
        for share in (0.0, 1.0):
            nodes = tuple(
                Node(n.name, n.cost + share * price[o], np.zeros(len(n.cost)))
                for n, o in zip(plain.nodes, own, strict=True)
            )
            priced = Problem(nodes, plain.edges)
            limits = Limits(BLOCK_GAP, min(deadline, time.monotonic() + BLOCK_SECONDS))
            labels, _, _ = minimize(build(priced, False), partial(value_of, problem=priced), limits)
            if labels is None:
                return False
            if value_of(labels) >= before:
                return False  # without a price nothing is better than this, and with one it is no better
            if self._take(block, labels):
                return True
        return False

    def _take(self, block: list[int], labels: Ints) -> bool:
        """Change a block's labels if that fits."""
        inst = self._instance
        nodes = np.array(block)
        more = inst.memory[inst.first[nodes] + labels] - inst.memory[inst.first[nodes] + self.labels[nodes]]
        slack = self._slack.copy()
        for n, m in zip(block, more.tolist(), strict=True):
            if m and inst.begin[n] < inst.end[n]:
                slack[inst.begin[n] : inst.end[n]] -= m
        if (slack < np.minimum(self._slack, 0.0) - 1e-12 * inst.limit).any():
            return False
        self._slack = slack
        self.labels[nodes] = labels
        return True
