"""What a stage holds in memory while a step runs: the same bookkeeping on a device and on an emulated mesh.

A value is whatever ``run`` computes with: a local tensor, or on an emulated mesh the tensors of all ranks of the stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from autopar.ir.ops.accumulate import GradientAccumulator
from autopar.pipeline.schedules import Order
from autopar.pipeline.stage_graphs import BACKWARD, FORWARD, INPUT, WEIGHT, StageGraph, StageGraphs, Transfer

Run = Callable[[StageGraph, int, list[Any]], list[Any]]
"""``run(graph, microbatch, values)``: what the graph returns; `ONCE` stands for the step as a whole."""

Source = Callable[[str, int], Any]
"""``source(name, microbatch)``: the value of a placeholder of the program."""

Join = Callable[[str, list[Any]], Any]
"""``join(name, values)``: a result of the whole batch from the rows of each microbatch."""

Exchange = Callable[[Sequence[Transfer], Mapping[int, "StageRun"]], None]
"""Carries out transfers between stages, into their ``values``."""

ONCE = -1
"""The number of no microbatch."""


class StageRun:
    """One stage in one step.

    Attributes:
        stage: its number.
        values: what outlives a microbatch: parameters of other stages, sums, what came from others at the end.
        rows: results that consist of rows, by name and microbatch.
        split: whether every backward runs in its two parts, since the schedule splits some.
        last: the microbatch with which the stage's backward passes end, and its sums are complete; None: there is none.
    """

    def __init__(
        self, stage_graphs: StageGraphs, stage: int, rows: Iterable[str], run: Run, source: Source, join: Join
    ) -> None:
        """No microbatch has run yet."""
        self.stage_graphs, self.stage = stage_graphs, stage
        self.values: dict[str, Any] = {}
        self.rows: dict[str, dict[int, Any]] = {name: {} for name in rows}
        self.split = False
        self.last: int | None = None
        self._ended = False  # what is computed from the stage's own sums is there
        self._run, self._source, self._join = run, source, join
        self._saved: dict[int, dict[str, Any]] = {}
        self._sent: dict[str, dict[int, list[Any]]] = {FORWARD: {}, BACKWARD: {}}
        self._totals = {kind: GradientAccumulator() for kind in (FORWARD, BACKWARD, INPUT, WEIGHT)}

    def forward(self, microbatch: int, received: Sequence[Any]) -> None:
        """Run a microbatch forward on what the stage before has sent."""
        values = dict(zip(self.stage_graphs.received(self.stage), received, strict=True))
        self._saved[microbatch] = values
        self._compute(FORWARD, microbatch)
        self._sent[FORWARD][microbatch] = [values[n] for n in self.stage_graphs.received(self.stage + 1)]
        # Saved for backward: what its graph takes, and what it sends on to the stage before as it is.
        needed = {*self._graph(BACKWARD).takes, *self.stage_graphs.returned(self.stage - 1)}
        self._saved[microbatch] = {n: v for n, v in values.items() if n in needed}

    def backward(self, microbatch: int, returned: Sequence[Any], kind: str = BACKWARD) -> None:
        """Run a microbatch backward, or the part of it for the input, on what the stage after has sent."""
        # DualPipeV runs some backwards whole and splits others. The parts are other graphs than the whole, with sums
        # of their own: a gradient must be summed by one of them for all microbatches.
        if kind == BACKWARD and self.split:
            self.backward(microbatch, returned, INPUT)
            self.weights(microbatch)
            return
        values = self._saved[microbatch]
        values.update(zip(self.stage_graphs.returned(self.stage), returned, strict=True))
        self._compute(kind, microbatch)
        self._sent[BACKWARD][microbatch] = [values[n] for n in self.stage_graphs.returned(self.stage - 1)]
        if kind == BACKWARD:
            del self._saved[microbatch]
        else:
            needed = self._graph(WEIGHT).takes
            self._saved[microbatch] = {n: values[n] for n in needed if n in values}

    def weights(self, microbatch: int) -> None:
        """Run the part of a microbatch's backward for the weights, after that for the input."""
        self._compute(WEIGHT, microbatch)
        del self._saved[microbatch]

    def take_sent(self, kind: str, microbatch: int) -> list[Any]:
        """What a microbatch sends to the next stage, forward or backward; it is freed here."""
        return self._sent[kind].pop(microbatch)

    def has_sent(self, kind: str, microbatch: int) -> bool:
        """Whether `take_sent` has something to return."""
        return microbatch in self._sent[kind]

    def prepare(self) -> None:
        """Compute what is hoisted, before the first microbatch."""
        self._run_once(self.stage_graphs.hoisted_graph(self.stage))

    def finish(self, level: int) -> None:
        """Run the graph of the step's end that comes after the transfers of this level."""
        if level == 0 and self._ended:
            return
        self._run_once(self.stage_graphs.final_graph(self.stage, level))

    def _run_once(self, graph: StageGraph) -> None:
        self.values.update(zip(graph.gives, self._run(graph, ONCE, self._arguments(graph, ONCE, {})), strict=True))

    def join_rows(self) -> None:
        """Join the rows of each result."""
        for name, parts in self.rows.items():
            if parts:
                # Schedules run microbatches in any order; rows are in that of the batch.
                self.values[name] = self._join(name, [value for _, value in sorted(parts.items())])

    def outputs(self) -> dict[str, Any]:
        """The program's outputs that the stage has, by name."""
        graph = self.stage_graphs.free_outputs()
        found = dict(zip(graph.gives, self._run(graph, ONCE, self._arguments(graph, ONCE, {})), strict=True))
        rows = [n for n in graph.gives if n in self.rows]
        if rows:  # of the batch alone, which has others in each microbatch
            every = range(self.stage_graphs.program.microbatches)
            parts = [
                dict(zip(graph.gives, self._run(graph, m, self._arguments(graph, m, {})), strict=True)) for m in every
            ]
            found |= {name: self._join(name, [part[name] for part in parts]) for name in rows}
        return {**self.values, **found}

    def parameter(self, name: str) -> Any:
        """A parameter that the stage holds, by the name of its placeholder."""
        return self._source(name, ONCE)

    def _graph(self, kind: str) -> StageGraph:
        return self.stage_graphs.microbatch_graph(self.stage, kind)

    def _compute(self, kind: str, microbatch: int) -> None:
        graph, saved = self._graph(kind), self._saved[microbatch]
        if microbatch == self.last and kind in (BACKWARD, WEIGHT):
            graph, self._ended = self.stage_graphs.last_graph(self.stage, kind), True
        with self._totals[kind].microbatch():
            results = self._run(graph, microbatch, self._arguments(graph, microbatch, saved))
        for name, value in zip(graph.gives, results, strict=True):
            if name in self.rows:
                self.rows[name][microbatch] = value
            elif name in self.stage_graphs.names_at_end:
                # A sum up to this microbatch replaces the last one's.
                self.values[name] = value
            saved[name] = value

    def _arguments(self, graph: StageGraph, microbatch: int, saved: Mapping[str, Any]) -> list[Any]:
        # The microbatch's own values first: `values` has the sums of earlier ones under the same names.
        arguments = []
        for name in graph.takes:
            if name in saved:
                arguments.append(saved[name])
            elif name in self.values:
                arguments.append(self.values[name])
            else:
                arguments.append(self._source(name, microbatch))
        return arguments


