"""A whole step of a rewritten program on an emulated mesh: from global values to global values, in microbatches too."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

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
        # As in `MicrobatchStep`: which rows are in a microbatch decides what random operators draw for them.
        part, inner = self.local.part, self.plan.inner
        rows = [(dim, inner.batch[name]) for name, dim in part.rows.items()]
        results = [(dim, inner.results[name]) for name, dim in part.results.items()]
        return common_blocks(rows + results, inner.axis_sizes)

    def inputs(self, program: Program, turn: int) -> list[torch.Tensor]:
        """Global tensors for every placeholder of one microbatch."""
        inputs, part = [], self.local.part
        for spec in program.inputs:
            value, dim = self.given[spec.kind, spec.name], part.rows.get(spec.name) if spec.kind == "batch" else None
            inputs.append(value if dim is None else take(value, dim, self.blocks, part.count, turn))
        return inputs

    def local_inputs(self, turn: int) -> list[list[torch.Tensor]]:
        """The local tensors of each placeholder, on every rank."""
        sizes = self.plan.inner.axis_sizes
        every = [self.runs(rank, turn) for rank in coordinates(sizes)]
        whole = {index: self.inputs(self.local, index) for index in dict.fromkeys(index for index, _ in every)}
        return [
            [block(whole[index][i], info(n).type(), info(n).layout(), sizes, where) for index, where in every]
            for i, n in enumerate(self.local.placeholders)
        ]

    def runs(self, rank: tuple[int, ...], turn: int) -> tuple[int, tuple[int, ...]]:
        """The microbatch that a rank runs in a turn, and the coordinates whose rows of it these are.

        A rank whose share of the batch ends before others' runs its last microbatch again, which adds nothing.
        """
        shares = self.plan.shares
        if shares is None:
            return turn, rank
        axis = self.plan.axis_names.index(shares.axis)
        own = shares.slots[rank[axis]]
        index, where = own[min(turn, len(own) - 1)]
        return index, (*rank[:axis], where, *rank[axis + 1 :])

    @property
    def even(self) -> EmulatedStep:
        """The step in equal shares."""
        return replace(self, plan=replace(self.plan, shares=None))

    def _totals(self) -> GradientAccumulator:
        shares = self.plan.shares
        if shares is None:
            return GradientAccumulator()
        axis = self.plan.axis_names.index(shares.axis)
        return _SharedAccumulator([shares.counts[rank[axis]] for rank in coordinates(self.plan.axis_sizes)])

    def run(self) -> list[Whole | None]:
        """Every output, whole."""
        if self.plan.pipeline is None:
            return self.run_flat()
        local = as_dtype(self.local, self.dtype)
        inputs = functools.cache(self.local_inputs)
        with default_dtype(self.dtype):  # a quotient of whole numbers has the default dtype
            outputs = emulate_pipeline(local, self.plan, inputs, self.draw)
        return self._joined([self._whole(values) for values in outputs])

    def run_flat(self, observers: Observers = lambda turn: None) -> list[Whole | None]:
        """The same, stages or not: all devices of a stage run the whole graph."""
        local, inner = as_dtype(self.local, self.dtype), self.plan.inner
        # The copy has other nodes, without the layouts that an observer compares with.
        own = dict(zip(local.graph.graph.nodes, self.local.graph.graph.nodes, strict=True))
        totals, results = self._totals(), []
        shared: dict[fx.Node, list[object]] = {}
        turns = self.local.part.count if self.plan.shares is None else max(self.plan.shares.counts)
        for turn in range(turns):
            observe = observers(turn)
            seen = None if observe is None else _renamed(observe, own)
            with totals.microbatch(), default_dtype(self.dtype):
                inputs = self.local_inputs(turn)
                outputs = emulate(local, inner.axis_names, inner.axis_sizes, inputs, shared, seen, self.draw)
                results.append(self._whole(outputs))
        return self._joined(results)

    def run_on_one_device(self, part: Program) -> list[Whole | None]:
        """The same of the program of one microbatch before it is rewritten: one device has all of its rows."""
        totals, results, whole = GradientAccumulator(), [], as_dtype(part, self.dtype)
        for turn in range(self.local.part.count):
            with totals.microbatch(), default_dtype(self.dtype):
                outputs = run_whole(whole, self.inputs(part, turn))
            results.append([None if value is None else (value, 0.0) for value in outputs])
        return self._joined(results)

    def _whole(self, outputs: Sequence[Sequence[torch.Tensor | None]]) -> list[Whole | None]:
        last, sizes = info(self.local.output_node), self.plan.inner.axis_sizes
        return [
            None
            if type_ is None or not (present := [p for p in parts if p is not None])
            else assemble(present, type_, layout, sizes)
            for parts, type_, layout in zip(outputs, last.input_types, last.input_layouts, strict=True)
        ]

    def _joined(self, results: list[list[Whole | None]]) -> list[Whole | None]:
        """The outputs of a step from those of its microbatches: rows of all, and all else from the last one."""
        part = self.local.part
        # Sums over microbatches and buffers are complete in the last.
        for i, output in enumerate(self.local.outputs):
            parts = [value for outputs in results if (value := outputs[i]) is not None]
            if output.kind == "result" and output.name in part.results:
                joined = join([whole for whole, _ in parts], part.results[output.name], self.blocks)
                results[-1][i] = joined, max(replicas for _, replicas in parts)
        return results[-1]


class _SharedAccumulator(GradientAccumulator):
    """Sums on ranks of which each runs some microbatches: those of further turns are not added."""

    def __init__(self, counts: Sequence[int]) -> None:
        """Of each rank's number of microbatches."""
        super().__init__()
        self._counts, self._turn = counts, -1

    def add(self, term: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """The sum with one more term; ranks call it in turn."""
        self._turn += self._next == 0
        if self._turn < self._counts[self._next % len(self._counts)]:
            return super().add(term, op)
        self._next += 1
        return self.sums[self._next - 1]


def _renamed(observe: Observer, nodes: Mapping[fx.Node, fx.Node]) -> Observer:
    """An observer that sees nodes of a copied graph as those of the original."""
    return lambda node, values: observe(nodes[node], values)
