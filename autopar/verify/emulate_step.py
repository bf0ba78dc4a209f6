"""A whole step of a rewritten program on an emulated mesh: from global values to global values, in microbatches too."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.ir.node_info import info
from autopar.ir.ops.accumulate import GradientAccumulator
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.shards import assemble, block, common_blocks, coordinates, join, take
from autopar.runtime.step.microbatch_step import INVARIANT_INPUTS, cut_microbatches
from autopar.verify.emulate import Observer, as_program, emulate, run_whole
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
        local = as_dtype(self.local, self.dtype)
        if self.local.part.count > 1:
            return self._run_microbatches(local, observers)
        observe = observers(0)
        with GradientAccumulator().microbatch(), default_dtype(self.dtype):
            return self._whole(self._emulated(local, self.local_inputs(0), observe))

    def _run_microbatches(self, local: Program, observers: Observers) -> list[Whole | None]:
        """Run the graphs that devices run, each as often as they do: what runs once sees no earlier microbatch."""
        cut, totals, results = cut_microbatches(local), self._totals(), []
        assert cut.backward is not None
        hoisted, each, last = (None if g is None else as_program(g) for g in (cut.hoisted, cut.forward, cut.backward))
        assert each is not None and last is not None
        rows = self._row_positions(last)
        shared: list[Any] = []
        for turn in range(local.part.count if self.plan.shares is None else max(self.plan.shares.counts)):
            observe = observers(turn)
            with default_dtype(self.dtype):
                inputs = self.local_inputs(turn)
                if turn == 0 and hoisted is not None:
                    invariant = [v for v, i in zip(inputs, local.inputs, strict=True) if i.kind in INVARIANT_INPUTS]
                    shared = self._emulated(hoisted, invariant, observe)
                with totals.microbatch():
                    values = self._emulated(each, [*inputs, *shared], observe)
                results.append(self._whole([[] if at is None else values[at] for at in rows]))
        with default_dtype(self.dtype):
            results[-1] = self._whole(self._emulated(last, values, observe))
        return self._joined(results)

    def _emulated(self, program: Program, inputs: Sequence[Sequence[torch.Tensor]], observe: Observer | None) -> Any:
        """What a graph returns on each rank, of a copy of the rewritten one or a part of it."""
        inner = self.plan.inner
        # The copy has other nodes, without the layouts that an observer compares with.
        seen = None if observe is None else _renamed(observe, self._nodes)
        return emulate(program, inner.axis_names, inner.axis_sizes, inputs, seen, self.draw)

    @functools.cached_property
    def _nodes(self) -> dict[str, fx.Node]:
        return {n.name: n for n in self.local.graph.graph.nodes}

    def _row_positions(self, last: Program) -> list[int | None]:
        """Of each output that consists of rows: its position in what each microbatch returns."""
        placeholders = last.placeholders
        return [
            placeholders.index(v) if o.kind == "result" and o.name in self.local.part.results and v else None
            for o, v in zip(self.local.outputs, last.output_values, strict=True)
        ]

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


def _renamed(observe: Observer, nodes: Mapping[str, fx.Node]) -> Observer:
    """An observer that sees nodes of a copied graph as those of the original, whose names they have."""
    return lambda node, values: observe(nodes[node.name], values)
