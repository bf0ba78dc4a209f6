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
from autopar.ir.node_info import graph_info, info, set_graph_info
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
    set_graph_info(program.graph, replace(graph_info(program.graph), invariants=("layouts", "placed", "local")))
    return program


def _localize(node: fx.Node, sizes: Sequence[int]) -> None:
    known = info(node)
    args, node.kwargs = localized(known.operator, known.strategy, known.layouts[0], sizes, (node.args, node.kwargs))
    node.args = tuple(args)
