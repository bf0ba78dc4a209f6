"""How many kernels and collectives the host launches in a step: of a plan, and of every plan at the least."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import fx

from autopar.costs.cluster import Device
from autopar.ir.graph import dependent_on
from autopar.ir.program import Program
from autopar.passes.collectives.bucket_collectives import bucket_bytes
from autopar.passes.kernels.add_bias_in_product import adds_bias
from autopar.search.overlap.regions import BACKWARD, BLOCKING_KINDS
from autopar.sharding.dims import Dims, Operator
from autopar.sharding.layer_classes import LayerClasses
from autopar.sharding.redistribute.moves import LOCAL_MOVES, Machine, Move


@dataclass
class Launches:
    """Launches of a step under a plan, as they are counted.

    Attributes:
        machine: the mesh.
        together: whether parameters and gradients of a block travel together; else gradients that are summed only.
        alone: kernels, copies, and messages that travel alone.
        buckets: messages that travel together, by what they have in common: how many there are block by block, their
            bytes in a step, and how often they are sent.
    """

    machine: Machine
    together: bool
    alone: float = 0.0
    buckets: dict[tuple[str, int, int, bool], list[float]] = field(default_factory=dict)

    def move(self, region: str, kind: int, move: Move, size: float, times: int, members: float, copies: float) -> None:
        """Add those of a move.

        Args:
            region: of the move.
            kind: of communication, see `autopar.search.overlap.regions`.
            move: the move.
            size: bytes in a step.
            times: that it runs.
            members: see `Regions.members`.
            copies: kernels of the device's own, each time.
        """
        self.alone += copies * times
        if move.kind in LOCAL_MOVES or self.machine.sizes[move.axis] == 1:
            return
        if kind in BLOCKING_KINDS or not (self.together or move.kind == "all_reduce"):
            self.alone += times
            return
        # Blocks travel together, too, as long as a bucket has room.
        found = self.buckets.setdefault((move.collective, move.axis, kind, region.endswith(BACKWARD)), [0.0, 0.0, 1.0])
        found[0] += times / members
        found[1] += size
        found[2] = max(found[2], times)

    @property
    def count(self) -> float:
        """All launches."""
        found = self.alone
        for (_, axis, *_), (messages, size, runs) in self.buckets.items():
            found += min(
                messages,
                runs * math.ceil(size / runs / bucket_bytes(self.machine.sizes[axis], self.machine.links[axis])),
            )
        return found


def launches(node: fx.Node, operator: Operator) -> bool:
    """Whether an operator of a canonical program is a kernel of its own, and no view or part of another's."""
    fused = operator.fused is not None and not operator.fused.launches
    tensors = [t for t in (*operator.inputs, *operator.outputs) if t is not None]
    drawn, empty = any(t.drawn for t in operator.outputs if t is not None), not any(t.bytes for t in tensors)
    return not (operator.rule.view or fused or drawn or empty or adds_bias(node))


def least_launching(program: Program, dims: Dims, classes: LayerClasses, device: Device) -> float:
    """Seconds in which the host launches each operator once, and those of the batch once for each microbatch.

    Devices that are faster wait for it. What operators are lowered to are more kernels, and messages are launched, too.

    Args:
        program: canonical program of one microbatch; of a deep model all layers count.
        dims: its dimension analysis.
        classes: its layer classes, which say how often the whole model has each.
        device: of the cluster.
    """
    if not device.host:
        return 0.0
    of_batch = dependent_on(program.graph.graph, program.inputs_of("batch"))
    found = 0.0
    for key, members in classes.members.items():
        operator = dims.operators.get(members[0])
        if operator is None or not launches(members[0], operator):
            continue
        found += classes.count[key] * (program.runs(members[0]) if members[0] in of_batch else 1)
    return found * device.host
