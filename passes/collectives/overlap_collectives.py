"""overlap_collectives: collectives run beside kernels that do not need them.

Before (in the forward pass of FSDP, and in a backward pass whose activations are split over the same axis)::

    a = all_gather(p1, 8, "data"); w1 = wait(a); h1 = mm(x, w1); b = all_gather(p2, 8, "data"); w2 = wait(b); ...
    r = reduce_scatter(dw, "sum", 8, "data"); s = wait(r); g = all_to_all(dx, "data"); h = wait(g); dy = mm(h, w_t); ...

After::

    a = all_gather(p1, 8, "data"); b = all_gather(p2, 8, "data"); w1 = wait(a); h1 = mm(x, w1); w2 = wait(b); ...
    g = all_to_all(dx, "data"); r = reduce_scatter(dw, "sum", 8, "data"); h = wait(g); dy = mm(h, w_t); s = wait(r); ...

Parameters are gathered ahead of their use, for as long as the gather takes, but no further than a block of the model.
Gradients are waited for when their reduction is over by the cost model, or when the next but one of its kind begins;
reductions over a further axis follow there. A reduction lets collectives go first that the next kernel needs, where it
would hold them up on their link. Only the order of the nodes changes, for all ranks alike. `Plan.overlap` says whether
it does: what is in flight takes memory, which `autopar.memory.liveness` counts.
"""

from __future__ import annotations

import heapq
import operator
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict

import torch
from torch import fx

from autopar.ir.graph import block_of, is_backward, module_path
from autopar.ir.node_info import info
from autopar.ir.ops.collectives import Collective, c10d, waits_for
from autopar.ir.plan import Plan
from autopar.ir.program import Program, is_hoisted
from autopar.sharding.assignment import machine_of
from autopar.sharding.graph_order import gradient_moves, parameter_only, reorder
from autopar.sharding.node_seconds import NodeSeconds

aten = torch.ops.aten

ISSUE, WAIT, BEHIND = -0.5, -0.25, 0.25
"""Where a node goes beside the one that it is put at: issues before waits, a reduction behind what it lets go first."""

AHEAD = 2
"""How many blocks a parameter outside of blocks may be gathered ahead."""


def overlap_collectives(program: Program, plan: Plan) -> Program:
    """Put collectives ahead of, and waits behind, the kernels that hide them."""
    if plan.overlap and any(info(n).collective for n in program.graph.graph.nodes):
        reorder(program.graph.graph, _Schedule(program, plan).positions())
    return program


