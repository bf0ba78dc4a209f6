"""`predict_hybrid`: a hand-made plan of data, tensor and pipeline ranks, costed and simulated before it can be run.

Of the model, one microbatch is captured and laid out over the tensor axis by a recipe, ``megatron`` by default. Its
parts become the stages of a pipeline (`autopar.explain.hybrid.training_step`), whose schedule the event simulator runs.
Data ranks sum gradients once a step, after the last microbatch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar.capture import Batch, LossFunction
from autopar.capture.fewer_layers import Shortened, shorten
from autopar.compiler import default_memory, for_devices, program_of, solve
from autopar.costs.budget import naming_default
from autopar.costs.cluster import Cluster
from autopar.costs.memory import format_bytes, optimizer_state_bytes, parse_bytes
from autopar.errors import CaptureError, InfeasibleError
from autopar.explain.hybrid.layer_profile import AFTER, BEFORE, Part, step_of
from autopar.explain.hybrid.training_step import MASTER, Training, run_parts, simulated, stage_parts, stages_of
from autopar.ir.precision import Precision
from autopar.ir.program import Program
from autopar.ir.signature import pytree
from autopar.ir.signature.outputs import Loss
from autopar.search.formulation.recipes import DATA_NAMES, TENSOR_NAMES
from autopar.search.options import Progress, Search
from autopar.sharding.assignment import machine_of
from autopar.sharding.dims import analyze
from autopar.sharding.redistribute.moves import Machine
from autopar.simulate import order

logger = logging.getLogger("autopar")

STAGE_NAMES = ("stage", "pp", "pipeline")

RECIPES = ("megatron", "megatron-sequence")


@dataclass(frozen=True)
class Hybrid:
    """What one training step of a hybrid plan is predicted to take.

    Attributes:
        step_seconds: of everything.
        pipeline_seconds: of all microbatches on all stages.
        reduce_seconds: of the gradient reduction over the data ranks.
        update_seconds: of the optimizer, with the norm of the gradients.
        bubble: share of the pipeline's time in which a stage idles, on average.
        microbatches: of one data rank.
        forward_seconds: of a microbatch on each stage.
        backward_seconds: of a microbatch on each stage, recomputation included.
        memory_bytes: of the stage that needs most, by category.
    """

    step_seconds: float
    pipeline_seconds: float
    reduce_seconds: float
    update_seconds: float
    bubble: float
    microbatches: int
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    memory_bytes: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def predict_hybrid(
    model: nn.Module,
    batch: Batch,
    *,
    cluster: Cluster | str,
    axes: Mapping[str, int],
    microbatch: int | None = None,
    schedule: str = "1f1b",
    recompute: str = "none",
    virtual: int = 1,
    recipe: str = "megatron",
    memory: str | float | None = None,
    loss_fn: LossFunction | None = None,
    loss: Loss = None,
    optimizer: str = "adamw",
    precision: Precision | None = None,
    compile: bool = False,
    time_limit: float = 60.0,
    progress: Progress | None = None,
) -> Hybrid:
    """Predict a training step.

    Args:
        model: real, fake or on the meta device, with numbered blocks.
        batch: example of the global batch; samples lie along the first dim of its first tensor.
        cluster: a `Cluster`, a preset's name or a TOML file.
        axes: sizes by name: data ranks (``dp``), stages (``pp``) and tensor ranks (``tp``); the tensor axis joins
            neighbors, and stages are furthest apart.
        microbatch: samples of a microbatch; default: all of a data rank's.
        schedule: one of `autopar.simulate.SCHEDULES`.
        recompute: ``"none"``, ``"selective"`` or ``"full"``, see `autopar.explain.hybrid.training_step.Training`.
        virtual: runs of blocks on each stage, for ``schedule="interleaved"``.
        recipe: of the tensor axis, one of `RECIPES`.
        memory: budget per device; default: the device's memory less what `autopar.costs.budget` sets aside.
        loss_fn: ``loss_fn(output, batch)`` for a model that does not return its loss.
        loss: which scalar of the output is the loss.
        optimizer: whose state is stored and updated.
        precision: as for `autopar.plan`.
        compile: as for `autopar.plan`.
        time_limit: seconds for the solver, which decides what the recipe leaves open.
        progress: called with ``(phase, incumbent, bound)``.

    Raises:
        ValueError: an axis has no known name, or sizes do not divide; says which and what would.
        InfeasibleError: the fullest stage needs more than the budget.
    """
    sizes = _axis_sizes(axes)
    machine_cluster = Cluster.resolve(cluster)
    if machine_cluster.groups:
        raise ValueError(
            f"cluster {machine_cluster.name!r} has groups of devices, and a hand-made 3D plan is for devices of one "
            "kind: search one with --stages, or name another cluster"
        )
    own, microbatches = _microbatch(batch, sizes["data"], microbatch)
    training = Training(None, sizes["stage"], microbatches, sizes["data"], recompute, optimizer, virtual)
    order(schedule, training.stages, microbatches, virtual)  # raises before the model is captured
    program, layers = _captured(model, own, loss_fn, loss, precision, compile)
    training = replace(training, layers=layers)
    # On one tensor rank there is nothing for a recipe to lay out.
    search = Search(recipe=recipe if sizes["tensor"] > 1 else None, padding=False, time_limit=time_limit)
    tensor = {"tensor": sizes["tensor"]}
    plan = solve(program, tensor, machine_cluster, optimizer=optimizer, search=search, progress=progress)
    program = for_devices(program, machine_cluster.device, tensor, deterministic=False)
    found = _simulated_step(
        step_of(program, analyze(program), plan), machine_cluster, machine_of(plan), training, schedule
    )
    budget = default_memory(machine_cluster, axes) if memory is None else float(parse_bytes(memory))
    with naming_default(budget):
        _check_budget(found.memory_bytes, budget, recompute)
    return found


def _simulated_step(
    parts: tuple[Part, ...], cluster: Cluster, machine: Machine, training: Training, schedule: str
) -> Hybrid:
    """The step of a training, with the memory of its fullest stage.

    Args:
        parts: of one microbatch.
        cluster: has the links between stages and data ranks.
        machine: the axes within a stage.
        training: how the step is spread.
        schedule: of the microbatches.
    """
    stages = stages_of(parts, cluster, machine, training)
    timeline = simulated(stages, training.microbatches, schedule, _saved_bytes(parts, training), training.virtual)
    activations = [sum(timeline.peak_memory(stage).values()) for stage in range(training.stages)]
    by_stage = [{**_state(parts, training, stage), "activations": size} for stage, size in enumerate(activations)]
    return Hybrid(
        timeline.step_seconds + stages.reduce + stages.update,
        timeline.step_seconds,
        stages.reduce,
        stages.update,
        timeline.mean_bubble,
        training.microbatches,
        tuple(stages.forward.tolist()),
        tuple(stages.backward.tolist()),
        max(by_stage, key=lambda memory: sum(memory.values())),
    )


def _captured(
    model: nn.Module, batch: Batch, loss_fn: LossFunction | None, loss: Loss, precision: Precision | None, fused: bool
) -> tuple[Program, int | None]:
    """The program of two layers and how many there are, or that of the whole model and None."""
    # Two layers tell all: the second is like every further one.
    short = shorten(model)
    if short.lead or short.period > 1:
        short = Shortened(model, None, f"the blocks of {short.path} are of several kinds")

    def made(model: nn.Module) -> Program:
        return program_of(model, batch, loss_fn=loss_fn, loss=loss, precision=precision, fused=fused)

    if short.layers is None:
        logger.info("captured whole, layer by layer: %s", short.reason)
    try:
        return made(short.model), short.layers
    except CaptureError as e:
        if short.layers is None:
            raise
        logger.info("captured whole, layer by layer: the capture of two layers fails: %s", e)
    return made(model), None


def _check_budget(needed: Mapping[str, float], budget: float, recompute: str) -> None:
    total = sum(needed.values())
    if total > budget:
        # The remedy depends on what takes most: states need more ranks, activations may be recomputed.
        largest = max(needed, key=lambda name: needed[name])
        remedy = "take smaller microbatches or more stages or tensor ranks"
        if largest == "activations" and recompute != "full":
            remedy = 'recompute="full", or smaller microbatches'
        raise InfeasibleError(
            f"the fullest stage needs {format_bytes(total)} per device, {format_bytes(total - budget)} more than the "
            f"budget of {format_bytes(budget)}; most of it is {largest} ({format_bytes(needed[largest])}): {remedy}",
            needed=total,
            budget=budget,
        )


def _axis_sizes(axes: Mapping[str, int]) -> dict[str, int]:
    found = {"stage": 1, "data": 1, "tensor": 1}
    for name, size in axes.items():
        roles = {"stage": STAGE_NAMES, "data": DATA_NAMES, "tensor": TENSOR_NAMES}
        role = next((r for r, names in roles.items() if name in names), None)
        if role is None:
            known = ", ".join(n for names in roles.values() for n in names)
            raise ValueError(f"axis {name!r} of a hybrid plan has no known role; name axes {known}")
        # Several axes of one role, such as nodes and racks of data ranks, count as one.
        found[role] *= size
    return found


def _microbatch(batch: Batch, data: int, size: int | None) -> tuple[Batch, int]:
    """One microbatch, without values, and how many a data rank has."""
    # The first tensor tells the samples; others may be masks or scalars of the whole batch.
    tensors, skeleton = pytree.flatten(batch, "batch", shared=True)
    if not tensors or not tensors[0].ndim:
        raise ValueError(
            "the batch does not begin with a tensor of samples; put one along whose first dim they lie first"
        )
    samples = int(tensors[0].shape[0])
    if samples % data:
        raise ValueError(
            f"{samples} samples do not divide over {data} data ranks; take a batch of a multiple of {data}"
        )
    size = samples // data if size is None else size
    if size < 1 or samples // data % size:
        raise ValueError(
            f"microbatches of {size} do not divide the {samples // data} samples of a data rank; take a divisor"
        )
    own = [
        torch.empty((size, *t.shape[1:]), dtype=t.dtype, device="meta") if t.ndim and t.shape[0] == samples else t
        for t in tensors
    ]
    return pytree.unflatten(skeleton, own), samples // data // size


def _saved_bytes(parts: tuple[Part, ...], training: Training) -> list[float]:
    """Bytes saved of a microbatch in each run of blocks."""
    found = []
    for run in range(training.runs):
        members = run_parts(parts, training, run)
        found.append(sum(count * (part.saved - _recomputed_bytes(part, training)) for part, count in members))
    return found


def _recomputed_bytes(part: Part, training: Training) -> float:
    """Bytes that a part recomputes before its backward instead of saving; full recomputation saves a block's input."""
    # Only blocks are checkpointed, not what comes before and after them.
    if part.name in (BEFORE, AFTER):
        return 0.0
    return {"none": 0.0, "selective": part.recomputed_bytes, "full": part.saved - part.output_bytes}[training.recompute]


def _state(parts: tuple[Part, ...], training: Training, stage: int) -> dict[str, float]:
    """Bytes of parameters, gradients and optimizer state of a stage, and of the block that is being recomputed."""
    memory = {"parameters": 0.0, "gradients": 0.0, "optimizer": 0.0, "recomputed": 0.0}
    for part, count in stage_parts(parts, training, stage):
        for item, elements in part.parameters.items():
            # Mixed precision: the optimizer keeps a float32 copy of narrower parameters.
            master = MASTER if item < MASTER else 0
            memory["parameters"] += count * elements * item
            memory["gradients"] += count * elements * item
            memory["optimizer"] += count * elements * (optimizer_state_bytes(training.optimizer, 1, MASTER) + master)
        # Blocks are recomputed one after the other: the largest is there at a time.
        memory["recomputed"] = max(memory["recomputed"], _recomputed_bytes(part, training))
    return memory
