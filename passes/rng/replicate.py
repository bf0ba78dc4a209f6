"""replicate_random: every device draws the whole tensor, as one device would, and its users take their block of it.

Before::

    mask = autopar.ir.ops.random("dropout", [0.1, 4], [8, 16], [0, 1], dtype=bool)          # [batch{data}, hidden]

After (the slice comes with the other moves)::

    mask = autopar.ir.ops.random("dropout", [0.1, 4], [8, 16], [0, 1], dtype=bool)          # [batch, hidden]

The generators of all devices, alike before, stay alike. This is what ``deterministic=True`` means; else
`autopar.passes.rng.localize` runs.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.layout import replicated
from autopar.ir.node_info import info, set_info
from autopar.ir.plan import Plan
from autopar.ir.program import Program, draws
from autopar.sharding.candidates import REPLICATE


def replicate_random(program: Program, plan: Plan) -> Program:
    """Make the layouts of random operators whole; their users' stay."""
    axes = len(plan.axes)
    for node in program.graph.graph.nodes:
        if draws(node):
            known = info(node)
            layouts = tuple(None if lay is None else replicated(axes) for lay in known.layouts)
            # A consumer layout of the search starts from the split draw; only the user's own pin is kept.
            forced = {i: lay for i, lay in known.consumer_layouts.items() if i in known.forced}
            known = replace(known, strategy=(REPLICATE,) * axes, layouts=layouts, consumer_layouts=forced)
            set_info(node, known)
    return program
