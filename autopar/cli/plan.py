"""``autopar plan``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from autopar.cli.options import (
    STOPPED,
    Axes,
    Debug,
    Json,
    Limit,
    Machine,
    Memory,
    Model,
    NoCache,
    Optimizer,
    Pins,
    Policy,
    Recipe,
    RolesOption,
    Schedule,
    StageAxis,
    Stages,
    Virtual,
    check_target,
    clear_errors,
    parse_axes,
    parse_pins,
    parse_roles,
    pipeline_pins,
)
from autopar.cli.task import ModelAndBatch, load_task


def plan_command(
    model: Model,
    cluster: Machine,
    axes: Axes,
    memory: Memory = None,
    optimizer: Optimizer = "adamw",
    precision: Policy = None,
    recipe: Recipe = None,
    roles: RolesOption = "",
    pin: Pins = None,
    microbatches: Annotated[
        int | None, typer.Option(help="Parts of the batch, one after the other; default: as memory asks for.", min=1)
    ] = None,
    microbatch: Annotated[
        int | None, typer.Option(help="Samples at a time, with axes pp, dp, tp of recipe megatron.", min=1)
    ] = None,
    stages: Stages = None,
    schedule: Schedule = None,
    virtual: Virtual = None,
    stage_axis: StageAxis = None,
    recompute: Annotated[
        str, typer.Option(metavar="none|selective|full", help="What the backward makes again.")
    ] = "none",
    time_limit: Limit = 60.0,
    check: Annotated[bool, typer.Option("--check", help="Verify the lower bound apart from the search.")] = False,
    no_cache: NoCache = False,
    save: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write the plan to a file.")] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write a page with timeline, memory and what-ifs.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Find the fastest layouts of a model on a mesh, for devices that need not be here, and compare with recipes."""
    with clear_errors(debug):
        sizes = parse_axes(axes)
        check_target("--save", save)
        check_target("--report", report)
        task = load_task(model)
        from autopar.explain.hybrid.predict import STAGE_NAMES

        by_hand = microbatch is not None or recompute != "none"
        pipelined = schedule is not None or virtual is not None
        if stages is None and (by_hand or pipelined or any(name in STAGE_NAMES for name in sizes)):
            _check_hybrid(recipe, roles, pin, stage_axis, save, report)
            _print_hybrid(
                task,
                as_json,
                cluster=cluster,
                axes=sizes,
                microbatch=microbatch,
                schedule=schedule or "1f1b",
                virtual=virtual or 1,
                recipe=recipe,
                recompute=recompute,
                memory=memory,
                optimizer=optimizer,
                precision=precision,
                time_limit=time_limit,
            )
            return
        from autopar.explain.recipes import plan_and_compare
        from autopar.explain.tables.progress import SearchProgress
        from autopar.explain.tables.recipes import comparison_list, comparison_table
        from autopar.ir.plan import INTERRUPTED
        from autopar.ir.precision import Precision
        from autopar.search.options import Search

        if stages is not None and by_hand:
            raise ValueError("--microbatch and --recompute are of plans without --stages; write --microbatches")
        pins = pipeline_pins(stages, schedule, virtual, stage_axis)
        pins |= {} if microbatches is None else {"microbatches": microbatches}
        pins |= parse_pins(pin, sizes)
        search = Search(
            time_limit=time_limit, recipe=recipe, roles=parse_roles(roles), pins=pins, check=check, cache=not no_cache
        )
        with SearchProgress() as progress:
            found, beside = plan_and_compare(
                task.model,
                task.batch,
                cluster=cluster,
                axes=sizes,
                loss_fn=task.loss_fn,
                memory=memory,
                optimizer=optimizer,
                precision=Precision.resolve(precision),
                search=search,
                progress=progress,
            )
        if save is not None:
            found.save(save)
            typer.echo(f"saved {save}", err=True)
        stopped = found.certificate.method == INTERRUPTED
        if report is not None and not stopped:
            _write_report(report, task, found, beside, memory, Precision.resolve(precision), search)
        if as_json:
            typer.echo(json.dumps({**found.to_dict(), "recipes": comparison_list(found, beside)}, indent=1))
        else:
            typer.echo(f"{found.summary()}\n\n{comparison_table(found, beside)}")
        if stopped:
            raise typer.Exit(STOPPED)


def _write_report(
    file: Path, task: ModelAndBatch, found: Any, beside: Any, memory: str | None, precision: Any, search: Any
) -> None:
    from autopar.compiler import default_memory
    from autopar.costs.memory import parse_bytes
    from autopar.explain.html import report_page
    from autopar.explain.tables.progress import counted

    budget = default_memory(found.cluster) if memory is None else parse_bytes(memory)
    own = {"loss_fn": task.loss_fn, "precision": precision, "search": search}
    with counted("what if: searched") as tick:
        page = report_page(task.model, task.batch, found, beside, budget=budget, tick=tick, **own)
    file.write_text(page, encoding="utf-8")
    typer.echo(f"saved {file}", err=True)


def _check_hybrid(
    recipe: str | None,
    roles: str,
    pin: list[str] | None,
    stage_axis: str | None,
    save: Path | None,
    report: Path | None,
) -> None:
    """Stages and microbatches are simulated for one recipe; what goes with runnable plans only is refused.

    Raises:
        ValueError: names the option and the remedy.
    """
    from autopar.explain.hybrid.predict import RECIPES

    if recipe not in RECIPES:
        raise ValueError(
            f"stages, microbatches and recomputation are predicted for --recipe {' or '.join(RECIPES)}; add it, or "
            "--stages for a pipeline that runs"
        )
    if stage_axis is not None:
        raise ValueError("--stage-axis is of a pipeline that runs: add --stages; else the stages lie along axis pp")
    if pin:
        raise ValueError("--pin is of plans that can be run: add --stages, or leave it out")
    if roles:
        raise ValueError("--roles says nothing here: the names of the axes do (pp, dp, tp); leave it out")
    if save is not None:
        raise ValueError("--save writes plans that can be run; one with stages is only predicted: use --json")
    if report is not None:
        raise ValueError("--report is of plans that can be run; for one with stages use --json, or simulate --trace")


def _print_hybrid(task: ModelAndBatch, as_json: bool, *, precision: str | None, **options: Any) -> None:
    from autopar.explain.hybrid.predict import predict_hybrid
    from autopar.explain.tables.hybrid import hybrid_table
    from autopar.explain.tables.progress import SearchProgress
    from autopar.ir.precision import Precision

    policy = Precision.resolve(precision)
    with SearchProgress() as progress:
        found = predict_hybrid(
            task.model, task.batch, loss_fn=task.loss_fn, precision=policy, progress=progress, **options
        )
    typer.echo(json.dumps(found.to_dict(), indent=1) if as_json else hybrid_table(found.to_dict()))
