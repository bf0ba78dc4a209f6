"""replay_random: a recomputed draw draws the same numbers again, from a generator that all devices share.

Before::

    mask = autopar.ir.ops.random("dropout", ...); ...; mask_recomputed = autopar.ir.ops.random("dropout", ...)

After::

    state = generator_state(device); mask = autopar.ir.ops.random("dropout", ...); ...
    mask_recomputed = replayed(autopar.ir.ops.random, state, "dropout", ...)

The generator goes on as if nothing had been recomputed. This is for ``deterministic=True``; else
`autopar.passes.rng.localize` gives both the same seed.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.graph import inherit_origin, tensor_arguments
from autopar.ir.node_info import info, set_info
from autopar.ir.ops.random import generator_state, replayed
from autopar.ir.plan import Plan
from autopar.ir.program import Program, draws
from autopar.rules.shapes.local_shapes import propagate


def replay_random(program: Program, plan: Plan) -> Program:
    """Save the generator's state before every draw that has a copy; the copy starts from it."""
    graph = program.graph.graph
    originals = {n.name: n for n in graph.nodes if draws(n)}
    # Draws that are not recomputed need no state: most graphs have none.
    copies = [n for n in originals.values() if info(n).recompute_of is not None]
    for node in copies:
        original = originals[info(node).recompute_of or ""]
        where = original.kwargs.get("device") or tensor_arguments(original)[0]
        with graph.inserting_before(original):
            state = graph.call_function(generator_state, (where,))
        inherit_origin(state, original)
        node.args = (node.target, state, *node.args)
        node.target = replayed
        # Input layouts are of tensor arguments, and the generator's state, which is one now, has no layout.
        set_info(node, replace(info(node), input_layouts=()))
    if copies:
        propagate(program, plan)
    return program
