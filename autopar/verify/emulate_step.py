"""A whole step of a rewritten program on an emulated mesh: from global values to global values, in microbatches too."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar.ir.node_info import info
from autopar.ir.ops.accumulate import GradientAccumulator
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.shards import assemble, block, common_blocks, coordinates, join, take
from autopar.verify.emulate import Observer, emulate, run_whole
from autopar.verify.emulate_pipeline import emulate_pipeline
from autopar.verify.float64 import as_dtype, default_dtype

Whole = tuple[torch.Tensor, float]
"""A global tensor, and how far its replicas differ."""

Observers = Callable[[int], Observer | None]
"""``observers(microbatch)``: what sees the nodes of one microbatch."""


@dataclass(frozen=True)
class EmulatedStep:
    """A rewritten program with what goes in.

    Attributes:
        program: of the whole batch, canonical.
        local: rewritten.
        plan: for which it was.
        values: global tensors for every placeholder of ``program``.
        dtype: in which everything is computed.
        draw: gives tensors random strides, see `autopar.verify.emulate.emulate`.
    """

    program: Program
    local: Program
    plan: Plan
    values: Sequence[torch.Tensor]
    dtype: torch.dtype
    draw: random.Random | None = None

    @functools.cached_property
    def given(self) -> dict[tuple[str, str], torch.Tensor]:
        """Global tensors by kind and name of the input, with what is computed before the first microbatch."""
        given = {(i.kind, i.name): v for i, v in zip(self.program.inputs, self.values, strict=True)}
        before = self.local.part.before
        if before is not None:
            with default_dtype(self.dtype):
                more = run_whole(as_dtype(before, self.dtype), [given[i.kind, i.name] for i in before.inputs])
            first = sum(kind == "batch" for kind, _ in given)
            given.update({("batch", str(first + i)): v for i, v in enumerate(more) if v is not None})
        return given

    @functools.cached_property
    def blocks(self) -> int:
        """Into how many blocks the rows of a batch are cut, each with a part of every microbatch."""
        part, inner = self.local.part, self.plan.inner
        cut = [(dim, inner.batch[name]) for name, dim in part.rows.items()]
        return common_blocks(cut + [(dim, inner.results[n]) for n, dim in part.results.items()], inner.axis_sizes)

    def inputs(self, program: Program, turn: int) -> list[torch.Tensor]:
        """Global tensors for every placeholder of one microbatch."""
        found, part = [], self.local.part
        for spec in program.inputs:
            value, dim = self.given[spec.kind, spec.name], part.rows.get(spec.name) if spec.kind == "batch" else None
            found.append(value if dim is None else take(value, dim, self.blocks, part.count, turn))
        return found

    def local_inputs(self, turn: int) -> list[list[torch.Tensor]]:
        """The local tensors of each placeholder, on every rank."""
        sizes = self.plan.inner.axis_sizes
        found = []
        for node, mine in zip(self.local.placeholders, self.inputs(self.local, turn), strict=True):
            type_, layout = info(node).type(), info(node).layout()
            found.append([block(mine, type_, layout, sizes, where) for where in coordinates(sizes)])
        return found

    def run(self) -> list[Whole | None]:
        """Every output, whole."""
        if self.plan.pipeline is None:
            return self.run_flat()
        placed = as_dtype(self.local, self.dtype)
        inputs = functools.cache(self.local_inputs)
        with default_dtype(self.dtype):  # of quotients of whole numbers
            made = emulate_pipeline(placed, self.plan, inputs, self.draw)
        return self._joined([self._whole(outputs) for outputs in made])

    def run_flat(self, observers: Observers = lambda turn: None) -> list[Whole | None]:
        """The same, stages or not: all devices of a stage run the whole graph."""
        placed, inner = as_dtype(self.local, self.dtype), self.plan.inner
        own = dict(zip(placed.graph.graph.nodes, self.local.graph.graph.nodes, strict=True))
        totals, made = GradientAccumulator(), []
        shared: dict[fx.Node, list[object]] = {}
        for turn in range(self.local.part.count):
            observe = observers(turn)
            seen = None if observe is None else _renamed(observe, own)
            with totals.microbatch(), default_dtype(self.dtype):
                inputs = self.local_inputs(turn)
                outputs = emulate(placed, inner.axis_names, inner.axis_sizes, inputs, shared, seen, self.draw)
                made.append(self._whole(outputs))
        return self._joined(made)

    def _whole(self, outputs: Sequence[Sequence[torch.Tensor | None]]) -> list[Whole | None]:
        last, sizes = info(self.local.output_node), self.plan.inner.axis_sizes
        return [
            None
            if type_ is None or not (there := [p for p in parts if p is not None])
            else assemble(there, type_, layout, sizes)
            for parts, type_, layout in zip(outputs, last.input_types, last.input_layouts, strict=True)
        ]

    def _joined(self, made: list[list[Whole | None]]) -> list[Whole | None]:
        """What the last microbatch leaves, and results whose rows are those of all."""
        part = self.local.part
        for i, output in enumerate(self.local.outputs):
            found = [m for turns in made if (m := turns[i]) is not None]
            if output.kind == "result" and output.name in part.results:
                joined = join([whole for whole, _ in found], part.results[output.name], self.blocks)
                made[-1][i] = joined, max(replicas for _, replicas in found)
        return made[-1]


def _renamed(observe: Observer, nodes: Mapping[fx.Node, fx.Node]) -> Observer:
    """An observer that sees nodes of a copied graph as those of the original."""
    return lambda node, values: observe(nodes[node], values)
