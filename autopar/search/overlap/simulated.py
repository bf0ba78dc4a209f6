"""What the graph that a plan gives says of its step, by the event simulator."""

from __future__ import annotations

from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.memory.recompute import uniform
from autopar.search.peak import unverified
from autopar.sharding.layer_classes import LayerClasses
from autopar.simulate import simulate
from autopar.simulate.graph_tasks import emitted


def simulated_seconds(program: Program, plan: Plan, classes: LayerClasses) -> float:
    """Seconds of a step of the whole model, whose layers may be treated in several ways.

    Args:
        program: canonical program of one microbatch. Where it has three layers for many, their step is extrapolated.
        plan: for this program.
        classes: its layer classes.
    """

    def seconds(program: Program, part: Plan) -> float:
        return float(simulate(emitted(unverified(program, part), part)).step_seconds)

    repeat, found = program.repeat, 0.0
    for share, part in uniform(plan, classes.count) if repeat is not None else [(1.0, plan)]:
        own = seconds(program, part)
        found += share * (own if repeat is None else repeat.extrapolate(own, seconds(repeat.shorter, part)))
    return found
