"""What a stage holds while a step runs: the same bookkeeping on a device and on an emulated mesh.

A value is whatever ``run`` computes with: a local tensor, or on an emulated mesh those of all ranks of the stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from autopar.ir.ops.accumulate import GradientAccumulator
from autopar.pipeline.schedules import Order
from autopar.pipeline.stage_graphs import BACKWARD, FORWARD, INPUT, WEIGHT, StageGraph, StageGraphs, Transfer

Run = Callable[[StageGraph, int, list[Any]], list[Any]]
"""``run(piece, microbatch, values)``: what the piece gives; -1 stands for the step as a whole."""

Source = Callable[[str, int], Any]
"""``source(name, microbatch)``: what goes into a placeholder of the program."""

Join = Callable[[str, list[Any]], Any]
"""``join(name, values)``: what consists of the rows of all microbatches."""

Exchange = Callable[[Sequence[Transfer], Mapping[int, "StageRun"]], None]
"""Carries out transfers between stages, into their ``values``."""

ONCE = -1
"""The number of no microbatch."""


class StageRun:
    """One stage in one step.

    Attributes:
        stage: its number.
        values: what it has for the whole step: parameters of other stages, sums, what came from others at the end.
        rows: what consists of the rows of all microbatches, by name and microbatch.
        split: whether the backward always runs in its two parts, as it does for some microbatches: sums are of one
            graph each.
    """

    def __init__(
        self, cutting: StageGraphs, stage: int, rows: Iterable[str], run: Run, source: Source, join: Join
    ) -> None:
        """No microbatch has been here."""
        self.cutting, self.stage = cutting, stage
        self.values: dict[str, Any] = {}
        self.rows: dict[str, dict[int, Any]] = {name: {} for name in rows}
        self.split = False
        self._run, self._source, self._join = run, source, join
        self._saved: dict[int, dict[str, Any]] = {}
        self._sent: dict[str, dict[int, list[Any]]] = {FORWARD: {}, BACKWARD: {}}
        self._totals = {kind: GradientAccumulator() for kind in (FORWARD, BACKWARD, INPUT, WEIGHT)}

    def forward(self, microbatch: int, received: Sequence[Any]) -> None:
        """Run a microbatch forward on what the stage before has sent."""
        held = dict(zip(self.cutting.received(self.stage), received, strict=True))
        self._saved[microbatch] = held
        self._compute(FORWARD, microbatch)
        self._sent[FORWARD][microbatch] = [held[n] for n in self.cutting.received(self.stage + 1)]
        later = {*self._piece(BACKWARD).takes, *self.cutting.returned(self.stage - 1)}
        self._saved[microbatch] = {n: v for n, v in held.items() if n in later}

    def backward(self, microbatch: int, returned: Sequence[Any], kind: str = BACKWARD) -> None:
        """Run a microbatch backward, or the part of it for the input, on what the stage behind has sent."""
        if kind == BACKWARD and self.split:
            self.backward(microbatch, returned, INPUT)
            self.weights(microbatch)
            return
        held = self._saved[microbatch]
        held.update(zip(self.cutting.returned(self.stage), returned, strict=True))
        self._compute(kind, microbatch)
        self._sent[BACKWARD][microbatch] = [held[n] for n in self.cutting.returned(self.stage - 1)]
        if kind == BACKWARD:
            del self._saved[microbatch]
        else:
            later = self._piece(WEIGHT).takes
            self._saved[microbatch] = {n: held[n] for n in later if n in held}

    def weights(self, microbatch: int) -> None:
        """Run the part of a microbatch's backward for the weights, behind that for the input."""
        self._compute(WEIGHT, microbatch)
        del self._saved[microbatch]

    def take_sent(self, kind: str, microbatch: int) -> list[Any]:
        """What a microbatch leaves for the next stage, forward or backward; it is not held any longer."""
        return self._sent[kind].pop(microbatch)

    def has_sent(self, kind: str, microbatch: int) -> bool:
        """Whether there is something to take."""
        return microbatch in self._sent[kind]

    def prepare(self) -> None:
        """Compute what all microbatches share."""
        piece = self.cutting.first(self.stage)
        self.values.update(zip(piece.gives, self._run(piece, ONCE, self._arguments(piece, ONCE, {})), strict=True))

    def finish(self, level: int) -> None:
        """Run the piece of the step's end between two transfers."""
        piece = self.cutting.last(self.stage, level)
        self.values.update(zip(piece.gives, self._run(piece, ONCE, self._arguments(piece, ONCE, {})), strict=True))

    def join_rows(self) -> None:
        """Make values of what consists of rows."""
        for name, found in self.rows.items():
            if found:
                self.values[name] = self._join(name, [value for _, value in sorted(found.items())])

    def outputs(self) -> dict[str, Any]:
        """What the stage has of the program's outputs that it needs nobody else for, by name."""
        piece = self.cutting.free_outputs()
        found = dict(zip(piece.gives, self._run(piece, ONCE, self._arguments(piece, ONCE, {})), strict=True))
        return {**self.values, **found}

    def parameter(self, name: str) -> Any:
        """A parameter that the stage holds, by the name of its placeholder."""
        return self._source(name, ONCE)

    def _piece(self, kind: str) -> StageGraph:
        return self.cutting.piece(self.stage, kind)

    def _compute(self, kind: str, microbatch: int) -> None:
        piece, held = self._piece(kind), self._saved[microbatch]
        with self._totals[kind].microbatch():
            made = self._run(piece, microbatch, self._arguments(piece, microbatch, held))
        for name, value in zip(piece.gives, made, strict=True):
            if name in self.rows:
                self.rows[name][microbatch] = value
            elif name in self.cutting.kept_names:
                self.values[name] = value
            held[name] = value

    def _arguments(self, piece: StageGraph, microbatch: int, held: Mapping[str, Any]) -> list[Any]:
        found = []
        for name in piece.takes:
            known = next((place for place in (held, self.values) if name in place), None)
            found.append(self._source(name, microbatch) if known is None else known[name])
        return found


def begin(cutting: StageGraphs, runs: Mapping[int, StageRun], order: Order, exchange: Exchange) -> None:
    """Tell stages what is to come, and give them the parameters of others that they compute with."""
    for action in (a for row in order for a in row):
        if action.stage in runs and action.kind == INPUT:
            runs[action.stage].split = True
    borrowed = cutting.borrowed()
    for transfer in borrowed:
        if transfer.source in runs:
            run = runs[transfer.source]
            run.values[transfer.name] = run.parameter(transfer.name)
    exchange(borrowed, runs)
    for run in runs.values():
        run.prepare()


def end(cutting: StageGraphs, runs: Mapping[int, StageRun], exchange: Exchange) -> None:
    """Run what comes once, when all microbatches are through."""
    for level in range(cutting.rounds):
        exchange(cutting.transfers(level), runs)
        for run in runs.values():
            run.finish(level)
    for run in runs.values():
        run.join_rows()
    exchange(cutting.transfers(cutting.rounds), runs)


def exchange_here(transfers: Sequence[Transfer], runs: Mapping[int, StageRun]) -> None:
    """Transfers between stages that are all in this process."""
    for transfer in transfers:
        if transfer.source in runs and transfer.target in runs:
            runs[transfer.target].values[transfer.name] = runs[transfer.source].values[transfer.name]