class _Schedule:
    """Positions of nodes, in units of the order in which they are now."""

    def __init__(self, program: Program, plan: Plan) -> None:
        self.program = program
        self.nodes = [n for n in program.graph.graph.nodes if n.op not in ("placeholder", "output")]
        self.position = {n: float(i) for i, n in enumerate(self.nodes)}
        self.static = set(parameter_only(program))
        self.moves = gradient_moves(program)
        self.seconds = NodeSeconds(machine_of(plan))
        self.blocks: dict[int, str | None] = {}
        # What is computed from a gradient that has been sent hides nothing: it waits for it, too.
        moves = set(self.moves)
        behind = set(moves)
        for node in self.nodes:
            if any(a in behind for a in node.all_input_nodes):
                behind.add(node)
        self.blocking: dict[str, list[int]] = defaultdict(list)  # by axis: where kernels wait for one
        # By when the compute stream has come to each node, if it waits for no parameter and for no gradient.
        self.clock, over = [0.0], dict[fx.Node, float]()
        for i, node in enumerate(self.nodes):
            now, awaited = self.clock[-1], max((over[a] for a in node.all_input_nodes if a in over), default=0.0)
            made = info(node).collective
            if made is not None and node not in self.static and node not in moves:
                self.blocking[made.axis].append(i)
                over[node] = now + self.seconds.collective(made)
            elif node.target in (operator.getitem, c10d.wait_tensor.default):
                over[node] = awaited
            elif made is None and node not in behind:
                now = max(now, awaited) + self.seconds.kernel(node)[0]
            self.clock.append(now)

    def positions(self) -> dict[fx.Node, float]:
        """Where each node should be."""
        self._sink_waits()
        self._prefetch()
        self._wait_for_gradients()
        return self.position

    def _sink_waits(self) -> None:
        """A wait, and what only reshapes its result, goes in front of the first that uses it."""
        waits = {n for n in self.nodes if n.target is c10d.wait_tensor.default}
        behind = set(waits)
        for node in self.nodes:
            if node.target in _RESHAPES and all(a in behind for a in node.all_input_nodes):
                behind.add(node)
        for node in reversed(self.nodes):
            if node in behind and not is_hoisted(node):
                first = min((self.position[u] for u in node.users if u in self.position), default=None)
                if first is not None:
                    self.position[node] = max(self.position[node], first if first % 1 else first + WAIT)

    def _prefetch(self) -> None:
        """Gathers of parameters go in front of a kernel that is as far ahead as they take, or a block ahead."""
        index = {n: i for i, n in enumerate(self.nodes)}
        gathers = {n for n in self.static if info(n).collective and not is_hoisted(n)}
        uses = self._uses(index)
        for backward in (False, True):
            kernels = (i for n, i in index.items() if is_backward(n) is backward and n not in self.static)
            units = sorted({uses[n] for n in gathers if is_backward(n) is backward})
            start = min(kernels, default=0)
            # Backwards: a gather over a first axis is ahead of that over the second.
            wanted: dict[fx.Node, int] = {}
            on_the_way = set[fx.Node]()  # what a further gather takes first
            for node in reversed(self.nodes):
                if node not in self.static:
                    continue
                # The output is in no order.
                first = min(node.users, key=lambda u: wanted.get(u, index.get(u, len(index) - 1)), default=None)
                wanted[node] = index[node] if first is None else wanted.get(first, index.get(first, len(index) - 1))
                if first in gathers or first in on_the_way:
                    on_the_way.add(node)
                if is_backward(node) is not backward or is_hoisted(node):
                    continue
                if node in gathers:
                    needed, took = wanted[node], self.seconds.collective(_collective(node))
                    place = self._ahead(units, needed, start, took)
                    if node in on_the_way:
                        place = max(place, self._by_clock(needed, took))
                    ahead = place + ISSUE
                    axis, latest = _collective(node).axis, self.clock[needed] - took
                    self.position[node] = self._let_first(ahead, axis, took, latest)
                    wanted[node] = int(self.position[node] - ISSUE)
                else:
                    # No earlier than it is read: kernels would stand behind one that waits for a gather. What only the
                    # other pass reads, such as a part of what is gathered that is left for it, stays where it is.
                    readers = [u for u in node.users if is_backward(u) is backward or u.op == "output"]
                    self.position[node] = min(
                        (self.position[u] if u in self.static else index.get(u, len(index)) + WAIT for u in readers),
                        default=self.position[node],
                    )

    def _ahead(self, units: list[int], at: int, start: int, took: float) -> int:
        """The use of others in front of which a gather is issued that is to be there at a position."""
        own, needed = self._block(at), self.clock[at]
        blocks = set[str]()
        for unit in reversed(units[: bisect_left(units, at)]):
            block = self._block(unit)
            if block is not None and block != own:
                # All of the block before has begun by then. A head may take longer than that one.
                first = next(u for u in units if self._block(u) == block)
                blocks.add(block)
                if own is not None or needed - self.clock[first] >= took or len(blocks) == AHEAD:
                    return first
            elif block is None and needed - self.clock[unit] >= took:
                return unit
        return start

    def _by_clock(self, at: int, took: float) -> int:
        """The last position by which a gather must be issued to be there at another one.

        Of several in a row only the last is a block ahead: were each, the first ones of a pass would wait for many.
        """
        return max(bisect_right(self.clock, self.clock[at] - took) - 1, 0)

    def _block(self, index: int) -> str | None:
        if index not in self.blocks:
            self.blocks[index] = block_of(module_path(self.nodes[index]), self.program.blocks)
        return self.blocks[index]

    def _uses(self, index: dict[fx.Node, int]) -> dict[fx.Node, int]:
        """By parameter-only node: index of the first node that uses what comes of it and is not one itself."""
        uses: dict[fx.Node, int] = {}
        for node in reversed(self.nodes):
            if node in self.static:
                # The output is in no order; only unused results have no user.
                users = (uses[u] if u in self.static else index.get(u, len(index) - 1) for u in node.users)
                uses[node] = min(users, default=index[node])
        return uses

    def _wait_for_gradients(self) -> None:
        """Waits of gradients go where their collective is over, and with them what follows, as on other axes."""
        free: dict[str, float] = {}
        issued: dict[tuple[object, str], list[float]] = {}
        behind = self._moves_behind()
        missing = Counter(move for moves in behind.values() for move in moves)
        ready = [(self.position[n], i, n) for i, n in enumerate(self.moves) if not missing[n]]
        number = {n: i for i, n in enumerate(self.moves)}
        yielded = set[fx.Node]()
        # In the order of their issue: a link takes what comes first, whatever axis it came from.
        while ready:
            _, _, node = heapq.heappop(ready)
            made = _collective(node)
            sources = [self.position[a] for a in node.all_input_nodes if a in self.position]
            at = max([self.position[node], *sources])
            took = self.seconds.collective(made)
            # Not much later: its gradient is in memory until then.
            queued = max(free.get(made.axis, 0.0) - self._time(at), 0.0)
            behind_others = self._let_first(at, made.axis, queued + took, self._time(at) + queued + took)
            if node not in yielded and behind_others > at:
                yielded.add(node)
                self.position[node] = behind_others
                heapq.heappush(ready, (behind_others, number[node], node))
                continue
            self.position[node] = at
            over = max(self._time(at), free.get(made.axis, 0.0)) + took
            free[made.axis] = over
            earlier = issued.setdefault((node.target, made.axis), [])
            earlier.append(at)
            # By the clock, but no later than when the next but one of its kind is issued.
            done = max(bisect_right(self.clock, over), int(at) + 1) + WAIT
            for wait in waits_for(node):
                self._put_behind(wait, min(done, float(len(self.nodes))))
            for later in behind[node]:
                missing[later] -= 1
                if not missing[later]:
                    heapq.heappush(ready, (self.position[later], number[later], later))
        self._limit(issued)

    def _let_first(self, at: float, axis: str, took: float, latest: float) -> float:
        """Where a collective is issued, so that none that a kernel waits for stands behind it on the link.

        Args:
            at: where it could be.
            axis: along which it is.
            took: seconds until it is over, if it is issued there.
            latest: by the clock, when it must be issued.
        """
        blocking = self.blocking[axis]
        best, room, found = at, 0.0, at
        for i in range(bisect_right(blocking, at), len(blocking) + 1):
            free = self.clock[blocking[i]] - self._time(found) if i < len(blocking) else took
            if free > room:
                best, room = found, free
            if room >= took or self.clock[blocking[i]] > latest:
                break
            found = blocking[i] + BEHIND
        return best

    def _moves_behind(self) -> dict[fx.Node, set[fx.Node]]:
        """By reduction of gradients: those over further axes that take its result."""
        moves, behind = set(self.moves), {n: set[fx.Node]() for n in self.moves}
        sources: dict[fx.Node, set[fx.Node]] = {}
        for node in self.nodes:
            above = {m for a in node.all_input_nodes for m in sources.get(a, ())}
            for move in above if node in moves else ():
                behind[move].add(node)
            sources[node] = {node} if node in moves else above
        return behind

    def _time(self, at: float) -> float:
        return self.clock[min(max(int(at) + 1, 0), len(self.clock) - 1)]

    def _limit(self, issued: dict[tuple[object, str], list[float]]) -> None:
        """No reduction is waited for later than the next but one of its kind is issued."""
        for node in self.moves:
            later = sorted(issued[node.target, _collective(node).axis])
            at = bisect_right(later, self.position[node])
            if at + 1 < len(later):
                for wait in waits_for(node):
                    if self.position[wait] > later[at + 1]:
                        self._put_behind(wait, later[at + 1] + ISSUE)

    def _put_behind(self, wait: fx.Node, at: float) -> None:
        """Put a wait somewhere, and what only gradients are computed from it no earlier."""
        self.position[wait] = at
        for user in wait.users:
            if user in self.position and self.position[user] < at:
                self._put_behind(user, at)


_RESHAPES = (
    aten.reshape.default, aten.permute.default, aten.contiguous.default, aten.narrow.default, aten.unflatten.int,
    aten.view_as_complex.default,
)  # fmt: skip


def _collective(node: fx.Node) -> Collective:
    made = info(node).collective
    assert made is not None
    return made
