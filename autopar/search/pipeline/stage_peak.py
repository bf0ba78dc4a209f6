"""What the devices of a pipeline hold: under a plan for those of one stage, and under a finished plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from autopar.ir.plan import Plan, Scatter
from autopar.ir.program import Program
from autopar.pipeline.schedules import Order, in_two_parts, order_of
from autopar.search.budget.lagrangian import fits
from autopar.search.options import Search
from autopar.search.pipeline.deep_models import RepeatedStages
from autopar.search.pipeline.shape import PipelineShape, ScheduledStages
from autopar.search.pipeline.stage_devices import StageDevices
from autopar.search.pipeline.stage_plan import StagePlan, fastest, sending_stages, staged

MOST_SHIFTS, SHIFT = 8, 1.5
"""How often layers are shifted to devices that have room for them; and by how much, as a power of what is too much."""


def peak_in_stages(program: Program, plan: Plan, stages: ScheduledStages, search: Search) -> dict[str, float]:
    """Bytes by category on the device that holds the most, which is remembered in ``stages``.

    Args:
        program: of one microbatch, padded or not.
        plan: for the devices of a stage, if these had the whole model.
        stages: into which it is cut.
        search: for which it is cut.
    """
    held = fastest_stages(program, plan, stages, search).peak(stages.actions)
    if program is stages.part:  # a plan of a padded program is none of the program as it is
        stages.measured.append((sum(held.values()), stages.schedule, plan))
    return held


def fastest_stages(program: Program, plan: Plan, stages: ScheduledStages, search: Search) -> StagePlan:
    """A program cut into stages under a plan, sent as a whole or in parts, whichever is faster under the schedule.

    Stages take as long as each other. Where devices differ and some do not hold theirs, these get less of the model.
    """
    shape, actions, memory = stages.shape, stages.actions, stages.memory
    cut = _cutter(program, plan, shape, stages.devices, search, [actions])
    best = found = fastest(cut(()), actions)
    if memory is None or stages.devices.alike or shape.modules or search.recipe == "random":
        return best
    weights = [1.0] * shape.stages
    for _ in range(MOST_SHIFTS):
        needed = found.needed(actions)
        if fits(max(needed), memory):
            return found
        # What is too much on one device goes to all others, so more than its share has to go.
        weights = [w * max(1.0, needed[c] / memory) ** SHIFT for w, c in zip(weights, shape.coordinates, strict=True)]
        found = fastest(cut(weights), actions)
        best = min(best, found, key=lambda own: max(own.needed(actions)))
    return best


def stage_plans(
    program: Program, plan: Plan, shape: PipelineShape, devices: StageDevices, search: Search, orders: Sequence[Order]
) -> list[StagePlan]:
    """A program cut into stages under a plan, sent as a whole, and in parts as each of these orders can."""
    return _cutter(program, plan, shape, devices, search, orders)(())


def _cutter(
    program: Program, plan: Plan, shape: PipelineShape, devices: StageDevices, search: Search, orders: Sequence[Order]
) -> Callable[[Sequence[float]], list[StagePlan]]:
    """What cuts a program into stages, with weights of their seconds."""
    ways, plan = scatters(shape.axis, orders), replace(plan, cluster=devices.whole)
    if program.repeat is None:
        return lambda weights: staged(program, plan, shape, devices, search, ways, weights)
    blocks = RepeatedStages(program, plan, shape, devices, any(map(in_two_parts, orders)))
    return lambda weights: blocks.staged(shape, ways, weights)


def scatters(axis: str, orders: Iterable[Order]) -> list[Scatter]:
    """The ways to send in parts that go with these orders."""
    return [Scatter(axis, after) for after in dict.fromkeys(map(sending_stages, orders))]


def cut_again(plan: Plan, part: Program, devices: StageDevices) -> tuple[StagePlan, PipelineShape, Order]:
    """The stages of a finished plan, of what shape they are, and what their devices do.

    Args:
        plan: with stages.
        part: of one microbatch.
        devices: along the axis of the stages.
    """
    assert plan.pipeline is not None
    actions, modules = order_of(plan), tuple(stage.modules[0] for stage in plan.stages[1:])
    virtual, schedules = len(plan.stages) // len(actions), (plan.pipeline.schedule,)
    places = plan.pipeline.places
    shape = PipelineShape(plan.axes, plan.pipeline.axis, len(actions), virtual, schedules, modules, places)
    inner, ways = replace(plan.inner, scatter=None), [plan.scatter] if plan.scatter else []
    if part.repeat is None:
        cuts = staged(part, inner, shape, devices, Search(), ways)
    else:
        cuts = RepeatedStages(part, inner, shape, devices, in_two_parts(actions)).staged(shape, ways)
    return cuts[-1], shape, actions