def begin(stage_graphs: StageGraphs, runs: Mapping[int, StageRun], order: Order, exchange: Exchange) -> None:
    """Prepare a step: see which backwards are split or last, send what stages share, and run what is hoisted."""
    for action in (a for row in order for a in row if a.stage in runs):
        if action.kind == INPUT:
            runs[action.stage].split = True
        if action.kind in (BACKWARD, WEIGHT):
            runs[action.stage].last = action.microbatch
    transfers = stage_graphs.parameter_transfers()
    for name, source, _ in transfers:
        if source in runs:
            runs[source].values[name] = runs[source].parameter(name)
    exchange(transfers, runs)
    for run in runs.values():
        run.prepare()


def end(stage_graphs: StageGraphs, runs: Mapping[int, StageRun], exchange: Exchange) -> None:
    """Run what runs once a step, after the last microbatch, and has not run with it."""
    for level in range(stage_graphs.rounds):
        exchange(stage_graphs.transfers(level), runs)
        for run in runs.values():
            run.finish(level)
    for run in runs.values():
        run.join_rows()
    exchange(stage_graphs.transfers(stage_graphs.rounds), runs)


def exchange_here(transfers: Sequence[Transfer], runs: Mapping[int, StageRun]) -> None:
    """Transfers between stages that are all in this process."""
    for name, source, target in transfers:
        if source in runs and target in runs:
            runs[target].values[name] = runs[source].values[name]
