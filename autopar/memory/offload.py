"""What is in host memory: saved activations until the backward pass needs them, optimizer state between steps."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from autopar.ir.graph import Value, is_backward
from autopar.ir.program import Program
from autopar.memory.recompute import Recompute


@dataclass(frozen=True)
class Offload:
    """What goes to host memory as it is computed, and comes back for the backward pass or the optimizer's step.

    Attributes:
        made: values, in the layout in which they are made.
        moved: values, in their consumer layout.
        states: names of the parameters whose optimizer state is there between the optimizer's steps.
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
    """Find what is offloaded, of all that may be: only what the backward pass reads, and does not recompute.

    Args:
        program: the program, before anything is recomputed.
        operators: forward operators whose results may be offloaded.
        consumer_layouts: values that may be offloaded in their consumer layout.
        recompute: what the backward pass recomputes or re-gathers.
        moves: forward values whose consumer layout is another than the one in which they are made.
    """
    if not operators and not consumer_layouts:
        return NOTHING_OFFLOADED
    # Recomputed operators run in the backward pass, and read their arguments there.
    in_backward = {n for n in program.sources if is_backward(n)} | recompute.nodes
    read = {value for node in in_backward for value in program.sources[node]}
    # Of these the consumer layout is what is saved: the original is read in the forward pass only.
    saved_relaid = {value for value in moves if value not in recompute.values}
    sent = {value for value in consumer_layouts if value in read and value not in recompute.values}
    made = {v for v in read - saved_relaid if v[0] in operators and v[0] not in recompute.nodes}
    return Offload(frozenset(made | (sent - saved_relaid)), frozenset(sent & saved_relaid))
