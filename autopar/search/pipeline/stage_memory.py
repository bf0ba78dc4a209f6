"""`StageMemory`: bytes that a pipeline stage holds, and the peaks of devices, by walking through their actions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from torch import fx

from autopar._torch_compat import storage_id
from autopar.costs.memory import optimizer_state_bytes
from autopar.ir.graph import values_of
from autopar.ir.ops.accumulate import accumulate
from autopar.ir.ops.collectives import c10d
from autopar.ir.plan import Plan
from autopar.memory.liveness import KINDS, read_by
from autopar.pipeline.schedules import Action, Order
from autopar.pipeline.stage_graphs import BACKWARD, FORWARD, INPUT, WEIGHT, StageGraph, StageGraphs
from autopar.rules.shapes.local_shapes import propagate

SHARED = ("buffers", "batch")
"""Categories that the stages of a device have in common."""


@dataclass(frozen=True)
class StageMemory:
    """What one stage holds, in bytes.

    Attributes:
        whole_step: through the whole step, by category.
        saved: by a microbatch, from its forward to its backward.
        saved_for_weights: by a microbatch, from the part of its backward for the input to that for the weights.
        transient: what each action allocates and frees, at most, on top of what is saved before it; a stage's last
            backward, with what is computed from its sums, is an action of its own, named by `last`.
    """

    whole_step: Mapping[str, float]
    saved: float
    saved_for_weights: float
    transient: Mapping[str, float]

    def change(self, kind: str) -> float:
        """Bytes of activations more, after an action."""
        if kind in (FORWARD, BACKWARD):
            return self.saved if kind == FORWARD else -self.saved
        return self.saved_for_weights - self.saved if kind == INPUT else -self.saved_for_weights


def last(kind: str) -> str:
    """What `StageMemory.transient` calls a stage's last action of a kind."""
    return f"last {kind}"


def memory_of_stages(cutting: StageGraphs, plan: Plan, split: bool) -> list[StageMemory]:
    """What each stage holds, whatever schedule its device follows.

    Args:
        cutting: of the rewritten program, in stages.
        plan: for the devices of a stage.
        split: whether the backward may be in two parts.
    """
    propagate(cutting.program, plan, everything=True)  # passes leave shapes right, but not which tensors share memory
    inputs = {storage_id(n.meta["val"]) for n in cutting.inputs}
    # Neither inputs nor sums over microbatches belong to a single microbatch.
    shared = inputs | {storage_id(n.meta["val"]) for n in cutting.order if n.target is accumulate}
    kinds = (FORWARD, BACKWARD, INPUT, WEIGHT) if split else (FORWARD, BACKWARD)
    return [
        StageMemory(
            _whole_step(cutting, stage, plan.optimizer, shared),
            _saved(cutting, stage, shared),
            _saved_for_weights(cutting, stage, shared) if split else 0.0,
            _transient(cutting, stage, kinds, shared),
        )
        for stage in range(cutting.stages)
    ]


def _transient(cutting: StageGraphs, stage: int, kinds: Iterable[str], shared: Set[int]) -> dict[str, float]:
    """What each kind of action allocates and frees, at most."""
    found = {kind: _largest(cutting, cutting.microbatch_graph(stage, kind), shared) for kind in kinds}
    # Gradients are counted for the whole step.
    counted = shared | {storage_id(v.meta["val"]) for o, v in cutting.described if o.kind == "gradient" and v}
    for kind in (BACKWARD, WEIGHT):
        if kind in found:
            found[last(kind)] = _largest(cutting, cutting.last_graph(stage, kind), counted)
    return found


def peaks(stages: Sequence[StageMemory], order: Order) -> list[dict[str, float]]:
    """Bytes by category, at the peak of each device.

    Categories are those of `autopar.memory.liveness`. A microbatch's activations are held from its forward to its
    backward, as many at a time as the schedule has in flight; of a split backward, the part for the weights holds what
    it takes.

    Args:
        stages: what each holds.
        order: what each device does.
    """
    return [_peak(stages, row) for row in order]


def _peak(stages: Sequence[StageMemory], row: Sequence[Action]) -> dict[str, float]:
    found: dict[str, float] = {}
    for stage in sorted({a.stage for a in row}):
        for category, size in stages[stage].whole_step.items():
            before = found.get(category, 0.0)
            found[category] = max(before, size) if category in SHARED else before + size
    most, activations, transient, saved = 0.0, 0.0, 0.0, 0.0
    ends = {action.stage: i for i, action in enumerate(row) if action.kind in (BACKWARD, WEIGHT)}
    for i, action in enumerate(row):
        kind = last(action.kind) if ends.get(action.stage) == i else action.kind
        now = stages[action.stage].transient[kind]
        if saved + now > most:
            most, activations, transient = saved + now, saved, now
        saved += stages[action.stage].change(action.kind)
    return {**found, "activations": activations, "transient": found["transient"] + transient}


