"""How many kernels and collectives the host launches in a step: of a plan, and of every plan at the least."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import fx

from autopar.costs.cluster import Device
from autopar.ir.graph import dependent_on
from autopar.ir.program import Program
from autopar.passes.collectives.bucket_collectives import bucket_bytes
from autopar.passes.kernels.add_bias_in_product import adds_bias
from autopar.search.overlap.regions import BLOCKING_KINDS, GATHER, Regions
from autopar.search.overlap.step_time import Floats, feature, no_features
from autopar.sharding.dims import Dims, Operator
from autopar.sharding.layer_classes import LayerClasses
from autopar.sharding.redistribute.moves import LOCAL_MOVES, Machine, Move


class Bucketed(NamedTuple):
    """Messages that may travel together: of one kind, along one axis, of one pass, behind as many others of a value."""

    collective: str
    axis: int
    kind: int
    backward: bool
    level: int
    runs: int


@dataclass
class _Told:
    """What may travel together, of a region.

    Attributes:
        units: blocks, or parameters outside of blocks.
        bytes: in a step.
        counted: messages as the search counts them, and their seconds.
    """

    units: set[str] = field(default_factory=set)
    bytes: float = 0.0
    counted: float = 0.0
    seconds: float = 0.0


Numbers = Mapping[Bucketed, Mapping[str, Mapping[str, float]]]
"""Of what may travel together, by region: as in `_Told`, with the number of units."""


@dataclass
class Launches:
    """Launches of a step under a plan, as they are counted.

    Attributes:
        machine: the mesh.
        together: whether parameters and gradients of a block travel together; else gradients that are summed only.
        alone: kernels, copies, and messages that travel alone.
        bucketed: messages that travel together.
    """

    machine: Machine
    together: bool
    alone: float = 0.0
    bucketed: dict[Bucketed, dict[str, _Told]] = field(default_factory=lambda: defaultdict(dict))

    def move(
        self, region: str, key: Bucketed, move: Move, unit: str, size: float, counted: tuple[float, float]
    ) -> None:
        """Add the messages of a move.

        Args:
            region: of the move.
            key: what it may travel with.
            move: the move.
            unit: see `Regions.together`.
            size: bytes in a step.
            counted: messages of a step as the search counts them, and their seconds.
        """
        if move.kind in LOCAL_MOVES or self.machine.sizes[move.axis] == 1:
            return
        if key.kind in BLOCKING_KINDS or not (self.together or move.kind == "all_reduce"):
            self.alone += key.runs
            return
        own = self.bucketed[key].setdefault(region, _Told())
        own.units.add(unit)
        own.bytes += size
        own.counted += counted[0]
        own.seconds += counted[1]

    def numbers(self) -> Numbers:
        """What may travel together, in numbers that are extrapolated to more layers."""
        return {key: {region: {**vars(own), "units": float(len(own.units))} for region, own in regions.items()}
                for key, regions in self.bucketed.items()}  # fmt: skip


def messages(machine: Machine, numbers: Numbers) -> dict[Bucketed, float]:
    """How many are sent in a step of a whole model: units travel together as a bucket has room."""
    found = {}
    for key, regions in numbers.items():
        units, size = (sum(own[name] for own in regions.values()) for name in ("units", "bytes"))
        limit = bucket_bytes(machine.sizes[key.axis], machine.links[key.axis])
        found[key] = key.runs * min(units, math.ceil(size / key.runs / limit))
    return found


def begun_with(numbers: Numbers, regions: Regions) -> frozenset[tuple[int, bool]]:
    """Kinds of what a pass sends for the region that it begins with, or of gradients ends with, see `StepTime`."""
    ends = {(GATHER, False): regions.opening[0], (GATHER, True): regions.turning}
    sent = {(key.kind, key.backward, region) for key, told in numbers.items() for region in told}
    return frozenset((k, late) for k, late, r in sent if r == ends.get((k, late), regions.closing[0]))


def further_messages(
    numbers: Numbers, sent: Mapping[Bucketed, float], begun: Container[tuple[int, bool]], axes: int
) -> dict[str, Floats]:
    """Features of regions for messages of which the search counts a part, since some parameters are not in them.

    Messages on several axes go at the same time: of each kind and pass those on one axis are added, which take longest.
    Kernels hide them all if the pass begins, or of gradients ends, with none.

    Args:
        numbers: of the whole model.
        sent: see `messages`.
        begun: see `begun_with`.
        axes: of the mesh.
    """
    regions = list(dict.fromkeys(region for own in numbers.values() for region in own))
    more: dict[tuple[int, bool], Floats] = defaultdict(lambda: np.zeros((axes, len(regions))))
    for key, told in numbers.items():
        counted = sum(own["counted"] for own in told.values())
        for region, own in told.items():
            further = max(sent[key] / counted - 1, 0.0) if (key.kind, key.backward) in begun else 0.0
            more[key.kind, key.backward][key.axis, regions.index(region)] += own["seconds"] * further
    found: dict[str, Floats] = defaultdict(lambda: no_features(axes))
    for (kind, _), seconds in more.items():
        axis = int(seconds.sum(axis=1).argmax())
        for region, longest in zip(regions, seconds[axis], strict=True):
            found[region][feature(kind, axis, axes)] += longest
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
