"""`Step`: the graphs of one specialization, run inside one autograd function on plain local tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.ir.layout import Layout, TensorType
from autopar.ir.ops.random import current_seed, step_seed
from autopar.ir.program import GRADIENTS, Output, Program
from autopar.runtime.agreement.failing_node import failing_node
from autopar.runtime.agreement.points import FAILURES, NO_SYNC, WAITING
from autopar.runtime.dtensor import computed, from_local, part_of, stored, to_local, to_placements
from autopar.runtime.mesh import MeshContext
from autopar.runtime.state.stage_tensor import home_of, staged
from autopar.runtime.step.input_gradients import Gradients, Origin
from autopar.runtime.step.loss_total import attached
from autopar.runtime.step.no_sync import DeferredReduction, split_reductions
from autopar.runtime.step.partition import ForwardBackward


@dataclass(frozen=True)
class BoundaryLayouts:
    """Global types and layouts at the boundary, by name or index."""

    parameters: Mapping[str, tuple[TensorType, Layout]]
    batch: Mapping[str, tuple[TensorType, Layout]]
    results: Mapping[str, tuple[TensorType, Layout]]


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First element of its storage that a tensor takes, and the one behind its last."""
    first = int(tensor.storage_offset())
    span = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return first, first + (span if tensor.numel() else 0)


