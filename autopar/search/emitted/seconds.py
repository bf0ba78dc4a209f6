"""What the graph that a plan gives says of its step, by the event simulator."""

from __future__ import annotations

from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.memory.recompute import uniform
from autopar.search.emitted.rewritten import rewritten
from autopar.sharding.layer_classes import LayerClasses


def simulated_seconds(program: Program, plan: Plan, classes: LayerClasses) -> float:
    """Seconds of a step of the whole model, whose layers may be treated in several ways.

    Args:
        program: canonical program of one microbatch. Where it has three layers for many, their step is extrapolated.
        plan: for this program.
        classes: its layer classes.

    Returns:
        What the simulator says; the plan's own prediction where that is less than its kernels take, as where what is
        outside of the layers hides the third one, but not the others.
    """
    repeat, found = program.repeat, 0.0
    for share, part in uniform(plan, classes.count) if repeat is not None else [(1.0, plan)]:
        own = rewritten(program, part).seconds
        found += share * (own if repeat is None else repeat.extrapolate(own, rewritten(repeat.shorter, part).seconds))
    return found if found >= plan.predicted.compute_seconds else plan.predicted.step_seconds
