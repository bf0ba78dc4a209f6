"""`PipelineStep`: a step whose stages run on different devices, driven by torch's pipeline runtime.

As with microbatches, gradients are complete when the forward call returns, and the backward call scales them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from autopar._torch_compat import pipeline_runtime
from autopar.errors import AutoparError
from autopar.ir.layout import At, Partial, is_everywhere, is_held
from autopar.ir.ops.random import current_seed, derive_seed, step_seed
from autopar.ir.plan import Plan
from autopar.ir.program import RECORDED, Output, Program
from autopar.pipeline.executor import StageRun, begin, end
from autopar.pipeline.schedules import Order, device_of
from autopar.pipeline.stage_graphs import BACKWARD, FORWARD, StageGraph, StageGraphs, Transfer
from autopar.runtime.dtensor import computed, from_local, stored, to_local, to_placements
from autopar.runtime.mesh import MeshContext
from autopar.runtime.step.microbatch_step import MicrobatchStep, cut_microbatches
from autopar.runtime.step.no_sync import DeferredReduction
from autopar.runtime.step.partition import ForwardBackward
from autopar.runtime.step.point_to_point import Arrival, PointToPoint, RuntimeStage
from autopar.runtime.step.step import BoundaryLayouts, Gradients, without_autocast
from autopar.simulate.p2p_order import communicate


def stage_context(context: MeshContext, plan: Plan) -> MeshContext:
    """The context of a device among those of its stage: the mesh without the axis of the stages."""
    inner = set(plan.inner.axis_names)
    positions = [i for i, (name, _) in enumerate(context.axes) if name in inner]
    axes, coordinates = tuple(context.axes[i] for i in positions), tuple(context.coordinates[i] for i in positions)
    return replace(context, axes=axes, coordinates=coordinates, mesh=None)


def stages_on(device: int, order: Order) -> list[int]:
    """The stages of a device, ascending."""
    return [stage for stage, owner in enumerate(device_of(order)) if owner == device]


def cut_stages(bound: Program, stage_graphs: StageGraphs, own_stages: Sequence[int]) -> ForwardBackward:
    """A bound program as forward and backward graphs, to be looked at: those of this device's first stage."""
    whole = cut_microbatches(bound)
    forward = stage_graphs.microbatch_graph(own_stages[0], FORWARD).graph
    if not any(o.kind == "gradient" and v for o, v in zip(bound.outputs, bound.output_values, strict=True)):
        return replace(whole, forward=forward, backward=None)
    return replace(whole, forward=forward, backward=stage_graphs.microbatch_graph(own_stages[0], BACKWARD).graph)


