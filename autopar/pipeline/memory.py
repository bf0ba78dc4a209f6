"""What the devices of a pipeline hold at most, by walking through their actions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from autopar._torch_compat import storage_id
from autopar.accumulate import accumulate
from autopar.cost.memory import optimizer_state_bytes
from autopar.liveness import KINDS
from autopar.pipeline.pieces import BACKWARD, FORWARD, INPUT, WEIGHT, Cutting, Piece
from autopar.pipeline.schedules import Order
from autopar.plan import Plan
from autopar.program import values_of
from autopar.propagate import propagate

SHARED = ("buffers", "batch")
"""Categories that the stages of a device have in common."""


def pipeline_peaks(cutting: Cutting, order: Order, plan: Plan) -> list[dict[str, float]]:
    """Bytes by category, at the moment when each device holds the most.

    Categories are those of `autopar.liveness`. A microbatch's activations are held from its forward to its backward, as
    many at a time as the schedule has under way; of a split backward, the part for the weights holds what it takes.

    Args:
        cutting: of the rewritten program, in stages.
        order: what each device does.
        plan: for the devices of a stage.
    """
    propagate(cutting.program, plan, everything=True)
    stages = [_Stage(cutting, stage, plan.optimizer) for stage in range(cutting.stages)]
    found = []
    for row in order:
        own = [stages[s] for s in sorted({a.stage for a in row})]
        steady: dict[str, float] = {}
        for stage in own:
            for category, size in stage.steady.items():
                before = steady.get(category, 0.0)
                steady[category] = max(before, size) if category in SHARED else before + size
        peak = {**steady, "activations": 0.0}
        held = 0.0
        for action in row:
            stage = stages[action.stage]
            moment = {**steady, "activations": held, "transient": steady["transient"] + stage.transient(action.kind)}
            held += stage.change(action.kind)
            peak = max(peak, moment, key=lambda m: sum(m.values()))
        found.append(peak)
    return found


@dataclass
class _Stage:
    """What one stage holds."""

    cutting: Cutting
    stage: int
    optimizer: str

    @cached_property
    def steady(self) -> dict[str, float]:
        """Held through the whole step."""
        cutting, program = self.cutting, self.cutting.program
        found = dict.fromkeys(("parameters", "buffers", "batch", "optimizer", "gradients", "results"), 0.0)
        trained = {o.name for o, v in cutting.described if o.kind == "gradient" and v is not None}
        for node, spec in cutting.inputs.items():
            value = node.meta["val"]
            held = spec.kind != "parameter" or self.stage in cutting.holders(spec.name)
            if held or self.stage in cutting.owners.get(spec.name, ()):
                times = program.part.count if spec.kind == "batch" and spec.name in program.part.rows else 1
                found[KINDS[spec.kind]] += float(value.nbytes * times)
            if spec.kind == "parameter" and held and spec.name in trained:
                state = optimizer_state_bytes(self.optimizer, value.numel(), value.element_size())
                found["optimizer"] += float(state)
        found["transient"] = self._bytes(cutting.first(self.stage).gives)
        sums = {storage_id(n.meta["val"]) for n in cutting.order if n.target is accumulate}
        for node in cutting.order:
            if node.target is accumulate and cutting.stage(node) == self.stage:
                found["gradients"] += float(node.meta["val"].nbytes)
        for output, made in cutting.described:
            if output.kind == "gradient" and made is not None and self.stage in cutting.holders(output.name):
                found["gradients"] += 0.0 if storage_id(made.meta["val"]) in sums else float(made.meta["val"].nbytes)
            elif output.kind == "result" and made is not None and cutting.home(output, made) in (None, self.stage):
                rows = program.part.count if output.name in program.part.results else 1
                found["results"] += float(made.meta["val"].nbytes * rows)
        return found

    def change(self, kind: str) -> float:
        """Bytes of activations more, after an action."""
        if kind == FORWARD:
            return self._saved
        if kind == BACKWARD:
            return -self._saved
        return self._for_weights - self._saved if kind == INPUT else -self._for_weights

    def transient(self, kind: str) -> float:
        """Bytes that an action makes and gives back, at most, on top of what is saved before it."""
        return self._transients[kind] if kind in self._transients else 0.0

    @cached_property
    def _transients(self) -> dict[str, float]:
        return {k: self._largest(self.cutting.piece(self.stage, k)) for k in (FORWARD, BACKWARD, INPUT, WEIGHT)}

    @cached_property
    def _saved(self) -> float:
        cutting = self.cutting
        names = {*cutting.piece(self.stage, BACKWARD).takes, *cutting.returned(self.stage - 1)}
        made = {*cutting.piece(self.stage, FORWARD).gives, *cutting.received(self.stage)}
        return self._bytes(names & made)

    @cached_property
    def _for_weights(self) -> float:
        made = {*self.cutting.piece(self.stage, FORWARD).gives, *self.cutting.piece(self.stage, INPUT).gives}
        made |= {*self.cutting.received(self.stage), *self.cutting.returned(self.stage)}
        return self._bytes({*self.cutting.piece(self.stage, WEIGHT).takes} & made)

    @cached_property
    def _fixed(self) -> set[int]:
        """Storages that are not of one microbatch."""
        inputs = {storage_id(n.meta["val"]) for n in self.cutting.inputs}
        return inputs | {storage_id(n.meta["val"]) for n in self.cutting.order if n.target is accumulate}

    def _bytes(self, names: Iterable[str]) -> float:
        tensors = [v for name in names for v in values_of(self.cutting.node(name)) if v is not None]
        sizes = {storage_id(v): v.untyped_storage().nbytes() for v in tensors}
        return float(sum(size for storage, size in sizes.items() if storage not in self._fixed))

    def _largest(self, piece: Piece) -> float:
        """The most that a piece's own values take at a time."""
        given = {storage_id(v) for name in piece.gives for v in values_of(self.cutting.node(name)) if v is not None}
        taken = {storage_id(v) for name in piece.takes for v in values_of(self.cutting.node(name)) if v is not None}
        nodes = [self.cutting.node(n.name) for n in piece.graph.graph.nodes if n.op == "call_function"]
        last: dict[int, fx.Node] = {}
        for node in nodes:
            for value in _values(node, node.all_input_nodes):
                last[storage_id(value)] = node
        live: dict[int, int] = {}
        most = 0
        for node in nodes:
            for value in _values(node, []):
                if storage_id(value) not in taken | self._fixed:
                    live[storage_id(value)] = value.untyped_storage().nbytes()
            most = max(most, sum(live.values()))
            live = {s: n for s, n in live.items() if s in given or last.get(s, node) is not node}
        return float(most)


def _values(node: fx.Node, arguments: Iterable[fx.Node]) -> list[torch.Tensor]:
    found = [v for n in (node, *arguments) for v in values_of(n)]
    return [v for v in found if isinstance(v, torch.Tensor)]
