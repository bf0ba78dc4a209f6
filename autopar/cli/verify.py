"""``autopar verify``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from autopar.cli.options import (
    DIFFERENT,
    Axes,
    Debug,
    Json,
    Model,
    Policy,
    Schedule,
    StageAxis,
    Stages,
    Virtual,
    clear_errors,
    parse_axes,
    pipeline_pins,
)
from autopar.cli.task import load_task


def verify_command(
    model: Model,
    axes: Axes,
    plan: Annotated[
        str | None,
        typer.Option(metavar="FILE.json|random", help="A plan, or a random feasible one; default: search."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of a random plan.")] = 0,
    microbatches: Annotated[int | None, typer.Option(help="Default: 1, or what the stages need.", min=1)] = None,
    stages: Stages = None,
    schedule: Schedule = None,
    virtual: Virtual = None,
    stage_axis: StageAxis = None,
    precision: Policy = None,
    tolerance: Annotated[float, typer.Option(help="Largest error that counts as equal.")] = 1e-9,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run the rewritten graphs of every device in this process, in float64, and compare with the plain model."""
    with clear_errors(debug):
        sizes = parse_axes(axes)
        # Written so that NaN is refused, too.
        if not tolerance >= 0:
            raise ValueError(f"--tolerance must be a number that is not negative, got {tolerance}")
        # After the options: the user's file may take long to import.
        task = load_task(model)
        from autopar.explain.tables.equivalence import agrees, equivalence_dict, equivalence_table
        from autopar.ir.plan import Plan
        from autopar.verify.verify import verify

        # A missing file is reported before anything is captured.
        chosen = plan if plan in (None, "random") else Plan.load(str(plan))
        pins = pipeline_pins(stages, schedule, virtual, stage_axis)
        pins |= {} if microbatches is None else {"microbatches": microbatches}
        if pins and isinstance(chosen, Plan):
            raise ValueError(f"--{next(iter(pins))} applies to a new plan; --plan {plan} has its own")
        report = verify(
            task.model,
            task.batch,
            sizes,
            **task.losses,
            plan=chosen,
            seed=seed,
            pins=pins,
            precision=precision,
        )
        text = json.dumps(equivalence_dict(report, tolerance), indent=1) if as_json else ""
        typer.echo(text or equivalence_table(report, tolerance))
        # After the report is printed: scripts read the exit code, people the table.
        if not agrees(report, tolerance):
            raise typer.Exit(DIFFERENT)
