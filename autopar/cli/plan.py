"""``autopar plan``: a plan that can be run, or the prediction of a hand-made plan with stages.

The options are read into values first (`Target`, `autopar.Search`, `Outputs`), which the rest of the module passes on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.options import (
    STOPPED,
    Axes,
    Debug,
    Fuse,
    Inexact,
    Json,
    Limit,
    Machine,
    Memory,
    Model,
    NoCache,
    Optimizer,
    Pins,
    Policy,
    Quantize,
    Recipe,
    RolesOption,
    Schedule,
    StageAxis,
    Stages,
    Target,
    Virtual,
    check_target,
    clear_errors,
    parse_axes,
    parse_pins,
    parse_quantized,
    parse_roles,
    parse_shares,
    pipeline_pins,
)
from autopar.cli.task import ModelAndBatch, load_task

if TYPE_CHECKING:
    from autopar.explain.recipes import Comparison
    from autopar.ir.plan import Plan
    from autopar.search.options import Search

Microbatches = Annotated[
    int | None, typer.Option(help="Parts that the batch is split into; default: as many as memory needs.", min=1)
]
SharesOption = Annotated[
    str,
    typer.Option(
        "--shares", metavar="AXIS=search|N,N,...", help="Microbatches by speed, along an axis of role data: node=3,1."
    ),
]
Microbatch = Annotated[
    int | None, typer.Option(help="Samples per microbatch, with axes pp, dp, tp of recipe megatron.", min=1)
]
Recompute = Annotated[
    str, typer.Option(metavar="none|selective|full", help="What the backward pass recomputes, with axes pp, dp, tp.")
]
Check = Annotated[bool, typer.Option("--check", help="Verify the lower bound apart from the search.")]
NoCompare = Annotated[bool, typer.Option("--no-compare", help="Do not search the recipes beside the plan.")]
Survive = Annotated[
    int | None,
    typer.Option(metavar="N", help="Also what it costs that N nodes may be lost at once: memory, seconds.", min=1),
]
Save = Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write the plan to a file.")]
Report = Annotated[
    Path | None, typer.Option(metavar="FILE.html", help="Write a page with timeline, memory and what-ifs.")
]


@dataclass(frozen=True)
class Outputs:
    """Where the result goes.

    Attributes:
        save: file of the plan.
        report: file of the page.
        as_json: whether stdout gets JSON, not a table.
        compare: whether recipes are searched, too.
        survive: how many nodes may be lost at once, of which the cost is to be said; None: it is not.
    """

    save: Path | None
    report: Path | None
    as_json: bool
    compare: bool
    survive: int | None = None

    def check(self) -> None:
        """Raise before the search if a file cannot be written."""
        check_target("--save", self.save)
        check_target("--report", self.report)


@dataclass(frozen=True)
class StagedByHand:
    """A plan with stages that is predicted, not run: the options that only it has.

    Attributes:
        recipe: of the tensor axis.
        microbatch: samples per microbatch.
        schedule: order of the microbatches.
        virtual: runs of blocks on each stage.
        recompute: none, selective or full.
        time_limit: seconds of the search.
    """

    recipe: str | None
    microbatch: int | None
    schedule: str
    virtual: int
    recompute: str
    time_limit: float


def plan_command(
    model: Model,
    cluster: Machine,
    axes: Axes,
    memory: Memory = None,
    optimizer: Optimizer = "adamw",
    precision: Policy = None,
    compile: Fuse = False,
    recipe: Recipe = None,
    roles: RolesOption = "",
    inexact: Inexact = "",
    quantized: Quantize = "",
    pin: Pins = None,
    microbatches: Microbatches = None,
    shares: SharesOption = "",
    microbatch: Microbatch = None,
    stages: Stages = None,
    schedule: Schedule = None,
    virtual: Virtual = None,
    stage_axis: StageAxis = None,
    recompute: Recompute = "none",
    time_limit: Limit = 60.0,
    check: Check = False,
    no_cache: NoCache = False,
    no_compare: NoCompare = False,
    survive: Survive = None,
    save: Save = None,
    report: Report = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Find the fastest layouts of a model on a mesh, for devices that need not be here, and compare with recipes."""
    with clear_errors(debug):
        target = Target(cluster, parse_axes(axes), memory, optimizer, precision, compile)
        outputs = Outputs(save, report, as_json, not no_compare, survive)
        # Before the search: minutes later there would be nowhere to write the plan.
        outputs.check()
        task = load_task(model)
        # Without --stages, options and axis names of pipelines ask for the prediction of a hand-made plan.
        by_hand = microbatch is not None or recompute != "none"
        pipelined = schedule is not None or virtual is not None
        if stages is None and (by_hand or pipelined or _has_stage_axis(target)):
            _check_staged_by_hand(recipe, roles, pin, stage_axis, outputs)
            options = StagedByHand(recipe, microbatch, schedule or "1f1b", virtual or 1, recompute, time_limit)
            _print_prediction(task, target, options, as_json)
            return
        if stages is not None and by_hand:
            raise ValueError("--microbatch and --recompute are for plans without --stages; write --microbatches")
        if survive is not None and stages is not None:
            raise ValueError("--survive is not predicted for a plan with stages; leave one of them out")
        from autopar.search.options import Search

        # Options are pins with names of their own; --pin may pin layouts besides.
        pins = pipeline_pins(stages, schedule, virtual, stage_axis)
        pins |= {} if microbatches is None else {"microbatches": microbatches}
        pins |= parse_shares(shares)
        given_roles, allowed = parse_roles(roles), tuple(word.strip() for word in inexact.split(",") if word.strip())
        # Pins are of the axes within a worker.
        pins |= parse_pins(pin, {axis: n for axis, n in target.axes.items() if given_roles.get(axis) not in allowed})
        search = Search(
            time_limit=time_limit, recipe=recipe, roles=given_roles, pins=pins, check=check, cache=not no_cache,
            inexact=allowed, quantized=parse_quantized(quantized),
        )  # fmt: skip
        if survive is not None:
            _check_survive(target, search, survive)
        _print_plan(task, target, search, outputs)