def _held(name: str, held: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if name not in held:
        raise AutoparError(
            f"parameter {name!r} is on another stage of the pipeline, and this one computes state of the model from "
            "it: a buffer or parameter that a call writes, as spectral norms and averages of weights are; plan without "
            "stages (Search(pins={'stages': 1})), or compute it between the calls"
        )
    return held[name]


@dataclass(frozen=True)
class PipelineStep(MicrobatchStep):
    """What runs for one combination of shapes and modes, in stages.

    Attributes:
        stage_graphs: the graphs of all stages.
        order: what each device along the axis of the stages does.
        group: of these devices; None where there is one.
        device: this one's coordinate along the axis.
        stage_context: this device among those of its stage.
        stage_types: types and layouts on these.
    """

    stage_graphs: StageGraphs = field(kw_only=True)
    order: Order = field(kw_only=True)
    group: dist.ProcessGroup | None = field(kw_only=True)
    device: int = field(kw_only=True)
    stage_context: MeshContext = field(kw_only=True)
    stage_types: BoundaryLayouts = field(kw_only=True)

    @property
    def _stage_mesh(self) -> tuple[MeshContext, BoundaryLayouts]:
        return self.stage_context, self.stage_types

    def graphs(self) -> list[fx.GraphModule | None]:
        """As in `Step`, of this device's stages."""
        return [graph.graph for graph in self.stage_graphs.built()]

    def forward(
        self, parameters: Sequence[torch.Tensor], buffers: dict[str, torch.Tensor], batch: Sequence[torch.Tensor]
    ) -> tuple[list[Any], list[Any]]:
        """Local results and gradients; buffers get their new values in place."""
        local = dict(zip(self.parameters, map(to_local, parameters), strict=True))
        held = {
            name: computed(tensor, *self.stage_types.parameters[name], self.stage_context.sizes)
            for name, tensor in local.items()
            if is_held(self.types.parameters[name][1], self.context.coordinates)
        }
        one = torch.ones((), device=self.context.device, dtype=self._tangent_dtype) if self.trains else None
        sources: dict[str, Callable[[str, int], Any]] = {
            "parameter": lambda name, _: _held(name, held),
            "buffer": lambda name, _: buffers[name],
            "tangent": lambda *_: one,
            # `ONCE` is -1: what runs once a step reads of the batch what is the same in all microbatches.
            "batch": lambda name, index: self._rows(
                name, batch[int(name)], max(index, 0), self.stage_context.coordinates
            ),
        }
        computed_here = self._computed_here(
            self._runs(lambda name, index: sources[self._inputs[name].kind](self._inputs[name].name, index))
        )
        values = [
            None if v is None
            else self._placeholder_result(v.name) if self._is_elsewhere(o)
            else computed_here[v.name] if v.name in computed_here
            else self._input(v.name, sources)
            for o, v in zip(self.program.outputs, self.program.output_values, strict=True)
        ]  # fmt: skip
        first = self.program.forward_outputs
        described = zip(self.program.outputs, self.program.output_values, values, strict=True)
        # Devices of other stages have an empty shard of the parameter, and so an empty gradient.
        gradients = [
            value if v is None or o.kind == RECORDED or o.name in held else torch.zeros_like(local[o.name])
            for o, v, value in list(described)[first:]
        ]
        return self._results(values[:first], buffers), gradients

    def _computed_here(self, runs: Mapping[int, StageRun]) -> dict[str, Any]:
        """Run all stages of this device; their values at the end of the step, by name."""
        computed_here: dict[str, Any] = {}
        with torch.no_grad(), without_autocast(self.context.device.type):
            begin(self.stage_graphs, runs, self.order, self._exchange)
            self._run_microbatches(runs)
            end(self.stage_graphs, runs, self._exchange)
            for run in runs.values():
                computed_here.update(run.outputs())
        return computed_here

    def backward(
        self,
        saved: list[Any],
        tangents: list[torch.Tensor],
        deferred: DeferredReduction,
        buffers: Mapping[str, torch.Tensor],
    ) -> Gradients:
        """Local gradients of parameters, which the schedule has reduced."""
        # no_sync defers nothing here: the reductions are among the graphs at the end of the schedule, and have run.
        self._record([saved.pop(0) for _ in self._recorded], buffers)
        unscaled = self._of_parameters(saved)
        saved.clear()
        with torch.no_grad():
            return self._scaled(unscaled, tangents[0], deferred), {}

    def _input(self, name: str, sources: Mapping[str, Callable[..., Any]]) -> Any:
        """An output that is an input; None for a gradient that another device has."""
        spec = self._inputs.get(name)
        if spec is None:
            return None
        if name in self._result_rows:  # a batch tensor that the model returns as it is
            return self._joined(
                self._result_rows[name], [sources[spec.kind](spec.name, m) for m in range(self.part.count)]
            )
        return sources[spec.kind](spec.name, 0)

    def wrap(self, index: int, local: torch.Tensor) -> torch.Tensor:
        """As in `Step`; a result of one stage is a partial sum, of which the devices of others have zeros."""
        type_, layout = self.types.results[str(index)]
        if local.ndim == 0 or is_everywhere(layout):
            return super().wrap(index, local)
        # torch has no placement for a tensor of one stage. As a sum, any redistribution of it is right.
        summed = tuple(Partial() if isinstance(p, At) else p for p in layout)
        local, order = stored(local, type_, summed, self.context.coordinates), self.program.orders.get(str(index))
        return from_local(local, self.context, type_.stored_shape, to_placements(type_, summed), order)

    def _ordered(self, index: int, output: Output, value: torch.Tensor) -> torch.Tensor:
        """As in `Step`; a result of another stage stays one element."""
        return value if self._is_elsewhere(output) else super()._ordered(index, output, value)

    def _is_elsewhere(self, output: Output) -> bool:
        """Whether a result is on the devices of another stage only."""
        known = self.types.results.get(output.name) if output.kind == "result" else None
        return known is not None and not is_held(known[1], self.context.coordinates)

    def _placeholder_result(self, name: str) -> torch.Tensor:
        """Zeros in the shape of a result that another stage has; all entries share one element of memory."""
        value = self.stage_graphs.node(name).meta["val"]
        shape = list(value.shape)
        if name in self._result_rows:
            shape[self.part.results[self._result_rows[name]]] *= self.part.count
        return torch.zeros((), dtype=value.dtype, device=self.context.device).expand(shape)

    @cached_property
    def _inputs(self) -> dict[str, Any]:
        return {n.name: i for n, i in zip(self.program.placeholders, self.program.inputs, strict=True)}

    @cached_property
    def _result_rows(self) -> dict[str, str]:
        """Name of each result that consists of rows, by the name of its node."""
        described = zip(self.program.outputs, self.program.output_values, strict=True)
        return {v.name: o.name for o, v in described if o.kind == "result" and o.name in self.part.results and v}

    def _runs(self, source: Callable[[str, int], Any]) -> dict[int, StageRun]:
        seed = current_seed()

        def run(graph: StageGraph, microbatch: int, values: list[Any]) -> list[Any]:
            # The same seed in the forward and the backward graph: what is recomputed draws the same numbers.
            with step_seed(derive_seed(seed, microbatch)):
                return self.run(graph.graph, values)

        def join(name: str, values: list[Any]) -> Any:
            return self._joined(self._result_rows[name], values)

        own_stages = stages_on(self.device, self.order)
        return {s: StageRun(self.stage_graphs, s, self._result_rows, run, source, join) for s in own_stages}

    @cached_property
    def _devices(self) -> list[int]:
        """The device of each stage."""
        return device_of(self.order)

    def _run_microbatches(self, runs: Mapping[int, StageRun]) -> None:
        """All microbatches through this device's stages."""
        wires = PointToPoint(self.group, self.device, self.context.timeout)
        stages = [RuntimeStage(run, self._devices, self._empty, wires) for run in runs.values()]
        for stage in stages:
            stage.neighbors = {s.stage_index for s in stages}
        actions = tuple(tuple(a for a in row if self.trains or a.kind == FORWARD) for row in self.order)
        pipeline_runtime(stages, communicate(actions), self._devices, self.part.count)()
        wires.finish()

    def _empty(self, name: str) -> torch.Tensor:
        value = self.stage_graphs.node(name).meta["val"]
        return torch.empty(value.shape, dtype=value.dtype, device=self.context.device)

    def _exchange(self, transfers: Sequence[Transfer], runs: Mapping[int, StageRun]) -> None:
        """Send what this device has, and receive what it needs, once for all its stages."""
        wires = PointToPoint(self.group, self.device, self.context.timeout)
        arriving: dict[str, list[Arrival]] = {}
        sent: set[tuple[str, int]] = set()
        # All devices go through the same list in the same order, so that sends and receives match without tags.
        for name, source_stage, target_stage in transfers:
            source, target = self._devices[source_stage], self._devices[target_stage]
            if source == target or (name, target) in sent:
                continue
            sent.add((name, target))
            if self.device == source:
                wires.send([runs[source_stage].values[name]], target)
            elif self.device == target:
                arriving[name] = wires.receive([self._empty(name)], source)
        received = {name: wires.arrived(arrivals)[0] for name, arrivals in arriving.items()}
        wires.finish()
        for name, source_stage, target_stage in transfers:
            if target_stage in runs:
                known = runs[source_stage].values if source_stage in runs else received
                runs[target_stage].values[name] = known[name]
