"""`Step`: the forward and backward graphs of one specialization, on plain local tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from autopar.ir.layout import Layout, TensorType, is_held
from autopar.ir.ops.float8.histories import history_names, record
from autopar.ir.program import GRADIENTS, RECORDED, Output, Program
from autopar.rules.strides import in_order
from autopar.runtime.agreement.given_gradients import GivenGradients
from autopar.runtime.dtensor import computed, from_local, local_like, part_of, stored, to_local, to_placements
from autopar.runtime.mesh import MeshContext
from autopar.runtime.state.stage_tensor import owner_of, with_owner
from autopar.runtime.step.no_sync import DeferredReduction, split_reductions
from autopar.runtime.step.partition import ForwardBackward, memory_of

Gradients = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
"""Local gradients: of parameters by name, and of batch tensors by number."""

Compiled = Callable[[fx.GraphModule], Callable[..., Any]]
"""From a graph to what runs in its place, see `autopar.runtime.compiled`."""


@dataclass(frozen=True)
class BoundaryLayouts:
    """Global types and layouts of what goes in and comes out, by name of the parameter or index of the tensor."""

    parameters: Mapping[str, tuple[TensorType, Layout]]
    batch: Mapping[str, tuple[TensorType, Layout]]
    results: Mapping[str, tuple[TensorType, Layout]]


def address_range(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of the first byte that a tensor covers, and of the one after its last; nothing if it is empty."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    length = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return start, start + length * tensor.element_size() if tensor.numel() else start


@dataclass(frozen=True)
class Step:
    """What runs for one combination of shapes and modes.

    Attributes:
        program: the global program; its graph has been rewritten, see ``cut``.
        cut: the bound forward and backward graphs.
        types: of everything that goes in and comes out.
        context: this rank's mesh context.
        compiled: gives what runs in the place of a graph; None: the graph itself runs.
    """

    program: Program
    cut: ForwardBackward
    types: BoundaryLayouts
    context: MeshContext
    compiled: Compiled | None = None

    @cached_property
    def given(self) -> GivenGradients:
        """The gradients of outputs that ranks compare."""
        return GivenGradients()

    @cached_property
    def parameters(self) -> list[str]:
        """Names of the parameters that go in, in order."""
        return [i.name for i in self.cut.inputs if i.kind == "parameter"]

    @cached_property
    def differentiable(self) -> list[int]:
        """Indices of the results that carry gradients."""
        return sorted(int(i.name) for i in self.program.inputs if i.kind == "tangent")

    def run(self, graph: fx.GraphModule, *arguments: Any) -> list[Any]:
        """What a graph returns."""
        return list((graph if self.compiled is None else self.compiled(graph))(*arguments))

    def graphs(self) -> list[fx.GraphModule | None]:
        """The graphs that run, for errors to be located in."""
        # Not the property `_reductions`, which would split the backward graph for whoever asks.
        return [self.cut.hoisted, self.cut.forward, self.cut.backward, *self.__dict__.get("_reductions", ())]

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
            "parameter": lambda name: self._computed(name, to_local(next(remaining))),
            "buffer": buffers.__getitem__,
            "batch": lambda name: batch[int(name)],
        }
        arguments = [sources[i.kind](i.name) for i in self.cut.inputs]
        with torch.no_grad(), without_autocast(self.context.device.type):
            values = self.run(self.cut.forward, *arguments)
        outputs, saved = values[: len(self.cut.outputs)], values[len(self.cut.outputs) :]
        # `_results` writes new values into these buffers; the backward pass needs the old ones.
        for i in self.cut.overwritten:
            saved[i] = saved[i].clone()
        return self._results(outputs, buffers), saved

    def part_of_batch(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What this rank is given of a batch tensor that is passed whole, on its device."""
        return part_of(tensor, *self.types.batch[name], self.context).to(self.context.device)

    def _computed(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """The local tensor of a parameter as the graphs take it."""
        type_, layout = self.types.parameters[name]
        return computed(local, type_, layout, self.context.sizes) if type_.used else local

    def _results(
        self, outputs: Sequence[Any], buffers: dict[str, torch.Tensor], instead: Mapping[str, torch.Tensor] = {}
    ) -> list[Any]:
        """The results among the outputs, some replaced.

        Buffers, and parameters that the model itself writes, get their new values in place. Where the model assigns a
        new tensor to a buffer, that becomes the entry of ``buffers``.
        """
        results = []
        # Before a buffer is written, which another output may alias.
        outputs = [
            self._ordered(i, o, instead.get(o.name, v) if o.kind == "result" else v)
            for i, (o, v) in enumerate(zip(self.cut.outputs, outputs, strict=True))
        ]
        for i, (output, value) in enumerate(zip(self.cut.outputs, outputs, strict=True)):
            if output.kind == "parameter":
                type_, layout = self.types.parameters[output.name]
                if not is_held(layout, self.context.coordinates):
                    continue  # another stage of the pipeline holds it, and writes it
                buffers[output.name].copy_(stored(value, type_, layout, self.context.coordinates))
            elif output.name in self.program.state.assigned and output.kind == "buffer":
                buffers[output.name] = value
            elif output.kind == "buffer":
                buffers[output.name].copy_(value)
            else:
                results.append(self._views[i](value, buffers) if i in self._views else value)
        return results

    def _ordered(self, index: int, output: Output, value: torch.Tensor) -> torch.Tensor:
        """An output in memory of its own, where eager mode has it there, and in the order that eager mode has it in."""
        order = self.program.orders.get(output.name) if output.kind == "result" else None
        turned = value if order is None or index in self._views else in_order(value, order)
        return turned.clone() if turned is value and index in self._aliases else turned

    @cached_property
    def _aliases(self) -> frozenset[int]:
        """Outputs of the forward pass that alias an input, or an output that eager mode has in another storage.

        Graphs have no copies, such as ``buffer.clone()``, and equal tensors once.
        """
        found, known = set[int](), dict(self._own_memory)
        places = [(i, memory_of(v), self.program.storages.get((o.kind, o.name))) for i, o, v in self._described]
        members = Counter((memory, number) for _, memory, number in places)
        # Those of a storage that most of them share stay there.
        for i, memory, number in sorted(places, key=lambda place: -members[place[1:]]):
            if known.setdefault(memory, number) != number or (memory.op == "placeholder" and not self._keeps_memory):
                found.add(i)
        return frozenset(found)

    @cached_property
    def _views(self) -> dict[int, Callable[[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor]]:
        """Results that are memory of an input, as eager mode has them: of a value and the tensors written, the result.

        Another tensor than the input, since a parameter must stay a leaf.
        """
        if not self._keeps_memory:
            return {}
        numbers, written = self.program.storages, dict[tuple[fx.Node, int | None], str]()
        found: dict[int, Callable[[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor]] = {}
        for i, o, v in self._described:
            memory = memory_of(v)
            key = memory, numbers.get((o.kind, o.name))
            if o.kind != "result":
                if o.name not in self.program.state.assigned or o.kind == "parameter":
                    written[v, key[1]] = o.name
            elif key in written:
                found[i] = partial(_view, v, memory, written[key])
            elif memory.op == "placeholder" and i not in self._aliases:
                found[i] = _detached
        return found

    @cached_property
    def _described(self) -> list[tuple[int, Output, fx.Node]]:
        """Outputs of the forward pass, each with its number and node."""
        described = zip(self.program.outputs, self.program.output_values, strict=True)
        return [(i, o, v) for i, (o, v) in enumerate(described) if v is not None and i < self.program.forward_outputs]

    @property
    def _keeps_memory(self) -> bool:
        """Whether results may be memory of inputs: on a mesh, and of microbatches, they have other parts of these."""
        return self.context.mesh is None and self.program.microbatches == 1

    @cached_property
    def apart(self) -> dict[int, tuple[list[tuple[str, str]], list[int]]]:
        """Results that are memory of inputs or of other results in eager mode, and here need not be: of which."""
        numbers = self.program.storages
        inputs = {number: key for key, number in numbers.items() if key[0] != "result"}
        results = {int(name): number for (kind, name), number in numbers.items() if kind == "result"}
        kept = {int(o.name) for i, o, _ in self._described if o.kind == "result" and i in self._views}
        if self._keeps_memory:  # buffers are in the memory of what the call writes, or assigns, to them
            inputs = {number: key for number, key in inputs.items() if key[0] != "buffer"}
        found = {
            i: (
                [inputs[own]] if own in inputs and i not in kept else [],
                [j for j, other in results.items() if j != i and other == own],
            )
            for i, own in results.items()
        }
        return {i: others for i, others in found.items() if any(others)}

    @property
    def _own_memory(self) -> dict[fx.Node, int | None]:
        """Of inputs that stay where they are, the numbers of their storages."""
        given = zip(self.program.placeholders, self.program.inputs, strict=True)
        return {
            node: self.program.storages.get((i.kind, i.name))
            for node, i in given
            if i.kind != "tangent" and not (i.kind == "buffer" and i.name in self.program.state.assigned)
        }

    def backward(
        self,
        saved: list[Any],
        tangents: list[torch.Tensor],
        deferred: DeferredReduction,
        buffers: Mapping[str, torch.Tensor],
    ) -> Gradients:
        """Local gradients; none of parameters while their reduction is deferred. Histories go one step on."""
        assert self.cut.backward is not None
        # The graph empties this list, its only reference to each tensor: the callers' lists must be empty as well, or
        # saved activations would live until the end of the pass.
        values = [*saved, *tangents]
        saved.clear()
        tangents.clear()
        with torch.no_grad(), without_autocast(self.context.device.type):
            # Outside of no_sync, too, while sums of this step wait: reduced together they take one reduction.
            if deferred.active or deferred.holds(self):
                unreduced, count = self.run(self._reductions[0], values), self._first_gradient
                self._record(unreduced[:count], buffers)
                of_batch = self._named(unreduced[:count], self.cut.gradients[:count])
                deferred.add(self, unreduced[count:])
                return {} if deferred.active else self._with_deferred({}, deferred), of_batch
            outputs = self.run(self.cut.backward, values)
            self._record(outputs[: self._first_gradient], buffers)
            gradients = self._named(outputs)
            names = [o.name for o in self.cut.gradients if o.kind == "input_gradient"]
            of_batch = {name: gradients.pop(name) for name in names if name in gradients}
            return self._with_deferred(gradients, deferred), of_batch

    @property
    def _first_gradient(self) -> int:
        """How many outputs of the backward graph come before the gradients of parameters."""
        return sum(o.kind != "gradient" for o in self.cut.gradients)

    @cached_property
    def _recorded(self) -> list[str]:
        """Names of what is recorded in histories, which the backward graph returns first."""
        return [o.name for o in self.cut.gradients if o.kind == RECORDED]

    @cached_property
    def histories(self) -> tuple[str, ...]:
        """Buffers that the backward pass writes to."""
        return history_names(self._recorded)

    def _record(self, values: Sequence[torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
        """Write what the backward pass begins its outputs with into the histories."""
        record(dict(zip(self._recorded, values, strict=False)), buffers)

    @cached_property
    def _reductions(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The backward graph in two parts, the second of which reduces gradients."""
        assert self.cut.backward is not None
        return split_reductions(self.cut.backward, self._first_gradient)

    @cached_property
    def gradient_names(self) -> frozenset[str]:
        """Of the parameters for which the backward graph gives a gradient."""
        assert self.cut.backward is not None
        values: Any = self.cut.backward.graph.output_node().args[0]
        described = zip(self.cut.gradients, values[len(values) - len(self.cut.gradients) :], strict=True)
        return frozenset(o.name for o, v in described if v is not None and o.kind == "gradient")

    def _with_deferred(
        self, gradients: dict[str, torch.Tensor], deferred: DeferredReduction
    ) -> dict[str, torch.Tensor]:
        """Gradients plus those whose reduction was deferred, which may be of parameters that this step lacks."""
        for name, gradient in reduce_deferred(deferred).items():
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
        return gradients

    def _named(
        self, values: Sequence[torch.Tensor | None], described: Sequence[Output] | None = None
    ) -> dict[str, torch.Tensor]:
        """Gradients by name, each with memory of its own: clipping would scale a shared one twice."""
        described = self.cut.gradients if described is None else described
        pairs = zip(described, values, strict=True)
        gradients = {o.name: v for o, v in pairs if v is not None and o.kind in GRADIENTS}
        # Gradients of one bucket share a storage and do not overlap: cloning all of them would double its memory.
        end = 0
        for start, stop, name in sorted((*address_range(v), n) for n, v in gradients.items()):
            if start < end:
                gradients[name] = gradients[name].clone()
            end = max(end, stop)
        return gradients

    def wrap(self, index: int, local: torch.Tensor) -> torch.Tensor:
        """A result as the user gets it: scalars plain, other tensors as DTensors."""
        # A training loop calls loss.item() and logs it: a plain scalar needs no collective for that.
        if local.ndim == 0:
            return local
        type_, layout = self.types.results[str(index)]
        held, order = stored(local, type_, layout, self.context.coordinates), self.program.orders.get(str(index))
        if held is not local and order is not None:
            held = in_order(held, order)  # without its padding
        return from_local(held, self.context, type_.stored_shape, to_placements(type_, layout), order)

    def tangent(self, name: str, gradient: torch.Tensor | None) -> torch.Tensor:
        """The incoming gradient of a result, in the layout that the backward graph expects."""
        type_, layout = self.types.results[name]
        if gradient is not None:
            return part_of(gradient, type_, layout, self.context)
        node = next(
            n for n, i in zip(self.program.placeholders, self.program.inputs, strict=True)
            if i.kind == "tangent" and i.name == name
        )  # fmt: skip
        value = node.meta["val"]
        return torch.zeros(value.shape, dtype=value.dtype, device=self.context.device)


def _detached(value: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return value.detach()


def _view(
    node: fx.Node, memory: fx.Node, name: str, value: torch.Tensor, tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """A view of a tensor that has been written, for a view of the node whose value it has by now."""
    if node is memory:
        return tensors[name].detach()
    source = _view(node.all_input_nodes[0], memory, name, value, tensors)
    target: Any = node.target
    found: torch.Tensor = target(*fx.map_arg(node.args, lambda _: source), **node.kwargs)
    return found


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Around a graph, which has the casts that it was captured with: the user's autocast would add others."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def reduce_deferred(deferred: DeferredReduction) -> dict[str, torch.Tensor]:
    """Local gradients whose reduction was deferred, by parameter name; a collective call if there are any."""
    gradients: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for pending in deferred.pop_all():
            step = pending.step
            described = step.cut.gradients[step._first_gradient :]
            for name, gradient in step._named(step.run(step._reductions[1], pending.sums), described).items():
                if name not in pending.dropped:
                    gradients[name] = gradients[name] + gradient if name in gradients else gradient
    return gradients


def deliver(gradients: dict[str, torch.Tensor], deferred: DeferredReduction, context: MeshContext) -> None:
    """Add local gradients to ``.grad`` of their parameters, where no autograd function returns them."""
    named = dict(deferred.parameters()) if gradients else {}
    deferred.deliver({n: as_gradient(local, named[n], deferred.types[n], context) for n, local in gradients.items()})


def _strided_as(block: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A gradient with the strides of its parameter, which autograd gives it where tensors are plain."""
    # Of a DTensor autograd sees the global strides. Fused optimizers go through memory in one order for both.
    if block.stride() == parameter.stride() or (block.is_contiguous() and parameter.is_contiguous()):
        return block
    return torch.empty_like(parameter, dtype=block.dtype).copy_(block)


def as_gradient(
    local: torch.Tensor, like: torch.Tensor, known: tuple[TensorType, Layout], context: MeshContext
) -> torch.Tensor:
    """A local gradient as autograd gets it: of the shape and in the placements of its parameter."""
    type_, layout = known
    block = stored(local, type_, layout, context.coordinates) if type_.used else local
    # In the parameter's own placements: from others every operator of the optimizer would redistribute it.
    if not isinstance(like, DTensor):
        return from_local(block, context, like.shape, ())
    gradient, owner = local_like(_strided_as(block, like._local_tensor), like), owner_of(layout)
    return gradient if owner is None else with_owner(gradient, owner)