def _check_survive(target: Target, search: Search, survive: int) -> None:
    """Raise before the search what would be raised after it.

    Raises:
        ValueError: the plan cannot come and go, or no node would be left.
    """
    from autopar.costs.cluster import Cluster
    from autopar.explain.survival import units_of

    if search.of_worker(target.axes)[0]:
        raise ValueError(f"--survive is not for workers of role {search.worker_role!r}, which cannot come and go")
    units_of(Cluster.resolve(target.cluster), target.axes, survive)


def _has_stage_axis(target: Target) -> bool:
    from autopar.explain.hybrid.predict import STAGE_NAMES

    return any(name in STAGE_NAMES for name in target.axes)


def _print_plan(task: ModelAndBatch, target: Target, search: Search, outputs: Outputs) -> None:
    """Search, write and print the plan, and compare it with the recipes afterwards.

    Raises:
        typer.Exit: Ctrl-C ended the search or the comparison; what there was is printed all the same.
    """
    from autopar.explain.recipes import compare_recipes, compared_with, find_plan
    from autopar.explain.survival import survival, survival_table
    from autopar.explain.tables.progress import SearchProgress, counted
    from autopar.explain.tables.recipes import comparison_list, comparison_table
    from autopar.ir.plan import INTERRUPTED
    from autopar.ir.precision import Precision

    with SearchProgress() as progress:
        found = find_plan(
            task.model,
            task.batch,
            cluster=target.cluster,
            axes=target.axes,
            **task.losses,
            memory=target.memory,
            optimizer=target.optimizer,
            precision=Precision.resolve(target.precision),
            compile=target.compile,
            search=search,
            progress=progress,
        )
    plan = found.plan
    comparisons: tuple[Comparison, ...] = ()
    if outputs.save is not None:
        plan.save(outputs.save)
        # On stderr: stdout has the table, or JSON alone.
        typer.echo(f"saved {outputs.save}", err=True)
    if not outputs.as_json:  # now: recipes take longer than the plan
        typer.echo(plan.summary())
    if outputs.compare:
        with counted("recipes: searched") as tick:
            comparisons = compare_recipes(found, tick)
    plans = [("this plan", plan), *((row.label, row.plan) for row in comparisons if row.plan is not None)]
    if outputs.as_json:
        found_json = {**plan.to_dict(), "recipes": comparison_list(plan, comparisons)}
        if outputs.survive is not None:
            found_json["survival"] = {name: survival(p, outputs.survive).to_dict() for name, p in plans}
        typer.echo(json.dumps(found_json, indent=1))
    elif comparisons:
        typer.echo(f"\n{comparison_table(plan, comparisons)}")
    if outputs.survive is not None and not outputs.as_json:
        typer.echo(f"\n{survival_table(plans, outputs.survive)}")
    # Scripts see that something was cut short, though there is a plan.
    if plan.certificate.method == INTERRUPTED or (outputs.compare and len(comparisons) < len(compared_with(found))):
        raise typer.Exit(STOPPED)
    # The page searches dozens of cases: whoever pressed Ctrl-C does not wait for them.
    if outputs.report is not None:
        _write_report(outputs.report, task, target, search, plan, comparisons)


