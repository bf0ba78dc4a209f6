"""`PipelineStep`: a step whose stages run on different devices, on torch's runtime of pipelines.

As with microbatches, gradients are there when the forward call returns, and the backward call scales them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from autopar._torch_compat import pipeline_runtime
from autopar.ir.layout import At, Partial, is_everywhere, is_held
from autopar.ir.ops.random import current_seed, derive_seed, step_seed
from autopar.ir.plan import Plan
from autopar.ir.program import Output, Program
from autopar.pipeline.executor import StageRun, begin, end
from autopar.pipeline.schedules import Order, device_of, order_of
from autopar.pipeline.stage_graphs import BACKWARD, FORWARD, INPUT, StageGraph, StageGraphs, Transfer
from autopar.runtime.agreement.control import first_line
from autopar.runtime.dtensor import computed, from_local, stored, to_local, to_placements
from autopar.runtime.mesh import MeshContext
from autopar.runtime.step.input_gradients import Gradients
from autopar.runtime.step.microbatch_step import MicrobatchStep, cut_microbatches
from autopar.runtime.step.no_sync import DeferredReduction
from autopar.runtime.step.partition import ForwardBackward
from autopar.runtime.step.step import BoundaryLayouts
from autopar.simulate.p2p_order import communicate

Receive = Callable[[str], torch.Tensor]
"""Memory for a value of another stage, by name."""


@dataclass(frozen=True)
class StageMapping:
    """Where the stages of a step are.

    Attributes:
        group: of the devices along the axis of the stages; None where there is one.
        device: this one's coordinate along the axis.
        devices: of each stage.
        order: what each device does.
    """

    group: dist.ProcessGroup | None
    device: int
    devices: tuple[int, ...]
    order: Order

    @property
    def own(self) -> tuple[int, ...]:
        """Stages of this device."""
        return tuple(s for s, device in enumerate(self.devices) if device == self.device)


Arrival = tuple[torch.Tensor, Any]
"""A tensor, and the work that fills it."""


class Wires:
    """Point-to-point communication along the axis of the stages, with a timeout for every wait."""

    def __init__(self, line: StageMapping, timeout: float) -> None:
        """Nothing is under way."""
        self._line, self._timeout = line, timedelta(seconds=timeout)
        self._under_way: list[tuple[Any, int]] = []

    def send(self, tensors: Sequence[torch.Tensor], device: int) -> None:
        """Begin to send."""
        self._under_way = [(work, to) for work, to in self._under_way if not work.is_completed()]
        for tensor in tensors:
            work = dist.isend(tensor.contiguous(), group=self._line.group, group_dst=device)
            self._under_way.append((work, device))

    def receive(self, tensors: Sequence[torch.Tensor], device: int) -> list[Arrival]:
        """Begin to receive."""
        return [(t, self._expect(t, device)) for t in tensors]

    def _expect(self, tensor: torch.Tensor, device: int) -> tuple[Any, int]:
        return dist.irecv(tensor, group=self._line.group, group_src=device), device

    def arrived(self, arrivals: Sequence[Arrival]) -> list[torch.Tensor]:
        """What has been received; waits for it."""
        for _, (work, device) in arrivals:
            self._wait(work, device)
        return [tensor for tensor, _ in arrivals]

    def finish(self) -> None:
        """Wait until all is sent."""
        while self._under_way:
            self._wait(*self._under_way.pop(0))

    def _wait(self, work: Any, device: int) -> None:
        try:
            work.wait(self._timeout)
        except RuntimeError as e:
            raise WireError(
                f"gloo: device {self._line.device} of the pipeline had no answer from device {device}: {first_line(e)}"
            ) from e


class WireError(RuntimeError):
    """A neighbor in the pipeline does not answer."""


def line_of(plan: Plan, context: MeshContext) -> StageMapping:
    """Where the stages of a plan are."""
    assert plan.pipeline is not None
    axis = plan.axis_names.index(plan.pipeline.axis)
    group = None if context.mesh is None else context.mesh.get_group(axis)
    actions = order_of(plan)
    return StageMapping(group, context.coordinates[axis], tuple(device_of(actions)), actions)


def inside(context: MeshContext, plan: Plan) -> MeshContext:
    """The place of a device among those of its stage."""
    inner = set(plan.inner.axis_names)
    kept = [i for i, (name, _) in enumerate(context.axes) if name in inner]
    axes, coordinates = tuple(context.axes[i] for i in kept), tuple(context.coordinates[i] for i in kept)
    return replace(context, axes=axes, coordinates=coordinates, mesh=None)


def cut_stages(bound: Program, plan: Plan, line: StageMapping) -> tuple[ForwardBackward, StageGraphs]:
    """Cut a bound program into the pieces of stages; the graphs shown are those of this device's first stage."""
    cutting = StageGraphs(bound, len(plan.stages))
    whole = cut_microbatches(bound)
    forward = cutting.piece(line.own[0], FORWARD).graph
    if not any(o.kind == "gradient" and v for o, v in zip(bound.outputs, bound.output_values, strict=True)):
        return replace(whole, forward=forward, backward=None), cutting
    return replace(whole, forward=forward, backward=cutting.piece(line.own[0], BACKWARD).graph), cutting


