"""hoist_invariants: what all microbatches of a step share runs before all else.

Before::

    x_1 = aten.mm(x, w_t); half = aten._to_copy(v, dtype=bfloat16); x_2 = aten.mm(x_1, half)   # half is invariant

After::

    half = aten._to_copy(v, dtype=bfloat16); x_1 = aten.mm(x, w_t); x_2 = aten.mm(x_1, half)

So what is shared is there when the first microbatch begins, and is allocated before its activations.
"""

from __future__ import annotations

from autopar.ir.plan import Plan
from autopar.ir.program import Program, is_hoisted


def hoist_invariants(program: Program, plan: Plan) -> Program:
    """Put the nodes that `annotate_layouts` has marked before all others."""
    del plan
    nodes = list(program.graph.graph.nodes)
    last = program.placeholders[-1]
    # In their order, which stays topological: what is hoisted reads only what is hoisted (`autopar.ir.check`).
    for node in nodes:
        if node.op != "placeholder" and is_hoisted(node):
            last.append(node)
            last = node
    return program