def _write_report(
    file: Path, task: ModelAndBatch, target: Target, search: Search, plan: Plan, comparisons: Sequence[Comparison]
) -> None:
    from autopar.compiler import default_memory
    from autopar.costs.memory import parse_bytes
    from autopar.explain.html import report_page
    from autopar.explain.tables.progress import counted
    from autopar.ir.precision import Precision

    # The budget of the search, from which the what-ifs scale.
    budget = default_memory(plan.cluster, target.axes) if target.memory is None else parse_bytes(target.memory)
    with counted("what if: searched") as tick:
        page = report_page(
            task.model,
            task.batch,
            plan,
            comparisons,
            budget=budget,
            **task.losses,
            precision=Precision.resolve(target.precision),
            search=search,
            tick=tick,
        )
    file.write_text(page, encoding="utf-8")
    typer.echo(f"saved {file}", err=True)


def _check_staged_by_hand(
    recipe: str | None, roles: str, pin: list[str] | None, stage_axis: str | None, outputs: Outputs
) -> None:
    """Refuse the options that a plan which is only predicted does not have.

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
        raise ValueError("--stage-axis is for a pipeline that runs: add --stages; else the stages lie along axis pp")
    if pin:
        raise ValueError("--pin is for plans that can be run: add --stages, or leave it out")
    if roles:
        raise ValueError("--roles has no effect here: the names of the axes (pp, dp, tp) decide; leave it out")
    if outputs.save is not None:
        raise ValueError("--save writes plans that can be run; one with stages is only predicted: use --json")
    if outputs.survive is not None:
        raise ValueError("--survive is for plans that can be run; leave it out, or the stages")
    if outputs.report is not None:
        raise ValueError("--report is for plans that can be run; for one with stages use --json, or simulate --trace")


def _print_prediction(task: ModelAndBatch, target: Target, options: StagedByHand, as_json: bool) -> None:
    from autopar.explain.hybrid.predict import predict_hybrid
    from autopar.explain.tables.hybrid import hybrid_table
    from autopar.explain.tables.progress import SearchProgress
    from autopar.ir.precision import Precision

    with SearchProgress() as progress:
        found = predict_hybrid(
            task.model,
            task.batch,
            cluster=target.cluster,
            axes=target.axes,
            microbatch=options.microbatch,
            schedule=options.schedule,
            recompute=options.recompute,
            virtual=options.virtual,
            recipe=str(options.recipe),
            memory=target.memory,
            **task.losses,
            optimizer=target.optimizer,
            precision=Precision.resolve(target.precision),
            compile=target.compile,
            time_limit=options.time_limit,
            progress=progress,
        )
    typer.echo(json.dumps(found.to_dict(), indent=1) if as_json else hybrid_table(found.to_dict()))