@dataclass(frozen=True)
class PipelineStep(MicrobatchStep):
    """What runs for one combination of shapes and modes, in stages.

    Attributes:
        cutting: the program in pieces.
        line: where the stages are.
        within: where this device is among those of its stage.
        inner: types on these.
    """

    cutting: StageGraphs = field(kw_only=True)
    line: StageMapping = field(kw_only=True)
    within: MeshContext = field(kw_only=True)
    inner: BoundaryLayouts = field(kw_only=True)

    @property
    def _within(self) -> tuple[MeshContext, BoundaryLayouts]:
        return self.within, self.inner

    def graphs(self) -> list[fx.GraphModule | None]:
        """As in `Step`, of this device's stages."""
        return [piece.graph for piece in self.cutting.made()]

    def forward(
        self, parameters: Sequence[torch.Tensor], buffers: dict[str, torch.Tensor], batch: Sequence[torch.Tensor]
    ) -> tuple[list[Any], list[Any]]:
        """Local results and gradients; buffers get their new values in place."""
        named = dict(zip(self.parameters, map(to_local, parameters), strict=True))
        held = {
            name: computed(local, *self.inner.parameters[name], self.within.sizes)
            for name, local in named.items()
            if is_held(self.types.parameters[name][1], self.context.coordinates)
        }
        one = torch.ones((), device=self.context.device, dtype=self._tangent_dtype) if self.trains else None
        sources: dict[str, Callable[[str, int], Any]] = {
            "parameter": lambda name, _: held[name],
            "buffer": lambda name, _: buffers[name],
            "tangent": lambda *_: one,
            "batch": lambda name, index: self._rows(name, batch[int(name)], max(index, 0)),
        }
        runs = self._runs(lambda name, index: sources[self._inputs[name].kind](self._inputs[name].name, index))
        exact = torch.autocast(self.context.device.type, enabled=False)
        with torch.no_grad(), exact:
            begin(self.cutting, runs, self.line.order, self._exchange)
            self._work(runs)
            end(self.cutting, runs, self._exchange)
            found: dict[str, Any] = {}
            for run in runs.values():
                found.update(run.outputs())
        values = [
            None if v is None
            else self._nothing(v.name) if self._is_elsewhere(o)
            else found[v.name] if v.name in found
            else self._given(v.name, sources)
            for o, v in zip(self.program.outputs, self.program.output_values, strict=True)
        ]  # fmt: skip
        first = self.program.forward_outputs
        gradients = [
            value if made is None or o.name in held else torch.zeros_like(named[o.name])
            for o, made, value in zip(
                self.program.outputs[first:], self.program.output_values[first:], values[first:], strict=True
            )
        ]
        return self._results(values[:first], buffers), gradients

    def backward(self, saved: list[Any], tangents: list[torch.Tensor], deferred: DeferredReduction) -> Gradients:
        """Local gradients of parameters, which the schedule has reduced."""
        given = self._named(saved)
        saved.clear()
        with torch.no_grad():
            return Gradients(self._scaled(given, tangents[0], deferred))

    def _given(self, name: str, sources: Mapping[str, Callable[..., Any]]) -> Any:
        """An output that is an input; None for a gradient that another device has."""
        spec = self._inputs.get(name)
        return None if spec is None else sources[spec.kind](spec.name, 0)

    def wrap(self, index: int, local: torch.Tensor) -> torch.Tensor:
        """As in `Step`; a result that one stage has is a sum, of which the devices of others have zeros."""
        type_, layout = self.types.results[str(index)]
        if local.ndim == 0 or is_everywhere(layout):
            return super().wrap(index, local)
        summed = tuple(Partial() if isinstance(p, At) else p for p in layout)
        local = stored(local, type_, summed, self.context.coordinates)
        return from_local(local, self.context, type_.stored_shape, to_placements(type_, summed))

    def _is_elsewhere(self, output: Output) -> bool:
        """Whether a result is on the devices of another stage only."""
        known = self.types.results.get(output.name) if output.kind == "result" else None
        return known is not None and not is_held(known[1], self.context.coordinates)

    def _nothing(self, name: str) -> torch.Tensor:
        """Zeros in the shape of a result, in the memory of one."""
        value = self.cutting.node(name).meta["val"]
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

        def run(piece: StageGraph, microbatch: int, values: list[Any]) -> list[Any]:
            with step_seed(derive_seed(seed, microbatch)):
                return list(piece.graph(values))

        def join(name: str, values: list[Any]) -> Any:
            return self._joined(self._result_rows[name], values)

        return {s: StageRun(self.cutting, s, self._result_rows, run, source, join) for s in self.line.own}

    def _work(self, runs: Mapping[int, StageRun]) -> None:
        """All microbatches through this device's stages."""
        wires = Wires(self.line, self.context.timeout)
        stages = [_Stage(run, self.line.devices, self._empty, wires) for run in runs.values()]
        for stage in stages:
            stage.neighbors = {s.stage_index for s in stages}
        actions = tuple(tuple(a for a in row if self.trains or a.kind == FORWARD) for row in self.line.order)
        pipeline_runtime(stages, communicate(actions), self.line.devices, self.part.count)()
        wires.finish()

    def _empty(self, name: str) -> torch.Tensor:
        value = self.cutting.node(name).meta["val"]
        return torch.empty(value.shape, dtype=value.dtype, device=self.context.device)

    def _exchange(self, transfers: Sequence[Transfer], runs: Mapping[int, StageRun]) -> None:
        """Send what this device has, and receive what it needs, once for all its stages."""
        devices, wires = self.line.devices, Wires(self.line, self.context.timeout)
        arriving: dict[str, list[Arrival]] = {}
        done: set[tuple[str, int]] = set()
        for transfer in transfers:
            source, target = devices[transfer.source], devices[transfer.target]
            key = (transfer.name, target)
            if source == target or key in done:
                continue
            done.add(key)
            if self.line.device == source:
                wires.send([runs[transfer.source].values[transfer.name]], target)
            elif self.line.device == target:
                arriving[transfer.name] = wires.receive([self._empty(transfer.name)], source)
        received = {name: wires.arrived(found)[0] for name, found in arriving.items()}
        wires.finish()
        for transfer in transfers:
            if transfer.target in runs:
                here = runs[transfer.source].values if transfer.source in runs else received
                runs[transfer.target].values[transfer.name] = here[transfer.name]


