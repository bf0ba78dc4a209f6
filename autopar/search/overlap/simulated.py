"""What the graph that a plan gives says of its step: by the event simulator, and what its chunks save."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.ir.node_info import graph_info
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.memory.recompute import uniform
from autopar.search.overlap.regions import BLOCKING, FORWARD
from autopar.search.overlap.step_time import feature
from autopar.search.peak import unverified
from autopar.search.predict import step_features
from autopar.sharding.dims import Dims
from autopar.sharding.layer_classes import LayerClasses
from autopar.simulate import simulate
from autopar.simulate.graph_tasks import emitted

NEGLIGIBLE = 1e-3
"""Share of a step."""


def simulated_seconds(program: Program, plan: Plan, classes: LayerClasses) -> float:
    """Seconds of a step of the whole model, whose layers may be treated in several ways.

    Args:
        program: canonical program of one microbatch. Where it has three layers for many, their step is extrapolated.
        plan: for this program.
        classes: its layer classes.
    """

    def seconds(program: Program, part: Plan) -> float:
        return float(simulate(emitted(unverified(program, part), part)).step_seconds)

    return _of_whole_model(program, plan, classes, seconds)


def with_chunks(program: Program, dims: Dims, plan: Plan, classes: LayerClasses) -> Plan:
    """The plan, predicted to take less by what chunks save of its forward pass; its objective stays as it is.

    Args:
        program: canonical program of one microbatch.
        dims: its dimension analysis.
        plan: for this program, with a prediction.
        classes: its layer classes.
    """
    # No graph is emitted for plans that have nothing to hide there but the sum of a loss.
    if not plan.overlap or _waited_for(program, dims, plan, classes) < NEGLIGIBLE * plan.predicted.step_seconds:
        return plan

    def seconds(program: Program, part: Plan) -> float:
        return graph_info(unverified(program, part).graph).chunked_seconds

    saved = _of_whole_model(program, plan, classes, seconds)
    known = plan.predicted
    step = known.step_seconds - saved
    return replace(plan, predicted=replace(known, step_seconds=step, chunked_seconds=saved))


def _waited_for(program: Program, dims: Dims, plan: Plan, classes: LayerClasses) -> float:
    """Seconds of collectives that kernels of the forward pass wait for."""
    found, axes = 0.0, len(plan.axes)
    for region, own in step_features(program, dims, plan, classes).items():
        if region.endswith(FORWARD):
            found += float(sum(own[feature(BLOCKING, axis, axes)] for axis in range(axes)))
    return found


def _of_whole_model(
    program: Program, plan: Plan, classes: LayerClasses, seconds: Callable[[Program, Plan], float]
) -> float:
    """Seconds of the whole model, from those of the layers that were captured."""
    repeat, found = program.repeat, 0.0
    for share, part in uniform(plan, classes.count) if repeat is not None else [(1.0, plan)]:
        own = seconds(program, part)
        found += share * (own if repeat is None else repeat.extrapolate(own, seconds(repeat.shorter, part)))
    return found
