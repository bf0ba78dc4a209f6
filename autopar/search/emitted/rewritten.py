"""`rewritten`: the graph that a plan gives, to be measured and not run, and what is read off it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.ir.node_info import ChunkedMove, graph_info
from autopar.ir.plan import Certificate, Plan, Predicted
from autopar.ir.program import Program
from autopar.memory.liveness import MemoryPoint, memory_points, peak_memory, peak_snapshot
from autopar.memory.peak_snapshot import PeakSnapshot
from autopar.passes import PASSES, run_passes
from autopar.passes.pipeline.assign_stages import assign_stages
from autopar.simulate import simulate
from autopar.simulate.graph_tasks import emitted

KEPT = 8
"""So many graphs are kept: of the plans that were measured last."""


def unverified(program: Program, plan: Plan) -> Program:
    """The rewritten graph; checking it after each pass would take most of the time."""
    return run_passes(program, plan, PASSES, verified=False)


def unverified_in_stages(program: Program, plans: Sequence[Plan]) -> list[Program]:
    """The graphs under plans that differ in their stages alone: passes before `assign_stages` run once for all."""
    # Passes before it do not look at stages.
    first = PASSES.index(assign_stages)
    alike = run_passes(program, plans[0], PASSES[:first], verified=False)
    return [run_passes(alike, plan, PASSES[first:], verified=False) for plan in plans]


@dataclass(frozen=True, eq=False)
class Rewritten:
    """A rewritten graph; each figure is worked out when it is asked for first.

    Attributes:
        program: canonical program of one microbatch.
        plan: for it.
    """

    program: Program
    plan: Plan

    @cached_property
    def points(self) -> Sequence[MemoryPoint]:
        """What a device holds at each program point."""
        return tuple(memory_points(self._graph, self.plan))

    @cached_property
    def peak(self) -> Mapping[str, float]:
        """Bytes by category where a device holds the most."""
        return peak_memory(self._graph, self.plan)

    @cached_property
    def snapshot(self) -> PeakSnapshot:
        """That program point, tensor by tensor."""
        return peak_snapshot(self._graph, self.plan)

    @cached_property
    def seconds(self) -> float:
        """Of a step, by the event simulator."""
        return float(simulate(emitted(self._graph, self.plan)).step_seconds)

    @cached_property
    def chunked(self) -> Sequence[ChunkedMove]:
        """What is communicated in chunks beside the products of its rows."""
        return graph_info(self._graph.graph).chunked

    @cached_property
    def _graph(self) -> Program:
        return unverified(self.program, self.plan)


def rewritten(program: Program, plan: Plan) -> Rewritten:
    """The graph that a plan gives; within `graphs_kept` one that was asked for a moment ago is not made again."""
    kept = _kept.get()
    kept = [] if kept is None else kept
    own = chosen(plan)
    at = next((i for i, r in enumerate(kept) if r.program is program and r.plan == own), None)
    found = Rewritten(program, own) if at is None else kept.pop(at)
    kept.append(found)
    del kept[:-KEPT]
    return found


def chosen(plan: Plan) -> Plan:
    """A plan without what it says of itself, which passes do not read."""
    return replace(plan, predicted=Predicted(), certificate=Certificate(0.0, 0.0, "", ""), modules=())


@contextmanager
def graphs_kept() -> Iterator[None]:
    """While plans are compared: what a step holds, how long it takes and how it is chunked is read off one graph."""
    token = _kept.set([])
    try:
        yield
    finally:
        _kept.reset(token)


_kept: ContextVar[list[Rewritten] | None] = ContextVar("graphs of plans", default=None)
