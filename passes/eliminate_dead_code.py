"""eliminate_dead_code: nodes that nothing uses go, but for random ones: those after them would draw other numbers.

Before::

    index = axis_index("model"); start = index * 64; relu = aten.relu(x); return (relu,)

After::

    relu = aten.relu(x); return (relu,)
"""

from __future__ import annotations

from autopar.ir.plan import Plan
from autopar.ir.program import Program, draws


def eliminate_dead_code(program: Program, plan: Plan) -> Program:
    """Remove what is not used; the graph is the same on all ranks, so all drop the same collectives."""
    del plan
    graph = program.graph.graph
    # Not fx's own pass: to that a wait_tensor has side effects, so unused collectives would stay.
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and not draws(node):
            graph.erase_node(node)
    program.graph.recompile()
    return program