def _whole_step(cutting: StageGraphs, stage: int, optimizer: str, shared: Set[int]) -> dict[str, float]:
    """Bytes that a stage holds through the whole step, by category.

    Args:
        cutting: of the rewritten program, in stages.
        stage: which.
        optimizer: whose state is counted.
        shared: storages that are not of one microbatch.
    """
    program = cutting.program
    found = dict.fromkeys(("parameters", "buffers", "batch", "optimizer", "gradients", "results"), 0.0)
    trained = {o.name for o, v in cutting.described if o.kind == "gradient" and v is not None}
    for node, spec in cutting.inputs.items():
        value = node.meta["val"]
        held = spec.kind != "parameter" or stage in cutting.holders(spec.name)
        if held or stage in cutting.parameter_stages.get(
            spec.name, ()
        ):  # a parameter of another stage is borrowed for the step
            times = program.part.count if spec.kind == "batch" and spec.name in program.part.rows else 1
            found[KINDS[spec.kind]] += float(value.nbytes * times)
        if spec.kind == "parameter" and held and spec.name in trained:
            found["optimizer"] += float(optimizer_state_bytes(optimizer, value.numel(), value.element_size()))
    found["transient"] = _bytes(cutting, cutting.hoisted_graph(stage).gives, shared)
    sums = {storage_id(n.meta["val"]) for n in cutting.order if n.target is accumulate}
    for node in cutting.order:
        if node.target is accumulate and cutting.stage(node) == stage:
            found["gradients"] += float(node.meta["val"].nbytes)
    for output, value in cutting.described:
        if output.kind == "gradient" and value is not None and stage in cutting.holders(output.name):
            # A gradient that is itself a sum over microbatches is counted above.
            found["gradients"] += 0.0 if storage_id(value.meta["val"]) in sums else float(value.meta["val"].nbytes)
        elif output.kind == "result" and value is not None and cutting.result_stage(output, value) in (None, stage):
            times = program.part.count if output.name in program.part.results else 1
            found["results"] += float(value.meta["val"].nbytes * times)
    return found


def _saved(cutting: StageGraphs, stage: int, shared: Set[int]) -> float:
    """Bytes that a microbatch saves on a stage for its backward pass."""
    needed = {*cutting.microbatch_graph(stage, BACKWARD).takes, *cutting.returned(stage - 1)}
    there = {*cutting.microbatch_graph(stage, FORWARD).gives, *cutting.received(stage)}
    return _bytes(cutting, needed & there, shared)


def _saved_for_weights(cutting: StageGraphs, stage: int, shared: Set[int]) -> float:
    """Bytes that a microbatch saves on a stage for the part of its backward pass for the weights."""
    there = {*cutting.microbatch_graph(stage, FORWARD).gives, *cutting.microbatch_graph(stage, INPUT).gives}
    there |= {*cutting.received(stage), *cutting.returned(stage)}
    return _bytes(cutting, {*cutting.microbatch_graph(stage, WEIGHT).takes} & there, shared)


def _bytes(cutting: StageGraphs, names: Iterable[str], shared: Set[int]) -> float:
    """Bytes of the storages of some values, each once, without those that are not of one microbatch."""
    tensors = [v for name in names for v in values_of(cutting.node(name)) if v is not None]
    sizes = {storage_id(v): v.untyped_storage().nbytes() for v in tensors}
    return float(sum(size for storage, size in sizes.items() if storage not in shared))


def _largest(cutting: StageGraphs, piece: StageGraph, shared: Set[int]) -> float:
    """The most bytes that the values which a stage graph itself computes have at a time."""
    received = {
        storage_id(n.meta["val"]): storage_id(n.all_input_nodes[0].meta["val"])
        for n in piece.nodes if n.target is c10d.wait_tensor.default
    }  # fmt: skip

    def storages(nodes: Iterable[fx.Node]) -> dict[int, int]:
        """Bytes of each storage; a wait returns what its collective has received."""
        sizes = ((storage_id(v), v.untyped_storage().nbytes()) for n in nodes for v in values_of(n) if v is not None)
        return {received.get(storage, storage): size for storage, size in sizes}

    outputs, inputs = (storages(map(cutting.node, names)) for names in (piece.gives, piece.takes))
    elsewhere = {*inputs, *(received.get(storage, storage) for storage in shared)}
    until: dict[int, fx.Node] = {}
    for node in piece.nodes:
        until.update(dict.fromkeys(storages([node, *read_by(node)]), node))
    live: dict[int, int] = {}
    most = 0
    for node in piece.nodes:
        live |= {s: size for s, size in storages([node]).items() if s not in elsewhere}
        most = max(most, sum(live.values()))
        live = {s: size for s, size in live.items() if s in outputs or until.get(s, node) is not node}
    return float(most)
