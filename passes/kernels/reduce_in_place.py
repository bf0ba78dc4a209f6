"""reduce_in_place: an all-reduce writes into the memory of its argument where nothing else needs that any more.

Before::

    flat = cat([g1, g2]); sums = all_reduce(flat, "sum", "data"); g = wait(sums)       # all_reduce copies `flat` first

After::

    flat = cat([g1, g2]); sums = all_reduce_(flat, "sum", "data"); g = wait(sums)

It saves the copy and its memory, where the argument may be overwritten (`autopar.memory.overwritable`). Sums over
microbatches are handed from one graph to the next, and the parts of a pipeline's stages run in another order than the
graph's: both are left as they are.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.node_info import graph_info, info, set_graph_info
from autopar.ir.ops.collectives import IN_PLACE
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.memory.overwritable import Memory
from autopar.rules.shapes.local_shapes import propagate


def reduce_in_place(program: Program, plan: Plan) -> Program:
    """Let all-reduces whose argument nothing else needs write into its memory."""
    found = [n for n in program.graph.graph.nodes if n.target in IN_PLACE]
    if program.part.count > 1 or not found or any(info(n).stage is not None for n in found):
        return program
    memory = Memory(program)
    dying = [n for n in found if memory.may_overwrite(n)]
    for node in dying:
        node.target = IN_PLACE[node.target]
    if dying:
        propagate(program, plan, everything=True)  # results share their arguments' memory from here on
        set_graph_info(program.graph, replace(graph_info(program.graph), storages_known=True))
        program.graph.recompile()
    return program
