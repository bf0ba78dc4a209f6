"""What the devices of a pipeline hold at most, by walking through their actions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from autopar._torch_compat import storage_id
from autopar.costs.memory import optimizer_state_bytes
from autopar.ir.graph import values_of
from autopar.ir.ops.accumulate import accumulate
from autopar.ir.plan import Plan
from autopar.memory.liveness import KINDS
from autopar.pipeline.schedules import Action, Order
from autopar.pipeline.stage_graphs import BACKWARD, FORWARD, INPUT, WEIGHT, StageGraph, StageGraphs
from autopar.rules.shapes.local_shapes import propagate

SHARED = ("buffers", "batch")
"""Categories that the stages of a device have in common."""


@dataclass(frozen=True)
class StageMemory:
    """What one stage holds, in bytes.

    Attributes:
        steady: through the whole step, by category.
        saved: by a microbatch, from its forward to its backward.
        for_weights: by a microbatch, from the part of its backward for the input to that for the weights.
        transient: what each action makes and gives back, at most, on top of what is saved before it.
    """

    steady: Mapping[str, float]
    saved: float
    for_weights: float
    transient: Mapping[str, float]

    def change(self, kind: str) -> float:
        """Bytes of activations more, after an action."""
        if kind in (FORWARD, BACKWARD):
            return self.saved if kind == FORWARD else -self.saved
        return self.for_weights - self.saved if kind == INPUT else -self.for_weights


def held_by(cutting: StageGraphs, plan: Plan, split: bool) -> list[StageMemory]:
    """What each stage holds, whatever schedule its device follows.

    Args:
        cutting: of the rewritten program, in stages.
        plan: for the devices of a stage.
        split: whether the backward may be in two parts.
    """
    propagate(cutting.program, plan, everything=True)
    stages = [_Stage(cutting, stage, plan.optimizer) for stage in range(cutting.stages)]
    kinds = (FORWARD, BACKWARD, INPUT, WEIGHT) if split else (FORWARD, BACKWARD)
    return [
        StageMemory(
            s.steady(), s.saved(), s.for_weights() if split else 0.0, {kind: s.transient(kind) for kind in kinds}
        )
        for s in stages
    ]


def peaks(stages: Sequence[StageMemory], order: Order) -> list[dict[str, float]]:
    """Bytes by category, at the moment when each device holds the most.

    Categories are those of `autopar.memory.liveness`. A microbatch's activations are held from its forward to its
    backward, as many at a time as the schedule has under way; of a split backward, the part for the weights holds what
    it takes.

    Args:
        stages: what each holds.
        order: what each device does.
    """
    return [_peak(stages, row) for row in order]


def _peak(stages: Sequence[StageMemory], row: Sequence[Action]) -> dict[str, float]:
    steady: dict[str, float] = {}
    for stage in sorted({a.stage for a in row}):
        for category, size in stages[stage].steady.items():
            before = steady.get(category, 0.0)
            steady[category] = max(before, size) if category in SHARED else before + size
    most, activations, transient, held = 0.0, 0.0, 0.0, 0.0
    for action in row:
        now = stages[action.stage].transient[action.kind]
        if held + now > most:
            most, activations, transient = held + now, held, now
        held += stages[action.stage].change(action.kind)
    return {**steady, "activations": activations, "transient": steady["transient"] + transient}


@dataclass
class _Stage:
    """What one stage holds, from its graphs."""

    cutting: StageGraphs
    stage: int
    optimizer: str

    def steady(self) -> dict[str, float]:
        """Held through the whole step."""
        cutting, program = self.cutting, self.cutting.program
        found = dict.fromkeys(("parameters", "buffers", "batch", "optimizer", "gradients", "results"), 0.0)
        trained = {o.name for o, v in cutting.described if o.kind == "gradient" and v is not None}
        for node, spec in cutting.inputs.items():
            value = node.meta["val"]
            held = spec.kind != "parameter" or self.stage in cutting.holders(spec.name)
            if held or self.stage in cutting.parameter_stages.get(spec.name, ()):
                times = program.part.count if spec.kind == "batch" and spec.name in program.part.rows else 1
                found[KINDS[spec.kind]] += float(value.nbytes * times)
            if spec.kind == "parameter" and held and spec.name in trained:
                state = optimizer_state_bytes(self.optimizer, value.numel(), value.element_size())
                found["optimizer"] += float(state)
        found["transient"] = self._bytes(cutting.hoisted_graph(self.stage).gives)
        sums = {storage_id(n.meta["val"]) for n in cutting.order if n.target is accumulate}
        for node in cutting.order:
            if node.target is accumulate and cutting.stage(node) == self.stage:
                found["gradients"] += float(node.meta["val"].nbytes)
        for output, made in cutting.described:
            if output.kind == "gradient" and made is not None and self.stage in cutting.holders(output.name):
                found["gradients"] += 0.0 if storage_id(made.meta["val"]) in sums else float(made.meta["val"].nbytes)
            elif (
                output.kind == "result"
                and made is not None
                and cutting.result_stage(output, made) in (None, self.stage)
            ):
                rows = program.part.count if output.name in program.part.results else 1
                found["results"] += float(made.meta["val"].nbytes * rows)
        return found

    def transient(self, kind: str) -> float:
        """See `StageMemory`."""
        return self._largest(self.cutting.microbatch_graph(self.stage, kind))

    def saved(self) -> float:
        """See `StageMemory`."""
        cutting = self.cutting
        names = {*cutting.microbatch_graph(self.stage, BACKWARD).takes, *cutting.returned(self.stage - 1)}
        made = {*cutting.microbatch_graph(self.stage, FORWARD).gives, *cutting.received(self.stage)}
        return self._bytes(names & made)

    def for_weights(self) -> float:
        """See `StageMemory`."""
        made = {
            *self.cutting.microbatch_graph(self.stage, FORWARD).gives,
            *self.cutting.microbatch_graph(self.stage, INPUT).gives,
        }
        made |= {*self.cutting.received(self.stage), *self.cutting.returned(self.stage)}
        return self._bytes({*self.cutting.microbatch_graph(self.stage, WEIGHT).takes} & made)

    @cached_property
    def _fixed(self) -> set[int]:
        """Storages that are not of one microbatch."""
        inputs = {storage_id(n.meta["val"]) for n in self.cutting.inputs}
        return inputs | {storage_id(n.meta["val"]) for n in self.cutting.order if n.target is accumulate}

    def _bytes(self, names: Iterable[str]) -> float:
        tensors = [v for name in names for v in values_of(self.cutting.node(name)) if v is not None]
        sizes = {storage_id(v): v.untyped_storage().nbytes() for v in tensors}
        return float(sum(size for storage, size in sizes.items() if storage not in self._fixed))

    def _largest(self, piece: StageGraph) -> float:
        """The most that a piece's own values take at a time."""
        given = {storage_id(v) for name in piece.gives for v in values_of(self.cutting.node(name)) if v is not None}
        taken = {storage_id(v) for name in piece.takes for v in values_of(self.cutting.node(name)) if v is not None}
        last: dict[int, fx.Node] = {}
        for node in piece.nodes:
            for value in _values(node, node.all_input_nodes):
                last[storage_id(value)] = node
        live: dict[int, int] = {}
        most = 0
        for node in piece.nodes:
            for value in _values(node, []):
                if storage_id(value) not in taken | self._fixed:
                    live[storage_id(value)] = value.untyped_storage().nbytes()
            most = max(most, sum(live.values()))
            live = {s: n for s, n in live.items() if s in given or last.get(s, node) is not node}
        return float(most)


def _values(node: fx.Node, arguments: Iterable[fx.Node]) -> list[torch.Tensor]:
    found = [v for n in (node, *arguments) for v in values_of(n)]
    return [v for v in found if isinstance(v, torch.Tensor)]
