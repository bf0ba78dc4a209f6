"""``autopar check``: what a plan file says of its costs and its bound, derived anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.options import (
    Debug,
    Json,
    Limit,
    Memory,
    Model,
    Pins,
    Policy,
    Recipe,
    RolesOption,
    Schedule,
    StageAxis,
    Stages,
    Virtual,
    clear_errors,
    parse_pins,
    parse_roles,
    pipeline_pins,
)
from autopar.cli.task import load_task


def check_command(
    file: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan written by `plan --save`.")],
    model: Model,
    memory: Memory = None,
    precision: Policy = None,
    recipe: Recipe = None,
    roles: RolesOption = "",
    pin: Pins = None,
    microbatches: Annotated[int | None, typer.Option(help="As for `plan`.", min=1)] = None,
    stages: Stages = None,
    schedule: Schedule = None,
    virtual: Virtual = None,
    stage_axis: StageAxis = None,
    time_limit: Limit = 60.0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Derive a plan's costs and lower bound anew, with the options that it was made with, and verify the bound."""
    with clear_errors(debug):
        from autopar.explain.tables.progress import SearchProgress
        from autopar.ir.plan import Plan
        from autopar.search.options import Search

        # A missing or damaged file is reported before the user's file is imported.
        plan = Plan.load(file)
        pins = pipeline_pins(stages, schedule, virtual, stage_axis)
        pins |= {} if microbatches is None else {"microbatches": microbatches}
        pins |= parse_pins(pin, dict(plan.axes))
        said = bool(pins or recipe or roles)
        search = Search(time_limit=time_limit, recipe=recipe, roles=parse_roles(roles), pins=pins) if said else None
        task = load_task(model)
        with SearchProgress() as progress:
            checked = plan.check(
                task.model, task.batch, **task.losses, memory=memory, precision=precision, search=search,
                progress=progress,
            )  # fmt: skip
        typer.echo(json.dumps(checked.to_dict(), indent=1) if as_json else checked.summary())