@dataclass(frozen=True)
class Step:
    """What runs for one combination of shapes and modes.

    Attributes:
        program: the global program; its graph has been rewritten, see ``cut``.
        cut: the bound forward and backward graphs.
        types: of everything that crosses the boundary.
        place: where this rank is.
    """

    program: Program
    cut: ForwardBackward
    types: BoundaryLayouts
    place: MeshContext

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters that go in, in order."""
        return [i.name for i in self.cut.inputs if i.kind == "parameter"]

    @cached_property
    def differentiable(self) -> list[int]:
        """Indices of the results that carry gradients."""
        return sorted(int(i.name) for i in self.program.inputs if i.kind == "tangent")

    def graphs(self) -> list[fx.GraphModule | None]:
        """What runs, parts that reduce gradients by themselves included."""
        return [self.cut.steady, self.cut.forward, self.cut.backward, *self.__dict__.get("_reductions", ())]

    @cached_property
    def reached(self) -> dict[str, frozenset[int]]:
        """Of each parameter, the results from which its gradient comes."""
        found: dict[fx.Node, frozenset[int]] = {}
        inputs = dict(zip(self.program.placeholders, self.program.inputs, strict=True))
        for node in self.program.graph.graph.nodes:
            spec = inputs.get(node)
            own = frozenset({int(spec.name)}) if spec is not None and spec.kind == "tangent" else frozenset()
            found[node] = own.union(*(found[a] for a in node.all_input_nodes))
        described = zip(self.program.outputs, self.program.output_values, strict=True)
        return {o.name: found[v] for o, v in described if o.kind == "gradient" and v is not None}

    @property
    def trains(self) -> bool:
        """Whether there is a backward graph."""
        return self.cut.backward is not None

    def forward(
        self, parameters: Sequence[torch.Tensor], buffers: dict[str, torch.Tensor], batch: Sequence[torch.Tensor]
    ) -> tuple[list[Any], list[Any]]:
        """Local results, and what the backward pass needs; buffers get their new values in place."""
        remaining = iter(parameters)
        sources: dict[str, Callable[[str], torch.Tensor]] = {
            "parameter": lambda name: computed(
                to_local(next(remaining)), *self.types.parameters[name], self.place.sizes
            ),
            "buffer": buffers.__getitem__,
            "batch": lambda name: batch[int(name)],
        }
        arguments = [sources[i.kind](i.name) for i in self.cut.inputs]
        with torch.no_grad(), torch.autocast(self.place.device.type, enabled=False):
            values = list(self.cut.forward(*arguments))
        given = {id(a) for a in arguments}  # what the model returns of its inputs is not theirs to write to
        outputs = [v.clone() if id(v) in given else v for v in values[: len(self.cut.outputs)]]
        saved = values[len(self.cut.outputs) :]
        for i in self.cut.kept:
            saved[i] = saved[i].clone()
        return self._results(outputs, buffers), saved

    def _results(
        self, outputs: Sequence[Any], buffers: dict[str, torch.Tensor], instead: Mapping[str, torch.Tensor] = {}
    ) -> list[Any]:
        """The results among the outputs, some replaced.

        Buffers, and parameters that the model itself writes, get their new values in place, or a new tensor as the
        entry of ``buffers`` where the model assigns one.
        """
        results = []
        for output, value in zip(self.cut.outputs, outputs, strict=True):
            if output.kind == "parameter":
                type_, layout = self.types.parameters[output.name]
                buffers[output.name].copy_(stored(value, type_, layout, self.place.coordinates))
            elif output.name in self.program.state.assigned and output.kind == "buffer":
                buffers[output.name] = value
            elif output.kind == "buffer":
                buffers[output.name].copy_(value)
            else:
                results.append(instead.get(output.name, value))
        return results

    def backward(self, saved: list[Any], tangents: list[torch.Tensor], deferred: DeferredReduction) -> Gradients:
        """Local gradients; none of parameters while their reduction is postponed."""
        assert self.cut.backward is not None
        values = [*saved, *tangents]
        saved.clear()
        tangents.clear()
        with torch.no_grad(), torch.autocast(self.place.device.type, enabled=False):
            if deferred.active or deferred.holds(self):
                made, first = list(self._reductions[0](values)), self._of_batch
                of_batch = self._named(made[:first], self.cut.gradients[:first])
                deferred.add(self, made[first:])
                return Gradients({} if deferred.active else self._with_postponed({}, deferred), of_batch)
            found = self._named(self.cut.backward(values))
            names = [o.name for o in self.cut.gradients[: self._of_batch]]
            of_batch = {name: found.pop(name) for name in names if name in found}
            return Gradients(self._with_postponed(found, deferred), of_batch)

    @property
    def _of_batch(self) -> int:
        """How many gradients are of batch tensors; they come first."""
        return sum(o.kind == "input_gradient" for o in self.cut.gradients)

    @cached_property
    def _reductions(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The backward graph in two parts, the second of which reduces gradients."""
        assert self.cut.backward is not None
        return split_reductions(self.cut.backward, self._of_batch)

    @cached_property
    def gradient_names(self) -> frozenset[str]:
        """Of the parameters for which the backward graph gives a gradient."""
        assert self.cut.backward is not None
        values: Any = self.cut.backward.graph.output_node().args[0]
        described = zip(self.cut.gradients, values[len(values) - len(self.cut.gradients) :], strict=True)
        return frozenset(o.name for o, v in described if v is not None and o.kind == "gradient")

    def _with_postponed(self, found: dict[str, torch.Tensor], deferred: DeferredReduction) -> dict[str, torch.Tensor]:
        """Gradients with those added whose reduction was postponed; the parameters may be none of this step's."""
        for name, gradient in reduce_deferred(deferred).items():
            found[name] = found[name] + gradient if name in found else gradient
        return found

    def _named(
        self, values: Sequence[torch.Tensor | None], described: Sequence[Output] | None = None
    ) -> dict[str, torch.Tensor]:
        """Gradients by name, each with memory of its own: clipping would scale a shared one twice."""
        found: dict[str, torch.Tensor] = {}
        taken: dict[int, list[tuple[int, int]]] = {}
        described = self.cut.gradients if described is None else described
        for output, value in zip(described, values, strict=True):
            if value is None or output.kind not in GRADIENTS:
                continue
            ranges, (start, stop) = taken.setdefault(value.untyped_storage().data_ptr(), []), extent(value)
            shared = any(start < b and a < stop for a, b in ranges)
            ranges.append((start, stop))
            found[output.name] = value.clone() if shared else value
        return found

    def wrap(self, index: int, local: torch.Tensor) -> torch.Tensor:
        """A result as the user gets it: scalars plain, other tensors as DTensors."""
        if local.ndim == 0:
            return local
        type_, layout = self.types.results[str(index)]
        local = stored(local, type_, layout, self.place.coordinates)
        return from_local(local, self.place, type_.stored_shape, to_placements(type_, layout))

    def tangent(self, name: str, gradient: torch.Tensor | None) -> torch.Tensor:
        """The incoming gradient of a result, in the layout that the backward graph expects."""
        type_, layout = self.types.results[name]
        if gradient is not None:
            return part_of(gradient, type_, layout, self.place)
        node = next(
            n for n, i in zip(self.program.placeholders, self.program.inputs, strict=True)
            if i.kind == "tangent" and i.name == name
        )  # fmt: skip
        value = node.meta["val"]
        return torch.zeros(value.shape, dtype=value.dtype, device=self.place.device)


