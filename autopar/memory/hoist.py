"""What all microbatches of a step share: values of parameters and constants alone that the plan saves.

They are computed and redistributed once, before the first microbatch, and live to the end of the step: a gathered
parameter lives for a step. What the plan does not save is recomputed in each microbatch: a gather for a microbatch, or
per use.

To save a gathered parameter from the forward to the backward pass of each microbatch, and to gather it again for the
next, is left out: microbatches run one after the other, so it takes as much memory at the peak, and more time.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from autopar.ir.graph import Value
from autopar.ir.program import Program


def find_hoisted(
    program: Program, relaid: Collection[Value], not_saved: Collection[fx.Node], not_saved_relaid: Collection[Value]
) -> tuple[frozenset[fx.Node], frozenset[Value]]:
    """Find the microbatch-invariant operators that the backward pass does not recompute, and their arguments.

    Args:
        program: of one microbatch, before anything is recomputed.
        relaid: values that the forward pass brings to a consumer layout.
        not_saved: forward operators whose results are not saved.
        not_saved_relaid: those of ``relaid`` that are not saved in their consumer layout.

    Returns:
        Operators that run once a step, and values that are brought to their consumer layout once a step.
    """
    # Empty where a step has one microbatch: then nothing is hoisted.
    invariant = program.microbatch_invariant
    layouts = {value for value in relaid if value[0] in invariant and value not in not_saved_relaid}
    pending = [n for n in program.sources if n in invariant and n not in not_saved]
    pending += [node for node, _ in layouts]
    operators: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node in operators or node not in program.sources:
            continue
        operators.add(node)
        for source in program.sources[node]:
            # An argument is hoisted with its user even where it is not saved: there is no microbatch to compute it in.
            pending.append(source[0])
            layouts.update({source} if source in relaid else ())
    return frozenset(operators), frozenset(layouts)
