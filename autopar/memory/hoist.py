"""What all microbatches of a step share: values of parameters and constants alone that the plan keeps.

They are computed and moved once, before the first microbatch, and held to the end of the step: a gathered parameter
lives for a step. What the plan does not keep is made anew in each microbatch: a gather for a microbatch, or for a use.

To keep a gathered parameter from the forward to the backward pass of each microbatch, and to gather it again for the
next, is left out: microbatches run one after the other, so it takes as much memory at the peak, and more time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from autopar.ir.graph import Value
from autopar.ir.program import Program


@dataclass(frozen=True)
class Hoisted:
    """What runs once a step, before the first microbatch.

    Attributes:
        nodes: operators.
        consumer_layouts: values that are moved for all their users.
    """

    nodes: frozenset[fx.Node] = frozenset()
    consumer_layouts: frozenset[Value] = frozenset()


NOTHING_HOISTED = Hoisted()


def find_hoisted(
    program: Program, relayed: Collection[Value], operators: Collection[fx.Node], consumer_layouts: Collection[Value]
) -> Hoisted:
    """Find the microbatch-invariant operators that the backward pass does not recompute, and their arguments.

    Args:
        program: of one microbatch, nothing in it repeated yet.
        relayed: values that the forward pass brings to one layout for all their users.
        operators: forward operators whose results are not kept.
        consumer_layouts: of the values that are relayed, those whose moved form is not kept.
    """
    moved = {value for value in relayed if value[0] in program.microbatch_invariant and value not in consumer_layouts}
    waiting = [n for n in program.sources if n in program.microbatch_invariant and n not in operators]
    waiting += [node for node, _ in moved]
    nodes: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node in nodes or node not in program.sources:
            continue
        nodes.add(node)
        for source in program.sources[node]:
            waiting.append(source[0])
            moved.update({source} if source in relayed else ())
    return Hoisted(frozenset(nodes), frozenset(moved))
