"""`MicrobatchStep`: a step that runs its graph once for each microbatch, backward pass included, and adds up.

What all microbatches share, such as gathered parameters that the plan keeps, is computed once, before the first.
Sums of gradients are there when the forward call returns; the backward call reduces them, unless `no_sync` puts that
off, and scales them by the incoming gradient of the loss, in which they are linear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autopar.ir.layout import Factor, Layout, TensorType
from autopar.ir.node_info import info
from autopar.ir.ops.accumulate import GradientAccumulator
from autopar.ir.ops.random import current_seed, derive_seed, step_seed
from autopar.ir.program import Input, Microbatch, Program, is_hoisted
from autopar.ir.shards import common_blocks, join, parts_along, take
from autopar.passes.insert_contiguous import with_contiguous
from autopar.runtime.dtensor import computed, full_tensor, local_block, to_local
from autopar.runtime.mesh import MeshContext
from autopar.runtime.step.input_gradients import Gradients
from autopar.runtime.step.no_sync import DeferredReduction, split_reductions
from autopar.runtime.step.partition import ForwardBackward
from autopar.runtime.step.step import BoundaryLayouts, Step

STEADY, EACH, LAST = "steady", "each", "last"

HELD = ("parameter", "buffer")
"""Kinds of inputs that are the same in all microbatches."""


def cut_microbatches(program: Program) -> ForwardBackward:
    """Cut a bound program into what runs before the first microbatch, for each, and on the sums.

    Returns:
        As ``hoisted`` the graph of what all microbatches share; as ``forward`` that of one, to what it adds up and what
        else is taken; as ``backward`` that from these to all outputs of the program.
    """
    nodes = list(program.graph.graph.nodes)
    part = {n: LAST if n in program.per_step else STEADY if is_hoisted(n) else EACH for n in nodes}
    part |= dict.fromkeys(program.placeholders, EACH)
    shared = [n for n in nodes if part[n] == STEADY and any(part[u] != STEADY for u in n.users)]
    used = {a for n in program.per_step for a in n.all_input_nodes if a not in program.per_step}
    used |= {v for v in program.output_values if v is not None and v not in program.per_step}
    between = [n for n in nodes if n in used]
    graphs = {STEADY: fx.Graph(), EACH: fx.Graph(), LAST: fx.Graph()}
    known: dict[str, dict[fx.Node, fx.Node]] = {name: {} for name in graphs}

    def take(name: str, taken: Sequence[fx.Node]) -> None:
        for node in taken:
            known[name][node] = graphs[name].placeholder(node.name)
            known[name][node].meta = dict(node.meta)

    described = zip(program.placeholders, program.inputs, strict=True)
    take(STEADY, [n for n, i in described if i.kind in HELD])
    take(EACH, [*program.placeholders, *shared])
    take(LAST, between)
    for node in nodes:
        if node.op not in ("placeholder", "output"):
            known[part[node]][node] = graphs[part[node]].node_copy(node, known[part[node]].__getitem__)
            known[part[node]][node].meta = dict(node.meta)
    graphs[STEADY].output([known[STEADY][n] for n in shared])
    graphs[EACH].output([known[EACH][n] for n in between])
    graphs[LAST].output([None if v is None else known[LAST][v] for v in program.output_values])
    modules = {name: fx.GraphModule(program.graph, graph) for name, graph in graphs.items()}
    first = program.forward_outputs
    return ForwardBackward(
        modules[EACH], modules[LAST], program.inputs, program.outputs[:first], tuple(n.name for n in between),
        (str(program.loss),), program.outputs[first:], steady=modules[STEADY] if shared else None,
    )  # fmt: skip


def whole_type(type_: TensorType, dim: int | None, count: int) -> TensorType:
    """The type of a tensor of the whole batch, from that of a microbatch with its rows along ``dim``."""
    if dim is None:
        return type_
    first, *rest = type_.dims[dim] or (Factor("batch", 1),)
    dims = (*type_.dims[:dim], (replace(first, size=first.size * count), *rest), *type_.dims[dim + 1 :])
    used = tuple(n * count if d == dim else n for d, n in enumerate(type_.used))
    return replace(type_, dims=dims, used=used)


@dataclass(frozen=True)
class MicrobatchStep(Step):
    """What runs for one combination of shapes and modes, in microbatches; ``types`` are those of the whole batch."""

    @cached_property
    def part(self) -> Microbatch:
        """What a microbatch takes and gives."""
        return self.program.part

    @cached_property
    def _batch(self) -> dict[str, tuple[TensorType, Layout]]:
        """Type and layout of each tensor of a microbatch's batch."""
        described = zip(self.program.placeholders, self.program.inputs, strict=True)
        return {i.name: (info(n).type(), info(n).layout()) for n, i in described if i.kind == "batch"}

    @cached_property
    def _blocks(self) -> int:
        place, types = self._within
        rows = [(dim, self._batch[name][1]) for name, dim in self.part.rows.items()]
        results = [(dim, types.results[name][1]) for name, dim in self.part.results.items()]
        return common_blocks(rows + results, place.sizes)

    @property
    def _within(self) -> tuple[MeshContext, BoundaryLayouts]:
        """The devices that compute the same microbatch, and types on these."""
        return self.place, self.types

    @cached_property
    def _before(self) -> fx.GraphModule:
        """What `before` runs, whatever the strides of the batch."""
        assert self.part.before is not None
        return with_contiguous(self.part.before).graph

    def before(self, batch: Sequence[torch.Tensor], buffers: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """What is computed of the whole batch; a collective call where the batch is not whole on every rank."""
        program = self.part.before
        if program is None:
            return []
        arguments = []
        for node, spec in zip(program.placeholders, program.inputs, strict=True):
            value = buffers[spec.name] if spec.kind == "buffer" else batch[int(spec.name)]
            arguments.append(full_tensor(value).to(self.place.device) if node.users else None)
        with torch.no_grad(), torch.autocast(self.place.device.type, enabled=False):
            return list(self._before(*arguments))

    def forward(
        self, parameters: Sequence[torch.Tensor], buffers: dict[str, torch.Tensor], batch: Sequence[torch.Tensor]
    ) -> tuple[list[Any], list[Any]]:
        """Local results and gradients to be reduced; buffers get their new values in place.

        Args:
            parameters: in the order of the program's.
            buffers: by name.
            batch: this rank's part of the batch, and behind it the whole of what was computed before.
        """
        named = {
            name: computed(to_local(p), *self.types.parameters[name], self.place.sizes)
            for name, p in zip(self.parameters, parameters, strict=True)
        }
        one = torch.ones((), device=self.place.device, dtype=self._tangent_dtype)
        sources: dict[str, Callable[[str, int], torch.Tensor]] = {
            "parameter": lambda name, _: named[name],
            "buffer": lambda name, _: buffers[name],
            "tangent": lambda *_: one,
            "batch": lambda name, index: self._rows(name, batch[int(name)], index),
        }
        totals, seed = GradientAccumulator(), current_seed()
        joined: dict[str, list[torch.Tensor]] = {name: [] for name in self.part.results}
        values: list[Any] = []
        assert self.cut.backward is not None
        with torch.no_grad(), torch.autocast(self.place.device.type, enabled=False):
            shared = self._shared(lambda i: sources[i.kind](i.name, 0))
            for index in range(self.part.count):
                values.clear()  # what the microbatch before has left
                arguments = [*(sources[i.kind](i.name, index) for i in self.cut.inputs), *shared]
                with totals.microbatch(), step_seed(derive_seed(seed, index)):
                    values += self.cut.forward(*arguments)
                for name, found in joined.items():
                    found.append(values[self._places[name]])
            arguments.clear()
            shared.clear()
            outputs = list(self._reductions[0](values))
        first = len(self.cut.outputs)
        whole = {name: self._joined(name, found) for name, found in joined.items()}
        return self._results(outputs[:first], buffers, whole), outputs[first:]

    def _shared(self, value: Callable[[Input], torch.Tensor]) -> list[torch.Tensor]:
        """What all microbatches take behind their inputs."""
        if self.cut.steady is None:
            return []
        return list(self.cut.steady(*(value(i) for i in self.cut.inputs if i.kind in HELD)))

    def backward(self, saved: list[Any], tangents: list[torch.Tensor], deferred: DeferredReduction) -> Gradients:
        """Local gradients of parameters; none while their reduction is postponed."""
        (scale,) = tangents
        with torch.no_grad(), torch.autocast(self.place.device.type, enabled=False):
            if deferred.active or deferred.holds(self):
                deferred.add(self, [saved.pop(0) * scale for _ in range(len(saved))])
                return Gradients({} if deferred.active else self._with_postponed({}, deferred))
            return Gradients(self._scaled(self._named(self._reductions[1](saved)), scale, deferred))

    def _scaled(
        self, given: dict[str, torch.Tensor], scale: torch.Tensor, deferred: DeferredReduction
    ) -> dict[str, torch.Tensor]:
        found = {name: given.pop(name) * scale for name in list(given)}  # one at a time gives way to its multiple
        return self._with_postponed(found, deferred)

    @cached_property
    def _reductions(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        assert self.cut.backward is not None
        return split_reductions(self.cut.backward, len(self.cut.outputs))

    @cached_property
    def _tangent_dtype(self) -> torch.dtype:
        described = zip(self.program.placeholders, self.program.inputs, strict=True)
        dtype: torch.dtype = next(n.meta["val"].dtype for n, i in described if i.kind == "tangent")
        return dtype

    @cached_property
    def _places(self) -> dict[str, int]:
        """Where in what a microbatch returns the results are that consist of rows."""
        assert self.cut.backward is not None
        (made,) = self.cut.backward.graph.output_node().args
        names = [n.name for n in self.cut.backward.graph.nodes if n.op == "placeholder"]
        named = zip(self.program.outputs, made, strict=True)  # type: ignore[arg-type]
        return {o.name: names.index(v.name) for o, v in named if o.kind == "result" and o.name in self.part.results}

    def _rows(self, name: str, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """This rank's part of a microbatch's tensor."""
        (type_, layout), dim, count = self._batch[name], self.part.rows.get(name), self.part.count
        if name in self.types.batch:
            return tensor if dim is None else take(tensor, dim, self._local_blocks(dim, layout), count, index)
        mine = tensor if dim is None else take(tensor, dim, self._blocks, count, index)
        place, _ = self._within
        return local_block(mine, type_, layout, place.sizes, place.coordinates)

    def _joined(self, name: str, found: Sequence[torch.Tensor]) -> torch.Tensor:
        dim = self.part.results[name]
        return join(found, dim, self._local_blocks(dim, self._within[1].results[name][1]))

    def _local_blocks(self, dim: int, layout: Layout) -> int:
        return self._blocks // parts_along(dim, layout, self._within[0].sizes)
