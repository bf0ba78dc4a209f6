"""A whole training step: microbatches through pipeline stages, gradients summed over data ranks, the optimizer.

Built from the parts of one microbatch on one stage's devices (`autopar.step`). Pipelines are predicted here, with the
times of their stages; what a schedule makes of them follows from its order of actions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import Cluster, Link
from autopar.cost import collectives
from autopar.cost.memory import optimizer_state_bytes
from autopar.redistribute import Machine
from autopar.step import AFTER, BEFORE, Part, Spent, spend

MASTER = 4
"""Bytes of a float32 element: what an optimizer keeps and computes in where parameters are narrower."""


@dataclass(frozen=True)
class Training:
    """How a training step is spread over devices, besides the layouts within a stage.

    Attributes:
        layers: blocks of the whole model; None: as many as were captured.
        stages: of the pipeline, consecutive blocks each.
        microbatches: of one data rank, in one step.
        data: data ranks, which sum their gradients.
        recompute: ``"none"``, or ``"full"``: of a block only what it is handed is kept, and its forward runs again.
        optimizer: whose state is kept and updated.

    Raises:
        ValueError: a number is not positive, or there is no such recomputation.
    """

    layers: int | None = None
    stages: int = 1
    microbatches: int = 1
    data: int = 1
    recompute: str = "none"
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        """Refuse what is no training."""
        for name in ("stages", "microbatches", "data"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive integer, got {getattr(self, name)!r}")
        if self.recompute not in ("none", "full"):
            raise ValueError(f'recompute={self.recompute!r}: there are "none" and "full"')


@dataclass(frozen=True)
class Stages:
    """Seconds of one microbatch on each stage, and of what follows the last microbatch.

    Attributes:
        forward: of each stage.
        backward: of each stage, recomputation included.
        handed: seconds in which a stage hands its result to the next.
        reduce: of the stage whose gradients take longest to sum over the data ranks.
        update: of the stage whose optimizer step takes longest, with the norm of the gradients.
    """

    forward: NDArray[np.float64]
    backward: NDArray[np.float64]
    handed: float
    reduce: float
    update: float


def stages_of(parts: Sequence[Part], cluster: Cluster, machine: Machine, training: Training) -> Stages:
    """The stages of a training step.

    Args:
        parts: of one microbatch.
        cluster: has the links between stages and data ranks.
        machine: the axes within a stage.
        training: how the step is spread.

    Raises:
        ValueError: the stages do not divide the blocks.
    """
    blocks = [p for p in parts if p.name not in (BEFORE, AFTER)]
    layers = training.layers or len(blocks)
    if not blocks or layers % training.stages:
        raise ValueError(
            f"{training.stages} stages do not divide {layers} repeated blocks; give another number of stages"
        )
    spent = {p.name: _both(p, machine, training.recompute) for p in parts}
    share = layers / training.stages / len(blocks)
    none = Spent(0.0, 0.0, (0.0,) * len(machine.sizes))
    inner = tuple(sum((spent[b.name][i].scaled(share) for b in blocks), none) for i in (0, 1))
    found, sizes = [], []
    for stage in range(training.stages):
        ends = [p for p in parts if (p.name, stage) in ((BEFORE, 0), (AFTER, training.stages - 1))]
        passes = [sum((spent[p.name][i] for p in ends), inner[i]) for i in (0, 1)]
        found.append(_turn(*passes))
        sizes.append(_parameter_bytes([*((p, 1.0) for p in ends), *((b, share) for b in blocks)]))
    times = np.array(found)
    data, after = _links(cluster, machine, training)
    handed = blocks[-1].handed / after.bandwidth + after.latency if training.stages > 1 else 0.0
    reduce = max(float(collectives.all_reduce(sum(s.values()), training.data, data)) for s in sizes)
    update = max(_update_seconds(s, machine, training) for s in sizes)
    return Stages(times[:, 0], times[:, 1], handed, reduce, update)


def _both(part: Part, machine: Machine, recompute: str) -> tuple[Spent, Spent]:
    """Forward and backward of a part; a block that is recomputed runs its forward again first."""
    forward, backward = spend(part.forward, machine), spend(part.backward, machine)
    again = recompute == "full" and part.name not in (BEFORE, AFTER)
    return forward, backward + forward if again else backward


def _turn(forward: Spent, backward: Spent) -> tuple[float, float]:
    """Seconds of both passes. The host may run ahead in one and fall behind in the other: their sum decides."""
    both = (forward + backward).elapsed
    share = forward.elapsed / max(forward.elapsed + backward.elapsed, 1e-30)
    return both * share, both * (1 - share)


def _links(cluster: Cluster, machine: Machine, training: Training) -> tuple[Link, Link]:
    """The link between data ranks, and the one from a stage to the next: stages are outermost, one device to one."""
    within = math.prod(machine.sizes)
    data, _ = cluster.link_for({"data": training.data, "stage": within})
    stage, _ = cluster.link_for({"stage": 2, "rest": training.data * within})
    return data, stage


def _parameter_bytes(stage: Sequence[tuple[Part, float]]) -> dict[int, float]:
    found: dict[int, float] = {}
    for part, share in stage:
        for item, count in part.parameters.items():
            found[item] = found.get(item, 0.0) + count * share * item
    return found


def _update_seconds(sizes: dict[int, float], machine: Machine, training: Training) -> float:
    """The norm of the gradients and the optimizer step, bound by the device's memory.

    The norm reads every gradient; the update reads the gradient, reads and writes each state and the parameter it
    keeps in float32, and writes the parameter.
    """
    traffic = 0.0
    for item, size in sizes.items():
        count = size / item
        states = optimizer_state_bytes(training.optimizer, 1, MASTER) + (MASTER if item < MASTER else 0)
        traffic += count * (2 * item + 2 * states + item)
    device = machine.device
    return traffic / (device.bandwidth * device.streaming)


def step_seconds(stages: Stages, microbatches: int) -> float:
    """Seconds of a step under 1F1B or GPipe, as a closed form.

    One microbatch goes through all stages, there and back; the slowest stage does the others meanwhile. (GPipe and
    1F1B take the same time; they differ in memory.)
    """
    turn = stages.forward + stages.backward
    through = float(turn.sum()) + 2 * stages.handed * (len(turn) - 1)
    slowest = float((turn + (2 * stages.handed if len(turn) > 1 else 0.0)).max())
    return through + (microbatches - 1) * slowest + stages.reduce + stages.update
