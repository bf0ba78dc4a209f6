"""eliminate_dead_code: nodes that nothing uses go, collectives among them only if every rank drops them alike.

Before::

    index = axis_index("model"); start = index * 64; relu = aten.relu(x); return (relu,)

After::

    relu = aten.relu(x); return (relu,)
"""

from __future__ import annotations

from autopar.plan import Plan
from autopar.program import Program


def eliminate_dead_code(program: Program, plan: Plan) -> Program:
    """Remove what is not used; the graph is the same on all ranks, so all drop the same collectives."""
    del plan
    graph = program.graph.graph
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)
    program.graph.recompile()
    return program
