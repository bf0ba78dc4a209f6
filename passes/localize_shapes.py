"""localize_shapes: arguments that are sizes become the local sizes; numbers that are not sizes stay global.

Before::

    view = aten.reshape(mm, [8, 16, 64]); div = aten.div(sum, 64)      # view is [batch{data}, seq, hidden], data = 4

After::

    view = aten.reshape(mm, [2, 16, 64]); div = aten.div(sum, 64)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from autopar.ir.graph import is_operator
from autopar.ir.layout import local_shape
from autopar.ir.node_info import graph_info, info, set_graph_info
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.rules.shapes.local_shapes import propagate
from autopar.sharding.candidates import letter_parts
from autopar.sharding.dims import Operator


def localize_shapes(program: Program, plan: Plan) -> Program:
    """Make size arguments local, then propagate local shapes."""
    for node in program.graph.graph.nodes:
        if is_operator(node) and info(node).operator is not None:
            _localize(node, plan.axis_sizes)
    propagate(program, plan, everything=True)
    set_graph_info(program.graph, replace(graph_info(program.graph), invariants=("layouts", "placed", "local")))
    return program


def _localize(node: fx.Node, sizes: Sequence[int]) -> None:
    operator: Operator = info(node).operator
    for position in operator.rule.shapes:
        shape = local_shape(operator.outputs[0], info(node).layout(), sizes)  # type: ignore[arg-type]
        node.update_arg(position, list(shape))
    for key, letters in operator.rule.scaled.items():
        parts = letter_parts(info(node).strategy, letters, sizes)
        if parts == 1:
            continue
        # A default that was left out stays so.
        if isinstance(key, int) and key < len(node.args):
            node.update_arg(key, _divide(node.args[key], parts))
        elif str(key) in node.kwargs:
            node.update_kwarg(str(key), _divide(node.kwargs[str(key)], parts))


def _divide(value: Any, parts: int) -> Any:
    if isinstance(value, list | tuple):
        return [_divide(v, parts) for v in value]
    assert isinstance(value, int)
    # Candidates divide every factor of a letter, and so its counts.
    assert value % parts == 0
    return value // parts
