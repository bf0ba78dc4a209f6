"""The solver's workspace: costs, memory and factors, edited in place by presolve and elimination."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from autopar.search.solver.problem import Floats, Ints, Problem

# Differences below this share of a table's largest entry are float noise left by subtracting minima.
NOISE = 1e-13


@dataclass(frozen=True, eq=False)
class Potential:
    """A cost over several nodes: `table[groups[0][label of nodes[0]], groups[1][...], ...]`.

    Groups have the full label count of the original node, so that they stay valid while labels die;
    a dead label's group is -1.
    """

    nodes: tuple[int, ...]
    groups: tuple[Ints, ...]
    table: Floats


Folded = tuple[int, Floats, tuple[Potential, ...]]
"""An eliminated node, with the costs and factors that its best label depends on."""


@dataclass
class Workspace:
    """A problem that is edited in place. A label is dead when its cost is inf; labels are never renumbered.

    Arrays are replaced and never written, so that copies can share them, and so that a cost array's identity says
    whether a node has changed.

    Attributes:
        cost: of each node's labels.
        memory: of each node's labels.
        factors: by id.
        incident: of each node, the ids of its factors, as an ordered set.
        active: whether each node is still to be decided.
        folded: eliminated nodes, in order.
        constant: cost of every labeling besides.
        next_id: the last id given to a factor.
        tidy: of compacted factors, how many labels their nodes had then. This and the following only save work.
        checked: the factors and the cost array with which a node's labels were last compared.
        living: the labels that a cost array allows.
        regrets: for each axis of a factor, the largest extra cost of row b over row a.
    """

    cost: list[Floats]
    memory: list[Floats]
    factors: dict[int, Potential] = field(default_factory=dict)
    incident: list[dict[int, None]] = field(default_factory=list)
    active: list[bool] = field(default_factory=list)
    folded: list[Folded] = field(default_factory=list)
    constant: float = 0.0
    next_id: int = 0
    tidy: dict[int, tuple[int, ...]] = field(default_factory=dict)
    checked: dict[int, tuple[tuple[int, ...], Floats]] = field(default_factory=dict)
    living: dict[int, tuple[Floats, Ints]] = field(default_factory=dict)
    regrets: dict[int, dict[int, Floats]] = field(default_factory=dict)

    def copy(self) -> Workspace:
        """An independent workspace; arrays are shared because they are replaced, never written."""
        return Workspace(
            list(self.cost), list(self.memory), dict(self.factors), [dict(d) for d in self.incident],
            list(self.active), list(self.folded), self.constant, self.next_id, dict(self.tidy), dict(self.checked),
            dict(self.living), {fid: dict(known) for fid, known in self.regrets.items()},
        )  # fmt: skip

    def add(self, factor: Potential) -> int:
        """Insert a factor and return its id."""
        self.next_id += 1
        self.factors[self.next_id] = factor
        for node in factor.nodes:
            self.incident[node][self.next_id] = None
        return self.next_id

    def remove(self, fid: int) -> Potential:
        """Take a factor out."""
        factor = self.factors.pop(fid)
        self.tidy.pop(fid, None)
        self.regrets.pop(fid, None)
        for node in factor.nodes:
            del self.incident[node][fid]
        return factor

    def neighbors(self, node: int) -> list[int]:
        """Other nodes that share a factor, in first-seen order."""
        seen = dict.fromkeys(n for fid in self.incident[node] for n in self.factors[fid].nodes)
        seen.pop(node, None)
        return list(seen)

    def alive(self, node: int) -> Ints:
        """Labels still allowed."""
        cost = self.cost[node]
        known = self.living.get(node)
        # By identity: arrays are replaced and never written, so that another array means other costs.
        if known is None or known[0] is not cost:
            known = self.living[node] = (cost, np.flatnonzero(np.isfinite(cost)))
        return known[1]

    def carries_memory(self, node: int) -> bool:
        """Whether the choice of this node's label changes the memory."""
        left = self.memory[node][self.alive(node)]
        return bool(left.size) and bool((left != left[0]).any())

    def live_nodes(self) -> list[int]:
        """Nodes not eliminated yet."""
        return [i for i, on in enumerate(self.active) if on]


def build(problem: Problem, with_memory: bool) -> Workspace:
    """The workspace of a problem; self loops become unary costs.

    Args:
        problem: The problem.
        with_memory: Whether memory matters; if not, every node may be eliminated.
    """
    cost = [np.array(n.cost, dtype=np.float64) for n in problem.nodes]
    memory = [np.array(n.memory, dtype=np.float64) if with_memory else np.zeros(len(n.cost)) for n in problem.nodes]
    graph = Workspace(cost, memory, {}, [{} for _ in cost], [True] * len(cost))
    for e in problem.edges:
        u_group, v_group = np.asarray(e.u_group, dtype=np.int64), np.asarray(e.v_group, dtype=np.int64)
        table = np.asarray(e.table, dtype=np.float64)
        if e.u == e.v:
            # A class whose members read each other has an edge to itself: its labels alone decide what that costs.
            graph.cost[e.u] = graph.cost[e.u] + table[u_group, v_group]
        else:
            graph.add(Potential((e.u, e.v), (u_group, v_group), table))
    return graph


def join(columns: list[Ints], alive: Ints) -> tuple[Ints, list[Ints]]:
    """The common refinement of several groupings of one node.

    Args:
        columns: Groupings, each [L].
        alive: Labels to number; the others get -1.

    Returns:
        The refined grouping [L], and for each input grouping the group of every refined group.
    """
    joint = np.full(len(columns[0]), -1, dtype=np.int64)
    if len(columns) == 1:
        used, inverse = np.unique(columns[0][alive], return_inverse=True)
        joint[alive] = inverse
        return joint, [used]
    key = np.zeros(len(alive), dtype=np.int64)  # the groups of a label as digits of one number
    for c in columns:
        key = key * (int(c.max()) + 1) + c[alive]
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    joint[alive] = inverse
    return joint, [c[alive[first]] for c in columns]


def combine(parts: list[Potential], graph: Workspace) -> Potential:
    """The sum of factors over the same nodes, as one factor."""
    nodes = parts[0].nodes
    groups, total = [], None
    picks: list[list[Ints]] = []
    for node in nodes:
        joint, sub = join([p.groups[p.nodes.index(node)] for p in parts], graph.alive(node))
        groups.append(joint)
        picks.append(sub)
    for k, part in enumerate(parts):
        order = [part.nodes.index(n) for n in nodes]
        table = part.table.transpose(order)[np.ix_(*(sub[k] for sub in picks))]
        total = table if total is None else total + table
    assert total is not None
    return Potential(nodes, tuple(groups), total)
