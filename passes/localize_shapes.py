"""localize_shapes: arguments that are sizes become the local sizes; numbers that are not sizes stay global.

Before::

    view = aten.reshape(mm, [8, 16, 64]); div = aten.div(sum, 64)      # view is [batch{data}, seq, hidden], data = 4

After::

    view = aten.reshape(mm, [2, 16, 64]); div = aten.div(sum, 64)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from autopar.ir.graph import is_operator
from autopar.ir.layout import ByExpert
from autopar.ir.node_info import graph_info, info, set_graph_info, set_info
from autopar.ir.ops import exchange
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.rules.shapes.local_shapes import propagate
from autopar.sharding.lowered.arguments import localized


def localize_shapes(program: Program, plan: Plan) -> Program:
    """Make size arguments local, then propagate local shapes."""
    for node in program.graph.graph.nodes:
        if is_operator(node) and info(node).operator is not None:
            _localize(node, plan.axis_sizes)
    propagate(program, plan, everything=True)
    _note_open_sizes(program.graph.graph)
    set_graph_info(program.graph, replace(graph_info(program.graph), invariants=("layouts", "placed", "local")))
    return program


def _note_open_sizes(graph: fx.Graph) -> None:
    """Say of each node whether its tensor has a size that only the data give, and the propagated one is a guess."""
    if not any(n.target in exchange.HOST_WAITS for n in graph.nodes):
        return
    for node in graph.nodes:
        layouts = [layout for layout in info(node).layouts if layout is not None]
        if layouts:
            size = any(isinstance(p, ByExpert) for layout in layouts for p in layout)
        else:  # between a layout and the next one
            made = node.target in (exchange.exchange_rows, exchange.arrivals, exchange.own_rows)
            size = made or any(info(a).open_size for a in node.all_input_nodes)
        set_info(node, replace(info(node), open_size=size))


def _localize(node: fx.Node, sizes: Sequence[int]) -> None:
    known = info(node)
    args, node.kwargs = localized(known.operator, known.strategy, known.layouts[0], sizes, (node.args, node.kwargs))
    node.args = tuple(args)
