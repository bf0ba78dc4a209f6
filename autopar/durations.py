"""What each piece of a pipeline takes, from the graphs that its devices run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import Link
from autopar.pipeline.pieces import BACKWARD, FORWARD, INPUT, Cutting, Piece
from autopar.pipeline.schedules import Order, device_of
from autopar.plan import Plan
from autopar.program import values_of
from autopar.simulate import pipeline, simulate
from autopar.simulate.emitted import node_seconds

Floats = NDArray[np.float64]


class Durations:
    """Seconds of the pieces of every stage, kernels and collectives one after the other.

    Args:
        cutting: of the rewritten program, in stages.
        plan: for the devices of a stage.
        link: between stages.
    """

    def __init__(self, cutting: Cutting, plan: Plan, link: Link) -> None:
        self.cutting, self.link = cutting, link
        self.seconds = node_seconds(cutting.program, plan)
        self.stages = range(cutting.stages)

    def step(self, order: Order) -> float:
        """Seconds of a step in which the devices do this."""
        devices = device_of(order)
        split = any(a.kind == INPUT for row in order for a in row)
        backward = self._for_input if split else self._backward
        weight = self._backward - backward
        before, behind = self._once
        ends = [np.bincount(devices, weights=part, minlength=len(order)) for part in (before, behind)]
        tasks = pipeline(order, self._forward, backward, weight, self.hops, before=ends[0], after=ends[1])
        return simulate(tasks).step_seconds

    def compute(self, order: Order) -> float:
        """Seconds that a device works in a step, on average."""
        count = self.cutting.program.microbatches
        return float((count * (self._forward + self._backward) + sum(self._once)).sum()) / len(order)

    @cached_property
    def _forward(self) -> Floats:
        return np.array([self._of(self.cutting.piece(s, FORWARD)) for s in self.stages])

    @cached_property
    def _backward(self) -> Floats:
        return np.array([self._of(self.cutting.piece(s, BACKWARD)) for s in self.stages])

    @cached_property
    def _for_input(self) -> Floats:
        return np.array([self._of(self.cutting.piece(s, INPUT)) for s in self.stages])

    @cached_property
    def hops(self) -> Floats:
        """Seconds from each stage to the next, of the direction in which more is sent."""
        ways = [(self.cutting.received(s + 1), self.cutting.returned(s)) for s in self.stages[:-1]]
        return np.array([max(self._send(names) for names in both) for both in ways])

    @cached_property
    def _once(self) -> tuple[Floats, Floats]:
        """Seconds that each stage works before the microbatches and behind them."""
        cutting = self.cutting
        before = np.array([self._of(cutting.first(s)) for s in self.stages])
        behind = np.zeros(len(self.stages))
        for transfer in cutting.borrowed():
            before[[transfer.source, transfer.target]] += self._send([transfer.name])
        for level in range(cutting.rounds):
            behind += [self._of(cutting.last(s, level)) for s in self.stages]
            for transfer in cutting.transfers(level):
                behind[[transfer.source, transfer.target]] += self._send([transfer.name])
        return before, behind

    def _send(self, names: Sequence[str]) -> float:
        sizes = [sum(v.nbytes for v in values_of(self.cutting.node(name)) if v is not None) for name in names]
        return self.link.latency * len(sizes) + sum(sizes) / self.link.bandwidth

    def _of(self, piece: Piece) -> float:
        return float(sum(self.seconds.get(n.name, 0.0) for n in piece.graph.graph.nodes))
