"""What a device holds at its peak under a plan, measured on the graph that the plan gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.memory.deep_models import peak_of_blocks
from autopar.memory.liveness import Moment, moments, peak_memory, peak_snapshot
from autopar.memory.peak_snapshot import PeakSnapshot
from autopar.memory.recompute import uniform
from autopar.passes import PASSES, run_passes
from autopar.passes.pipeline.assign_stages import assign_stages
from autopar.sharding.dims import analyze
from autopar.sharding.layer_classes import LayerClasses, layer_classes


class PeakMeter(Protocol):
    """How the peak of a plan is measured: on its whole graph, or on that of the heaviest pipeline stage."""

    def held(self, plan: Plan) -> Mapping[str, float]:
        """Bytes by category at the peak."""


class StageMeter(Protocol):
    """How a pipeline measures the plan of a program for the devices of a stage."""

    def of(self, program: Program) -> PeakMeter:
        """The meter of a program, whose dims may be padded."""


@dataclass(frozen=True)
class GraphPeak:
    """The peak of a plan's whole graph."""

    program: Program
    classes: LayerClasses

    def held(self, plan: Plan) -> Mapping[str, float]:
        """Bytes by category at the peak."""
        return peak_of(self.program, plan, self.classes)


def rewritten(program: Program, plan: Plan) -> Program:
    """The rewritten graph. It is measured and never run, so that it is not checked after each pass."""
    return run_passes(program, plan, PASSES, verified=False)


def rewritten_in_stages(program: Program, plans: Sequence[Plan]) -> list[Program]:
    """The rewritten graphs of plans that differ in their stages alone, which passes before `assign_stages` ignore."""
    first = PASSES.index(assign_stages)
    shared = run_passes(program, plans[0], PASSES[:first], verified=False)
    return [run_passes(shared, plan, PASSES[first:], verified=False) for plan in plans]


def peak_of(program: Program, plan: Plan, classes: LayerClasses | None = None) -> dict[str, float]:
    """Bytes by category at the peak of a device; of a deep model, extrapolated from the layers that were captured."""
    if program.repeat is None:
        return peak_memory(rewritten(program, plan), plan)
    classes = classes or layer_classes(program, analyze(program))
    shorter = program.repeat.shorter

    def held(program: Program, part: Plan) -> list[Moment]:
        return moments(rewritten(program, part), part)

    parts = [(share, part) for share, part in uniform(plan, classes.count) if share > 0]
    known = [(share, held(program, part), held(shorter, part)) for share, part in parts]
    return peak_of_blocks(known, program.repeat)


def peak_snapshot_of(program: Program, plan: Plan, classes: LayerClasses) -> PeakSnapshot:
    """The live tensors at the peak; of a deep model, those of the captured layers with the bytes of all."""
    found = peak_snapshot(rewritten(program, plan), plan)
    if program.repeat is None:
        return found
    held = peak_of(program, plan, classes)
    return replace(found, held=held, totals=(sum(held.values()),))