class _Stage:
    """A stage as torch's runtime of pipelines calls it; it sends and receives by itself, for its own timeout.

    Attributes:
        neighbors: numbers of the stages of this device.
    """

    submod = None
    has_backward = True

    def __init__(self, run: StageRun, devices: Sequence[int], empty: Receive, wires: Wires) -> None:
        """Nothing has been received."""
        self.stage_index, self.num_stages = run.stage, len(devices)
        self.group_rank, self.group_size = devices[run.stage], max(devices) + 1
        self.is_first, self.is_last = run.stage == 0, run.stage == self.num_stages - 1
        self.neighbors: set[int] = set()
        self._run, self._devices, self._empty, self._wires = run, devices, empty, wires
        self._here: dict[str, dict[int, list[torch.Tensor]]] = {FORWARD: {}, BACKWARD: {}}
        self._arriving: dict[tuple[str, int], list[Arrival]] = {}

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> list[torch.Tensor]:
        self._run.forward(microbatch, self._received(FORWARD, microbatch))
        return self._run.take_sent(FORWARD, microbatch) if self.stage_index + 1 in self.neighbors else []

    def backward_one_chunk(self, microbatch: int, *_: Any, full_backward: bool, **__: Any) -> None:
        self._run.backward(microbatch, self._received(BACKWARD, microbatch), BACKWARD if full_backward else INPUT)

    def backward_weight_one_chunk(self, microbatch: int, **_: Any) -> None:
        self._run.weights(microbatch)

    def set_local_fwd_input(self, outputs: list[torch.Tensor], microbatch: int) -> None:
        self._here[FORWARD][microbatch] = outputs

    def get_local_bwd_output(self, microbatch: int) -> list[torch.Tensor]:
        return self._run.take_sent(BACKWARD, microbatch)

    def set_local_bwd_input(self, outputs: list[torch.Tensor], microbatch: int) -> None:
        self._here[BACKWARD][microbatch] = outputs

    def get_fwd_recv_ops(self, microbatch: int) -> list[Any]:
        return self._receive(FORWARD, microbatch, self._run.cutting.received(self.stage_index), self.stage_index - 1)

    def get_bwd_recv_ops(self, microbatch: int) -> list[Any]:
        return self._receive(BACKWARD, microbatch, self._run.cutting.returned(self.stage_index), self.stage_index + 1)

    def get_fwd_send_ops(self, microbatch: int) -> list[Any]:
        return self._send(FORWARD, microbatch, self.stage_index + 1)

    def get_bwd_send_ops(self, microbatch: int) -> list[Any]:
        return self._send(BACKWARD, microbatch, self.stage_index - 1)

    def _received(self, kind: str, microbatch: int) -> list[torch.Tensor]:
        if (kind, microbatch) in self._arriving:
            return self._wires.arrived(self._arriving.pop((kind, microbatch)))
        return self._here[kind].pop(microbatch, [])

    def _receive(self, kind: str, microbatch: int, names: Sequence[str], stage: int) -> list[Any]:
        tensors = [self._empty(name) for name in names]
        self._arriving[kind, microbatch] = self._wires.receive(tensors, self._devices[stage])
        return []

    def _send(self, kind: str, microbatch: int, stage: int) -> list[Any]:
        self._wires.send(self._run.take_sent(kind, microbatch), self._devices[stage])
        return []
