"""`Step`: the graphs of one specialisation, run inside one autograd function on plain local tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from autopar.draw import current_seed, step_seed
from autopar.errors import AutoparError
from autopar.layout import Layout, TensorType
from autopar.program import Program
from autopar.runtime.boundary import computed, from_local, part_of, stored, to_local, to_placements
from autopar.runtime.partition import Cut
from autopar.runtime.place import Place
from autopar.runtime.postpone import Postponed, split_reductions
from autopar.runtime.staged import home_of, staged


@dataclass(frozen=True)
class Types:
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
    cut: Cut
    types: Types
    place: Place

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters that go in, in order."""
        return [i.name for i in self.cut.inputs if i.kind == "parameter"]

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
        outputs, saved = values[: len(self.cut.outputs)], values[len(self.cut.outputs) :]
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

    def backward(self, saved: list[Any], tangents: list[torch.Tensor], postponed: Postponed) -> dict[str, torch.Tensor]:
        """Local gradients by parameter name; empty while their reduction is postponed."""
        assert self.cut.backward is not None
        values = [*saved, *tangents]
        saved.clear()
        tangents.clear()
        with torch.no_grad(), torch.autocast(self.place.device.type, enabled=False):
            if postponed.active or postponed.holds(self):
                postponed.add(self, self._reductions[0](values))
                return {} if postponed.active else self._with_postponed({}, postponed)
            return self._with_postponed(self._named(self.cut.backward(values)), postponed)

    @cached_property
    def _reductions(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The backward graph in two parts, the second of which reduces gradients."""
        assert self.cut.backward is not None
        return split_reductions(self.cut.backward)

    def _with_postponed(self, found: dict[str, torch.Tensor], postponed: Postponed) -> dict[str, torch.Tensor]:
        """Gradients with those added whose reduction was postponed."""
        with torch.no_grad():
            for step, partial in postponed.take():
                earlier = step._named(step._reductions[1](list(partial)))
                for name, gradient in earlier.items():
                    found[name] = found[name] + gradient if name in found else gradient
        return found

    def _named(self, values: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Gradients by parameter name, each with memory of its own: clipping would scale a shared one twice."""
        found: dict[str, torch.Tensor] = {}
        taken: dict[int, list[tuple[int, int]]] = {}
        for output, value in zip(self.cut.gradients, values, strict=True):
            if value is None or output.kind != "gradient":
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


@dataclass
class Call:
    """One call of the module: goes into the autograd function in one piece, and brings the results out."""

    step: Step
    buffers: dict[str, torch.Tensor]
    batch: list[torch.Tensor]
    postponed: Postponed
    results: list[torch.Tensor] = field(default_factory=list)


def run(call: Call, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a step; the results of the model, in order, with gradients where the step has a backward pass."""
    step = call.step
    if not step.trains:
        results, _ = step.forward(parameters, call.buffers, call.batch)
        return [step.wrap(i, r) for i, r in enumerate(results)]
    outputs = _StepFunction.apply(call, *parameters)  # type: ignore[no-untyped-call]
    loss = step.program.loss
    if loss is None:
        return list(outputs)
    anchor = torch.empty(0, requires_grad=True)
    refuse: Any = _Refusal.apply
    return [
        outputs if i == loss else refuse(anchor, [r], i) if r.is_floating_point() else r
        for i, r in enumerate(call.results)
    ]


class _StepFunction(torch.autograd.Function):
    """The whole model as one node of the user's autograd graph."""

    @staticmethod
    def forward(ctx: Any, call: Call, *parameters: torch.Tensor) -> Any:
        step = call.step
        locals_, saved = step.forward(parameters, call.buffers, call.batch)
        ctx.set_materialize_grads(False)
        ctx.seed = current_seed()
        ctx.call = Call(step, {}, [], call.postponed)
        tensors = [isinstance(v, torch.Tensor) for v in saved]
        ctx.is_tensor, ctx.others = tensors, [v for v in saved if not isinstance(v, torch.Tensor)]
        ctx.save_for_backward(*(v for v in saved if isinstance(v, torch.Tensor)))
        ctx.parameters = [(p.shape, tuple(p.placements) if isinstance(p, DTensor) else ()) for p in parameters]
        call.results = [step.wrap(i, r) for i, r in enumerate(locals_)]
        if step.program.loss is not None:
            return call.results[step.program.loss]
        differentiable = {i.name for i in step.program.inputs if i.kind == "tangent"}
        ctx.mark_non_differentiable(*(r for i, r in enumerate(call.results) if str(i) not in differentiable))
        return tuple(call.results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        step: Step = ctx.call.step
        # Taken off their lists: an iterator would hold all of them until the pass ends.
        tensors, others = list(ctx.saved_tensors), list(ctx.others)
        saved = [(tensors if is_tensor else others).pop(0) for is_tensor in ctx.is_tensor]
        ctx.maybe_clear_saved_tensors()
        loss = step.program.loss
        incoming = {str(i): g for i, g in enumerate(gradients)} if loss is None else {str(loss): gradients[0]}
        tangents = [step.tangent(name, incoming[name]) for name in step.cut.tangents]
        with step_seed(ctx.seed):  # what is computed again draws the same numbers
            found = step.backward(saved, tangents, ctx.call.postponed)
        wrapped: list[torch.Tensor | None] = [None]
        for name, (shape, placements) in zip(step.parameters, ctx.parameters, strict=True):
            local = found.get(name)
            if local is None:
                wrapped.append(None)
                continue
            type_, layout = step.types.parameters[name]
            local = stored(local, type_, layout, step.place.coordinates)
            gradient = from_local(local, step.place, shape, placements)
            wrapped.append(staged(gradient, home_of(layout)) if isinstance(gradient, DTensor) else gradient)
        return tuple(wrapped)


class _Refusal(torch.autograd.Function):
    """A result beside the loss: cut off from the parameters, and saying so when a gradient is asked of it.

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
            "the loss carries gradients. Compute everything that is trained on inside the model, or pass "
            "loss_fn=lambda output, batch: ... to autopar.parallelize and make the model return no scalar"
        )
