"""`MicrobatchStep`: a step that runs its graph, backward pass included, once for each microbatch.

What is microbatch-invariant and hoisted, such as gathered parameters, is computed once, before the first microbatch.
The sums of gradients are complete when the forward call returns. The backward call reduces them, unless `no_sync`
defers that, and scales them by the incoming gradient of the loss, in which they are linear.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autopar._torch_compat import LazyGraphModule
from autopar.costs.mixed.shares import Slot
from autopar.ir.layout import Factor, Layout, TensorType
from autopar.ir.node_info import info
from autopar.ir.ops.accumulate import GradientAccumulator
from autopar.ir.ops.random import current_seed, derive_seed, step_seed
from autopar.ir.program import Input, Microbatch, Program, is_hoisted
from autopar.ir.shards import common_blocks, join, parts_along, take
from autopar.passes.kernels.insert_contiguous import with_contiguous
from autopar.runtime.dtensor import computed, full_tensor, local_block, to_local
from autopar.runtime.mesh import MeshContext
from autopar.runtime.step.no_sync import DeferredReduction, split_reductions
from autopar.runtime.step.partition import ForwardBackward
from autopar.runtime.step.step import BoundaryLayouts, Gradients, Step, without_autocast

HOISTED, MICROBATCH, LAST = "hoisted", "microbatch", "last"
"""The graphs of a step: before the first microbatch, of each microbatch, and after the last, on the sums."""

INVARIANT_INPUTS = ("parameter", "buffer")
"""Kinds of inputs that are the same in all microbatches."""


def cut_microbatches(program: Program) -> ForwardBackward:
    """Cut a bound program into a graph before the first microbatch, one of each microbatch, and one on the sums.

    Returns:
        As ``hoisted`` the graph of what all microbatches share; as ``forward`` that of one microbatch, which returns
        its terms of the sums and what else the last graph takes; as ``backward`` the last graph, from these to all
        outputs of the program.
    """
    nodes = list(program.graph.graph.nodes)
    graph_of = {n: LAST if n in program.per_step else HOISTED if is_hoisted(n) else MICROBATCH for n in nodes}
    graph_of |= dict.fromkeys(program.placeholders, MICROBATCH)
    shared = [n for n in nodes if graph_of[n] == HOISTED and any(graph_of[u] != HOISTED for u in n.users)]
    # The last graph takes even the program's inputs from the microbatch's graph, which passes them on.
    used = {a for n in program.per_step for a in n.all_input_nodes if a not in program.per_step}
    used |= {v for v in program.output_values if v is not None and v not in program.per_step}
    boundary = [n for n in nodes if n in used]
    graphs = {HOISTED: fx.Graph(), MICROBATCH: fx.Graph(), LAST: fx.Graph()}
    known: dict[str, dict[fx.Node, fx.Node]] = {name: {} for name in graphs}

    def add_inputs(name: str, inputs: Sequence[fx.Node]) -> None:
        for node in inputs:
            known[name][node] = graphs[name].placeholder(node.name)
            known[name][node].meta = dict(node.meta)

    described = zip(program.placeholders, program.inputs, strict=True)
    add_inputs(HOISTED, [n for n, i in described if i.kind in INVARIANT_INPUTS])
    add_inputs(MICROBATCH, [*program.placeholders, *shared])
    add_inputs(LAST, boundary)
    for node in nodes:
        if node.op not in ("placeholder", "output"):
            own = known[graph_of[node]]
            own[node] = graphs[graph_of[node]].node_copy(node, own.__getitem__)
            own[node].meta = dict(node.meta)
    graphs[HOISTED].output([known[HOISTED][n] for n in shared])
    graphs[MICROBATCH].output([known[MICROBATCH][n] for n in boundary])
    graphs[LAST].output([None if v is None else known[LAST][v] for v in program.output_values])
    modules = {name: LazyGraphModule(program.graph, graph) for name, graph in graphs.items()}
    first = program.forward_outputs
    return ForwardBackward(
        modules[MICROBATCH], modules[LAST], program.inputs, program.outputs[:first], tuple(n.name for n in boundary),
        (str(program.loss),), program.outputs[first:], hoisted=modules[HOISTED] if shared else None,
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
    """What runs for one combination of shapes and modes, in microbatches; ``types`` are those of the whole batch.

    Attributes:
        shared: the number of the axis along which devices have shares of the batch; None: all run the same number.
        slots: what this device runs then.
    """

    shared: int | None = None
    slots: tuple[Slot, ...] = ()

    @cached_property
    def part(self) -> Microbatch:
        """What a microbatch takes and returns."""
        return self.program.part

    @cached_property
    def _batch(self) -> dict[str, tuple[TensorType, Layout]]:
        """Type and layout of each tensor of a microbatch's batch."""
        described = zip(self.program.placeholders, self.program.inputs, strict=True)
        return {i.name: (info(n).type(), info(n).layout()) for n, i in described if i.kind == "batch"}

    @cached_property
    def _blocks(self) -> int:
        """Into how many blocks the rows of the batch are cut, each with a part of every microbatch."""
        # Not one block a microbatch: a rank holds consecutive rows of the whole batch, and must find rows of every
        # microbatch among them, since no rows move between ranks.
        context, types = self._stage_mesh
        rows = [(dim, self._batch[name][1]) for name, dim in self.part.rows.items()]
        results = [(dim, types.results[name][1]) for name, dim in self.part.results.items()]
        return common_blocks(rows + results, context.sizes)

    @property
    def _stage_mesh(self) -> tuple[MeshContext, BoundaryLayouts]:
        """The mesh of the devices that compute the same microbatch, and the types on it."""
        return self.context, self.types

    @cached_property
    def _whole_batch_graph(self) -> fx.GraphModule:
        """The graph that `run_on_whole_batch` runs, whatever the strides of the batch."""
        assert self.part.before is not None
        return with_contiguous(self.part.before).graph

    def run_on_whole_batch(self, batch: Sequence[torch.Tensor], buffers: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Compute what depends on the whole batch; a collective call where the batch is not whole on every rank.

        Such as the number of tokens that a loss divides by: computed from a microbatch alone, it would be another.
        """
        program = self.part.before
        if program is None:
            return []
        arguments = []
        for node, spec in zip(program.placeholders, program.inputs, strict=True):
            value = buffers[spec.name] if spec.kind == "buffer" else batch[int(spec.name)]
            # Batches are large: what the graph does not use is not gathered.
            arguments.append(full_tensor(value).to(self.context.device) if node.users else None)
        with torch.no_grad(), without_autocast(self.context.device.type):
            return list(self._whole_batch_graph(*arguments))

    def forward(
        self, parameters: Sequence[torch.Tensor], buffers: dict[str, torch.Tensor], batch: Sequence[torch.Tensor]
    ) -> tuple[list[Any], list[Any]]:
        """Local results and gradients to be reduced; buffers get their new values in place.

        Args:
            parameters: in the order of the program's.
            buffers: by name.
            batch: this rank's part of the batch, and after it what `run_on_whole_batch` returned, whole.
        """
        local_parameters = {
            name: computed(to_local(p), *self.types.parameters[name], self.context.sizes)
            for name, p in zip(self.parameters, parameters, strict=True)
        }
        # The gradient of the loss is not known before the backward call, which scales the gradients by it.
        one = torch.ones((), device=self.context.device, dtype=self._tangent_dtype)
        sources: dict[str, Callable[[str, int, tuple[int, ...]], torch.Tensor]] = {
            "parameter": lambda name, *_: local_parameters[name],
            "buffer": lambda name, *_: buffers[name],
            "tangent": lambda *_: one,
            "batch": lambda name, index, where: self._rows(name, batch[int(name)], index, where),
        }
        totals, seed = GradientAccumulator(), current_seed()
        rows: dict[str, list[torch.Tensor]] = {name: [] for name in self.part.results}
        values: list[Any] = []
        assert self.cut.backward is not None
        with torch.no_grad(), without_autocast(self.context.device.type):
            shared = self._hoisted_values(lambda i: sources[i.kind](i.name, 0, ()))
            for turn, (index, where) in enumerate(self._turns):
                # Frees what the last microbatch returned, before the next one allocates.
                values.clear()
                arguments = [*(sources[i.kind](i.name, index, where) for i in self.cut.inputs), *shared]
                # A seed of its own: with that of the step all microbatches would drop out the same elements.
                with totals.microbatch(), step_seed(derive_seed(seed, turn)):
                    values += self.run(self.cut.forward, *arguments)
                for name, parts in rows.items():
                    parts.append(values[self._row_positions[name]])
            # Gathered parameters are not needed any more: their memory is for the last graph.
            arguments.clear()
            shared.clear()
            outputs = self.run(self._reductions[0], values)
        first = len(self.cut.outputs)
        whole = {name: self._joined(name, parts) for name, parts in rows.items()}
        return self._results(outputs[:first], buffers, whole), outputs[first:]

    def _hoisted_values(self, value: Callable[[Input], torch.Tensor]) -> list[torch.Tensor]:
        """What all microbatches take after their inputs."""
        if self.cut.hoisted is None:
            return []
        return self.run(self.cut.hoisted, *(value(i) for i in self.cut.inputs if i.kind in INVARIANT_INPUTS))

    def backward(
        self,
        saved: list[Any],
        tangents: list[torch.Tensor],
        deferred: DeferredReduction,
        buffers: Mapping[str, torch.Tensor],
    ) -> Gradients:
        """Local gradients of parameters; none while their reduction is deferred. Histories go one step on."""
        (scale,) = tangents
        with torch.no_grad(), without_autocast(self.context.device.type):
            self._record([saved.pop(0) for _ in self._recorded], buffers)
            if deferred.active or deferred.holds(self):
                # Scaled before they are added up: each backward pass has a scale of its own.
                deferred.add(self, [saved.pop(0) * scale for _ in range(len(saved))])
                return {} if deferred.active else self._with_deferred({}, deferred), {}
            return self._scaled(self._of_parameters(self.run(self._reductions[1], saved)), scale, deferred), {}

    def _of_parameters(self, values: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Gradients by name, of what comes behind what is recorded."""
        return self._named(values, self.cut.gradients[len(self._recorded) :])

    def _scaled(
        self, unscaled: dict[str, torch.Tensor], scale: torch.Tensor, deferred: DeferredReduction
    ) -> dict[str, torch.Tensor]:
        # Popped, so that each is freed when its multiple is there: all of them twice would be the peak.
        gradients = {name: unscaled.pop(name) * scale for name in list(unscaled)}
        return self._with_deferred(gradients, deferred)

    @cached_property
    def _reductions(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        assert self.cut.backward is not None
        return split_reductions(self.cut.backward, len(self.cut.outputs) + len(self._recorded))

    @cached_property
    def _tangent_dtype(self) -> torch.dtype:
        described = zip(self.program.placeholders, self.program.inputs, strict=True)
        dtype: torch.dtype = next(n.meta["val"].dtype for n, i in described if i.kind == "tangent")
        return dtype

    @cached_property
    def _row_positions(self) -> dict[str, int]:
        """Position, in what a microbatch returns, of each result that consists of rows."""
        assert self.cut.backward is not None
        (returned,) = self.cut.backward.graph.output_node().args
        names = [n.name for n in self.cut.backward.graph.nodes if n.op == "placeholder"]
        named = zip(self.program.outputs, returned, strict=True)  # type: ignore[arg-type]
        return {o.name: names.index(v.name) for o, v in named if o.kind == "result" and o.name in self.part.results}

    @cached_property
    def _turns(self) -> list[tuple[int, tuple[int, ...]]]:
        """The microbatches that this rank runs, each with the coordinates whose rows of it these are."""
        own = self._stage_mesh[0].coordinates
        if self.shared is None:
            return [(index, own) for index in range(self.part.count)]
        return [(index, (*own[: self.shared], where, *own[self.shared + 1 :])) for index, where in self.slots]

    def _rows(self, name: str, tensor: torch.Tensor, index: int, where: tuple[int, ...]) -> torch.Tensor:
        """The part of a microbatch's tensor that the rank at some coordinates has."""
        (type_, layout), dim, count = self._batch[name], self.part.rows.get(name), self.part.count
        if name in self.types.batch and self.shared is None:
            return tensor if dim is None else take(tensor, dim, self._local_blocks(dim, layout), count, index)
        # Every rank has it whole: as it has results of `run_on_whole_batch`, and all of the batch where it has shares.
        rows = tensor if dim is None else take(tensor, dim, self._blocks, count, index)
        context, _ = self._stage_mesh
        return local_block(rows, type_, layout, context.sizes, where).to(context.device)

    def part_of_batch(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What this rank is given of a batch tensor; with shares all of it, which stays where it is until then."""
        return super().part_of_batch(name, tensor) if self.shared is None else full_tensor(tensor).detach()

    def _joined(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """A result of the whole batch from those of the microbatches: rows in the order of the batch."""
        dim = self.part.results[name]
        return join(parts, dim, self._local_blocks(dim, self._stage_mesh[1].results[name][1]))

    def _local_blocks(self, dim: int, layout: Layout) -> int:
        return self._blocks // parts_along(dim, layout, self._stage_mesh[0].sizes)