def reduce_deferred(deferred: DeferredReduction) -> dict[str, torch.Tensor]:
    """Local gradients whose reduction was postponed, by parameter name; a collective call if there are any."""
    found: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for waiting in deferred.take():
            step = waiting.step
            earlier = step._named(step._reductions[1](waiting.values), step.cut.gradients[step._of_batch :])
            for name, gradient in earlier.items():
                if name not in waiting.dropped:
                    found[name] = found[name] + gradient if name in found else gradient
    return found


def deliver(found: dict[str, torch.Tensor], deferred: DeferredReduction, place: MeshContext) -> None:
    """Put local gradients into ``.grad`` of their parameters, which no backward pass at hand returns any more."""
    named = dict(deferred.parameters()) if found else {}
    deferred.deliver({n: as_gradient(local, named[n], deferred.types[n], place) for n, local in found.items()})


def as_gradient(
    local: torch.Tensor, like: torch.Tensor, known: tuple[TensorType, Layout], place: MeshContext
) -> torch.Tensor:
    """A local gradient as autograd gets it: of the shape and in the placements of its parameter."""
    type_, layout = known
    placements = tuple(like.placements) if isinstance(like, DTensor) else ()
    gradient = from_local(stored(local, type_, layout, place.coordinates), place, like.shape, placements)
    return staged(gradient, home_of(layout)) if isinstance(gradient, DTensor) else gradient


@dataclass
class Call:
    """One call of the module: goes into the autograd function in one piece, and brings the results out.

    Attributes:
        step: what runs.
        buffers: of the model, by name.
        batch: this rank's part of each batch tensor.
        deferred: gradients that wait.
        name: such as ``call 3 of Mlp``.
        origins: how the batch tensors that require a gradient were passed.
        results: of the model.
    """

    step: Step
    buffers: dict[str, torch.Tensor]
    batch: list[torch.Tensor]
    deferred: DeferredReduction
    name: str = ""
    origins: tuple[Origin, ...] = ()
    results: list[torch.Tensor] = field(default_factory=list)

    def agree(self, pass_: str) -> None:
        """Wait until every rank is about to do the same.

        Raises:
            RankError: one is not, or does not come.
        """
        place = self.step.place
        if place.control is not None:
            window = ((NO_SYNC, str(self.deferred.active)), (WAITING, self.deferred.described()))
            place.meet(f"{pass_} of {self.name}", (*window, (FAILURES, place.control.failures())))

    def during(self, pass_: str) -> AbstractContextManager[None]:
        """In place of the error of a collective within, one that says which, and what has become of the ranks."""
        graphs = self.step.graphs
        return self.step.place.during(f"{pass_} of {self.name}", lambda e: failing_node(e, graphs()))


