"""fill_waits: gradients of weights are computed while a value that the next kernel needs is communicated.

Before (in the backward pass of a matrix that is split over ``gpu``)::

    dw = mm(x_t, g); dx = mm(g, w_t); r = all_reduce(dx, "sum", "gpu"); y = wait(r); ...

After::

    dx = mm(g, w_t); r = all_reduce(dx, "sum", "gpu"); dw = mm(x_t, g); y = wait(r); ...

Only the order of the nodes changes, for all ranks alike, and only where the plan overlaps. It goes in front of
`overlap_collectives`, which counts the seconds of kernels in their order.
"""

from __future__ import annotations

from torch import fx

from autopar.ir.graph import is_backward
from autopar.ir.node_info import info
from autopar.ir.plan import Plan
from autopar.ir.program import Program, draws
from autopar.sharding.assignment import machine_of
from autopar.sharding.graph_order import gradient_moves, parameter_only, reorder
from autopar.sharding.node_seconds import NodeSeconds


def fill_waits(program: Program, plan: Plan) -> Program:
    """Put gradients of weights behind the issue of a collective whose result the next kernel needs."""
    if not plan.overlap:
        return program
    graph, seconds = program.graph.graph, NodeSeconds(machine_of(plan))
    others = {*parameter_only(program), *gradient_moves(program)}
    blocking = {n: c for n in graph.nodes if (c := info(n).collective) is not None and n not in others}
    if not blocking:
        return program
    ahead: set[fx.Node] = set()  # of a collective that blocks
    for node in reversed(graph.nodes):
        if node in blocking or any(u in ahead for u in node.users):
            ahead.add(node)
    position = {n: float(i) for i, n in enumerate(graph.nodes) if n.op not in ("placeholder", "output")}
    window: list[fx.Node] = []
    for node in list(position):
        if node in blocking:
            left = seconds.collective(blocking[node])
            # The last of them, and no more than it takes: gradients that are late are sent late.
            while window and left > 0:
                position[window[-1]] = position[node] + 0.5
                left -= seconds.kernel(window.pop())[0]
            window = []
        elif is_backward(node) and node not in ahead and not info(node).collective and not draws(node):
            window.append(node)
    reorder(graph, position)
    return program
