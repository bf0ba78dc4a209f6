"""A whole training step: microbatches through pipeline stages, gradients summed over data ranks, the optimizer.

Built from the parts of one microbatch on one stage's devices (`autopar.explain.hybrid.layer_profile`). Pipelines are
predicted here, with the times of their stages; what a schedule makes of them follows from its order of actions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.costs.cluster import Cluster, Link
from autopar.costs.collectives import collective_seconds
from autopar.costs.memory import optimizer_state_bytes
from autopar.explain.hybrid.layer_profile import AFTER, BEFORE, Part, Spent, spend
from autopar.sharding.redistribute.moves import Machine
from autopar.simulate import Timeline, order, pipeline, simulate

MASTER = 4
"""Bytes of a float32 element: what an optimizer keeps and computes in where parameters are narrower."""

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Training:
    """How a training step is spread over devices, besides the layouts within a stage.

    Attributes:
        layers: blocks of the whole model; None: as many as were captured.
        stages: of the pipeline: its devices, or groups of them.
        virtual: runs of consecutive blocks that each stage has; with several, every ``stages``-th run.
        microbatches: of one data rank, in one step.
        data: data ranks, which sum their gradients.
        recompute: ``"none"``; ``"selective"``: values of a block that have a factor twice, such as attention's scores,
            are recomputed; ``"full"``: only a block's input is saved, and its forward runs once more.
        optimizer: whose state is stored and updated.

    Raises:
        ValueError: a number is not positive, or there is no such recomputation.
    """

    layers: int | None = None
    stages: int = 1
    microbatches: int = 1
    data: int = 1
    recompute: str = "none"
    optimizer: str = "adamw"
    virtual: int = 1

    @property
    def runs(self) -> int:
        """How many runs of consecutive blocks there are; run ``i`` is on stage ``i % stages``."""
        return self.stages * self.virtual

    def __post_init__(self) -> None:
        """Raise for values that no training has."""
        for name in ("stages", "microbatches", "data", "virtual"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive integer, got {getattr(self, name)!r}")
        if self.recompute not in RECOMPUTE:
            raise ValueError(f'recompute={self.recompute!r}: there are "none", "selective" and "full"')


@dataclass(frozen=True)
class Stages:
    """Seconds of one microbatch in each run of blocks, and of what follows the last microbatch.

    Attributes:
        forward: of each run; a stage has one, but for `Training.virtual`.
        backward: of each run, recomputation included.
        send: seconds to send a stage's output to the next one.
        reduce: of the stage whose gradients take longest to sum over the data ranks.
        update: of the stage whose optimizer step takes longest, with the norm of the gradients.
    """

    forward: NDArray[np.float64]
    backward: NDArray[np.float64]
    send: float
    reduce: float
    update: float


def stages_of(
    parts: Sequence[Part],
    cluster: Cluster,
    machine: Machine,
    training: Training,
    spent: Mapping[str, tuple[Spent, Spent]] | None = None,
) -> Stages:
    """The stages of a training step.

    Args:
        parts: of one microbatch.
        cluster: has the links between stages and data ranks.
        machine: the axes within a stage.
        training: how the step is spread.
        spent: what forward and backward of each part cost, by its name, where that is known already.

    Raises:
        ValueError: the stages do not divide the blocks.
    """
    # The start of sums: `sum` would begin with the number 0.
    none = Spent(0.0, 0.0, (0.0,) * len(machine.sizes))
    if spent is None:
        spent = {p.name: (spend(p.forward, machine), spend(p.backward, machine)) for p in parts}
    blocks = [p for p in parts if p.name not in (BEFORE, AFTER)]
    if training.recompute == "full":  # a block's forward runs once more before its backward
        spent = {**spent, **{p.name: (spent[p.name][0], sum(spent[p.name][::-1], none)) for p in blocks}}
    # Only what has a factor twice: its kernels are a small part of the forward pass.
    if training.recompute == "selective":
        costs = {p.name: spend(p.recompute, machine) for p in blocks}
        spent = {**spent, **{n: (spent[n][0], spent[n][1] + cost) for n, cost in costs.items()}}
    found = []
    for run in range(training.runs):
        members = run_parts(parts, training, run)
        forward, backward = (sum((spent[p.name][i].scaled(count) for p, count in members), none) for i in (0, 1))
        # By run, not by kernel: the host launches ahead, and only its sum can be what is waited for.
        found.append(_elapsed(forward, backward))
    sizes = [_parameter_bytes(stage_parts(parts, training, stage)) for stage in range(training.stages)]
    times = np.array(found)
    data, after = _links(cluster, machine, training)
    send = _send_seconds(parts[-2], after, machine) if training.stages > 1 else 0.0
    # The step ends when the last stage does: each maximum is over the stages.
    reduce = max(float(collective_seconds("all_reduce", sum(s.values()), training.data, data)) for s in sizes)
    update = max(_update_seconds(s, machine, training) for s in sizes)
    return Stages(times[:, 0], times[:, 1], send, reduce, update)


def stage_parts(parts: Sequence[Part], training: Training, stage: int) -> list[tuple[Part, int]]:
    """The parts of a stage, in all of its runs, and how often each run has them."""
    return [own for run in range(stage, training.runs, training.stages) for own in run_parts(parts, training, run)]


def run_parts(parts: Sequence[Part], training: Training, run: int) -> list[tuple[Part, int]]:
    """The parts of a run of blocks, and how often it has each. The last captured block stands for those that were not.

    Raises:
        ValueError: the stages do not divide the blocks.
    """
    blocks = [p for p in parts if p.name not in (BEFORE, AFTER)]
    layers = training.layers or len(blocks)
    if not blocks or layers % training.runs:
        raise ValueError(
            f"{training.runs} stages do not divide {layers} repeated blocks; give another number of stages"
        )
    share = layers // training.runs
    # A captured block beyond the last counts as often as there are layers like it.
    numbers = Counter(min(i, len(blocks) - 1) for i in range(run * share, (run + 1) * share))
    # The first run has the embeddings, the last one the loss.
    ends = [p for p in parts if (p.name, run) in ((BEFORE, 0), (AFTER, training.runs - 1))]
    return [*((p, 1) for p in ends), *((blocks[i], count) for i, count in sorted(numbers.items()))]


def _elapsed(forward: Spent, backward: Spent) -> tuple[float, float]:
    """Seconds of both passes. The host may gain time in one pass and lose it in the other: their sum decides."""
    both = (forward + backward).elapsed
    share = forward.elapsed / max(forward.elapsed + backward.elapsed, 1e-30)
    return both * share, both * (1 - share)


def _links(cluster: Cluster, machine: Machine, training: Training) -> tuple[Link, Link]:
    """The link between data ranks, and the one from a stage to the next: stages are outermost, one device to one."""
    # Extents decide the links: what lies inside an axis pushes its devices apart.
    within = math.prod(machine.sizes)
    _, data, _ = cluster.link_for({"stage": training.stages, "data": training.data, "within": within})
    stage, _ = cluster.link_for({"stage": 2, "rest": training.data * within})
    return data, stage


def _send_seconds(part: Part, after: Link, machine: Machine) -> float:
    """Seconds to send a stage's output to the next one: whole, or in parts that are gathered on an axis.

    Devices with equal outputs send a part each, if that is faster (D. Narayanan et al., "Efficient Large-Scale Language
    Model Training on GPU Clusters Using Megatron-LM", 2021, section 4.1).
    """
    found = [part.output_bytes / after.bandwidth]
    for replicated, ranks, link in zip(part.replicated_bytes, machine.sizes, machine.links, strict=False):
        sent = part.output_bytes - replicated + replicated / ranks
        found.append(sent / after.bandwidth + float(collective_seconds("all_gather", replicated, ranks, link)))
    return min(found) + after.latency


def _parameter_bytes(stage: Sequence[tuple[Part, int]]) -> dict[int, float]:
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
    """Seconds of a step under 1F1B, as a closed form: a bound, reached by equal stages and by a slower last one.

    One microbatch goes through all stages, forward and backward, while the slowest stage computes the others. Sends
    are exposed once in each direction for every microbatch that fills the pipeline, and then once for every round of
    as many microbatches as there are stages: a stage waits for the microbatch that it sent a round ago.
    """
    turn = stages.forward + stages.backward
    # Forward and backward both send: twice.
    exposed = 2 * stages.send * (len(turn) - 1) * (1 + (microbatches - 1) / len(turn))
    computed = float(turn.sum()) + (microbatches - 1) * float(turn.max())
    return computed + exposed + stages.reduce + stages.update


def simulated(
    stages: Stages, microbatches: int, schedule: str = "1f1b", saved: ArrayLike = 0.0, virtual: int = 1
) -> Timeline:
    """The microbatches of a step on their stages, by the event simulator; without reduction and update.

    Args:
        stages: seconds of each.
        microbatches: of one data rank.
        schedule: one of `autopar.simulate.SCHEDULES`.
        saved: bytes saved of a microbatch in a run of blocks until its backward; a number, or one for each run.
        virtual: runs of each stage.
    """
    actions = order(schedule, len(stages.forward) // virtual, microbatches, virtual)
    # The part for the weights is not known apart; schedules that split the backward take half of it.
    halves = stages.backward / 2
    return simulate(pipeline(actions, stages.forward, halves, halves, stages.send, saved=saved))


def simulated_seconds(stages: Stages, microbatches: int, schedule: str = "1f1b") -> float:
    """Seconds of a step under a schedule, reduction and update included."""
    return simulated(stages, microbatches, schedule).step_seconds + stages.reduce + stages.update
