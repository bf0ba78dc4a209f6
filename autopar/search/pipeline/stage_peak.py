"""What the devices of a pipeline hold: under a plan for those of one stage, and under a finished plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autopar.costs.cluster import Link
from autopar.ir.plan import Plan, Scatter
from autopar.ir.program import Program
from autopar.pipeline.schedules import Order, order_of
from autopar.pipeline.stage_graphs import INPUT
from autopar.search.options import Search
from autopar.search.pipeline.deep_models import RepeatedStages
from autopar.search.pipeline.shape import PipelineShape, ScheduledStages
from autopar.search.pipeline.stage_plan import StagePlan, fastest, sending_stages, staged


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
    """A program cut into stages under a plan, sent as a whole or in parts, whichever is faster under the schedule."""
    return fastest(stage_plans(program, plan, stages.shape, stages.link, search, [stages.actions]), stages.actions)


def stage_plans(
    program: Program, plan: Plan, shape: PipelineShape, link: Link, search: Search, orders: Sequence[Order]
) -> list[StagePlan]:
    """A program cut into stages under a plan, sent as a whole, and in parts as each of these orders can."""
    ways = scatters(shape.axis, orders)
    if program.repeat is None:
        return staged(program, plan, shape, link, search, ways)
    split = any(action.kind == INPUT for rows in orders for row in rows for action in row)
    return RepeatedStages(program, plan, shape, link, split).staged(shape, ways)


def scatters(axis: str, orders: Iterable[Order]) -> list[Scatter]:
    """The ways to send in parts that go with these orders."""
    return [Scatter(axis, after) for after in dict.fromkeys(map(sending_stages, orders))]


def cut_again(plan: Plan, part: Program, link: Link) -> tuple[StagePlan, PipelineShape, Order]:
    """The stages of a finished plan, of what shape they are, and what their devices do.

    Args:
        plan: with stages.
        part: of one microbatch.
        link: between stages.
    """
    assert plan.pipeline is not None
    actions, modules = order_of(plan), tuple(stage.modules[0] for stage in plan.stages[1:])
    virtual, schedules = len(plan.stages) // len(actions), (plan.pipeline.schedule,)
    shape = PipelineShape(plan.axes, plan.pipeline.axis, len(actions), virtual, schedules, modules)
    inner, ways = replace(plan.inner, scatter=None), [plan.scatter] if plan.scatter else []
    split = any(action.kind == INPUT for row in actions for action in row)
    if part.repeat is None:
        cuts = staged(part, inner, shape, link, Search(), ways)
    else:
        cuts = RepeatedStages(part, inner, shape, link, split).staged(shape, ways)
    return cuts[-1], shape, actions
