"""What lies on the host: of the forward pass until the backward pass takes it, and optimizer state between steps."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from autopar.ir.graph import Value, is_backward
from autopar.ir.program import Program
from autopar.memory.recompute import Recompute


@dataclass(frozen=True)
class Offload:
    """What goes to the host as it is made, and comes back for the backward pass or the optimizer's step.

    Attributes:
        made: values, in the layout in which they are made.
        moved: values, in the layout that they are brought to for all their users.
        states: names of the parameters whose optimizer state lies there between the optimizer's steps.
    """

    made: frozenset[Value] = frozenset()
    moved: frozenset[Value] = frozenset()
    states: frozenset[str] = frozenset()


NOTHING_OFFLOADED = Offload()


def find_offloaded(
    program: Program,
    operators: Collection[fx.Node],
    consumer_layouts: Collection[Value],
    recompute: Recompute,
    moves: Collection[Value],
) -> Offload:
    """Find what is offloaded, of all that may be: only what the backward pass takes, and does not recompute.

    Args:
        program: the program, nothing in it repeated yet.
        operators: forward operators whose results may lie there.
        consumer_layouts: values that may, in the form in which all their users get them.
        recompute: what the backward pass recomputes or re-gathers.
        moves: values for which that form is another than the one in which they are made, and of the forward pass.
    """
    if not operators and not consumer_layouts:
        return NOTHING_OFFLOADED
    late = {n for n in program.sources if is_backward(n)} | recompute.nodes
    taken = {value for node in late for value in program.sources[node]}
    held = {value for value in moves if value not in recompute.values}  # the moved form is kept
    sent = {value for value in consumer_layouts if value in taken and value not in recompute.values}
    made = {v for v in taken - held if v[0] in operators and v[0] not in recompute.nodes}
    return Offload(frozenset(made | (sent - held)), frozenset(sent & held))