def run(
    call: Call, parameters: Sequence[torch.Tensor], differentiable: Sequence[torch.Tensor] = ()
) -> list[torch.Tensor]:
    """Run a step; the results of the model, in order, with gradients where the step has a backward pass.

    Args:
        call: what is run.
        parameters: that go in, in order.
        differentiable: the batch tensors that require a gradient, as they were passed, in the order of the origins.
    """
    step = call.step
    if not step.trains:
        with call.during("forward"):
            results, _ = step.forward(parameters, call.buffers, call.batch)
        return [step.wrap(i, r) for i, r in enumerate(results)]
    apply: Any = _StepFunction.apply
    outputs = dict(zip(step.differentiable, apply(call, *parameters, *differentiable), strict=True))
    if (total := step.program.total) is not None:
        loss = outputs.pop(step.differentiable[0])
        outputs |= zip(total.parts, attached(loss, call.results, step.program.skeleton, total), strict=True)
    anchor = torch.empty(0, requires_grad=True)
    refuse: Any = _Refusal.apply
    return [
        outputs[i] if i in outputs else refuse(anchor, [r], i) if i in step.program.withheld else r
        for i, r in enumerate(call.results)
    ]


class _StepFunction(torch.autograd.Function):
    """The whole model as one node of the user's autograd graph."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> Any:
        step = call.step
        parameters = tensors[: len(tensors) - len(call.origins)]
        with call.during("forward"):
            locals_, saved = step.forward(parameters, call.buffers, call.batch)
        ctx.set_materialize_grads(False)
        ctx.seed = current_seed()
        ctx.call = Call(step, {}, [], call.deferred, call.name, call.origins)
        ctx.is_tensor = [isinstance(v, torch.Tensor) for v in saved]
        ctx.others = [v for v in saved if not isinstance(v, torch.Tensor)]
        ctx.save_for_backward(*(v for v in saved if isinstance(v, torch.Tensor)))
        ctx.parameters = parameters
        call.results = [step.wrap(i, r) for i, r in enumerate(locals_)]
        return tuple(call.results[i] for i in step.differentiable)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        step: Step = ctx.call.step
        ctx.call.agree("backward")
        # Taken off their lists: an iterator would hold all of them until the pass ends.
        tensors, others = list(ctx.saved_tensors), list(ctx.others)
        saved = [(tensors if is_tensor else others).pop(0) for is_tensor in ctx.is_tensor]
        ctx.maybe_clear_saved_tensors()
        incoming = {str(i): g for i, g in zip(step.differentiable, gradients, strict=True)}
        alone = not (ctx.call.deferred.active or ctx.call.deferred.any)
        with ctx.call.during("backward"), step_seed(ctx.seed):  # what is computed again draws the same numbers
            tangents = [step.tangent(name, incoming[name]) for name in step.cut.tangents]
            found, of_batch = step.backward(saved, tangents, ctx.call.deferred)
        if alone and len(incoming) > 1 and any(g is None for g in incoming.values()):  # as in torch, not 0
            given = {int(name) for name, gradient in incoming.items() if gradient is not None}
            found = {name: g for name, g in found.items() if not step.reached[name].isdisjoint(given)}
        asked = ctx.needs_input_grad[1 : 1 + len(ctx.parameters)]
        wrapped = [
            as_gradient(found.pop(name), p, step.types.parameters[name], step.place)
            if needed and name in found
            else None
            for name, p, needed in zip(step.parameters, ctx.parameters, asked, strict=True)
        ]
        deliver(found, ctx.call.deferred, step.place)
        with ctx.call.during("backward"):  # on every rank, asked for or not: it may take a collective
            shown = [
                o.gradient(of_batch[o.name], step.types.batch[o.name], step.place) if o.name in of_batch else None
                for o in ctx.call.origins
            ]
        return None, *wrapped, *shown


class _Refusal(torch.autograd.Function):
    """A result beside the loss or losses: cut off from the parameters, and saying so when a gradient is asked of it.

    Merely detaching it would drop the gradient of ``loss + penalty(logits)`` in silence.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, box: list[torch.Tensor], index: int) -> torch.Tensor:
        ctx.index = index
        return box[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        raise AutoparError(
            f"a gradient was asked through output {ctx.index} of the parallelized model, which returns its loss: only "
            "the loss carries gradients (the scalar that loss= names, else all scalars that require one). Compute "
            "everything that is trained on inside the model, or pass loss_fn=lambda output, batch: ... to "
            "autopar.parallelize and make the model return no scalar"
        )
