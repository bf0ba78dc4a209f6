"""``autopar explain`` and ``autopar diff``: why a plan is as it is, and how two plans differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.options import (
    DIFFERENT,
    Axes,
    Debug,
    Fuse,
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
    Target,
    clear_errors,
    parse_axes,
    parse_pins,
    parse_roles,
)
from autopar.cli.task import ModelAndBatch, load_task

if TYPE_CHECKING:
    from autopar.search.options import Search


def explain_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A parameter, batch.N, result.N, a module or a node.")],
    model: Model,
    cluster: Machine,
    axes: Axes,
    why_not: Annotated[
        str | None,
        typer.Option(metavar="PLACEMENT@AXIS,...", help="Ask for this alone, also of a module: S(1)@gpu."),
    ] = None,
    memory: Memory = None,
    optimizer: Optimizer = "adamw",
    precision: Policy = None,
    compile: Fuse = False,
    recipe: Recipe = None,
    roles: RolesOption = "",
    pin: Pins = None,
    time_limit: Limit = 60.0,
    no_cache: NoCache = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say why a tensor has its layout, by solving for others, and why it is saved, recomputed or offloaded."""
    with clear_errors(debug):
        target = Target(cluster, parse_axes(axes), memory, optimizer, precision, compile)
        task = load_task(model)
        from autopar.search.options import Search

        pins = parse_pins(pin, target.axes)
        search = Search(time_limit=time_limit, recipe=recipe, roles=parse_roles(roles), pins=pins, cache=not no_cache)
        facts, tables = _explained(task, target, search, name, why_not)
        typer.echo(json.dumps(facts, indent=1) if as_json else "\n\n".join(tables))


def _explained(
    task: ModelAndBatch, target: Target, search: Search, name: str, why_not: str | None
) -> tuple[dict[str, Any], list[str]]:
    """What there is to say about a name, as plain data and as tables.

    A tensor with a layout of its own is compared with its other placements; so is a module's output, but only for the
    placement that is asked for: each answer is a search, and a module's output has many placements.
    """
    from autopar.compiler import default_memory, program_to_plan, solve
    from autopar.costs.cluster import Cluster
    from autopar.explain.activations import activations, named
    from autopar.explain.tables.activations import activations_dict, activations_table
    from autopar.explain.tables.progress import SearchProgress
    from autopar.explain.tables.why_not import answers_dict, answers_table
    from autopar.explain.why_not import alternatives, ask, has_layout, layout_in, output_layout, parse_wanted, tensor_of
    from autopar.ir.precision import Precision
    from autopar.search.microbatch.split import microbatch_program

    # A wrong placement is refused before the model is captured.
    wanted = parse_wanted(why_not, target.axes) if why_not else None
    machine, policy = Cluster.resolve(target.cluster), Precision.resolve(target.precision)
    budget = default_memory(machine, target.axes) if target.memory is None else target.memory
    with SearchProgress() as progress:
        program = program_to_plan(
            task.model, task.batch, **task.losses, precision=policy, fused=target.compile, search=search
        )
        compares = wanted is not None or has_layout(program, name)
        own = tensor_of(program, name)[0] if compares else name
        named(program, own)  # raise for an unknown name before the search
        found = solve(
            program, target.axes, machine, memory=budget, optimizer=target.optimizer, search=search, progress=progress
        )
        others = [wanted] if wanted else alternatives(program, found, own) if compares else []
        answers = [ask(program, found, own, other, memory=budget, search=search, progress=progress) for other in others]
        # Activations are those of a microbatch: the plan's states are of its program.
        part = microbatch_program(program, found.microbatches)
        tensors = activations(part, found, own)
    facts, tables = activations_dict(own, found, tensors), [activations_table(found, tensors)] if tensors else []
    if compares:
        chosen = layout_in(found, own) if has_layout(program, own) else output_layout(part, found, own)
        layout = " ".join(f"{p}@{axis}" for axis, p in zip(target.axes, chosen, strict=True))
        facts |= answers_dict(own, layout, found, answers)
        # The layout first: it is what the question is about.
        tables.insert(0, answers_table(own, layout, found, answers))
    return facts, tables


def diff_command(
    first: Annotated[Path, typer.Argument(metavar="FIRST.json", help="A plan written by `plan --save`.")],
    second: Annotated[Path, typer.Argument(metavar="SECOND.json", help="Another one.")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare two plans: figures, layouts and where time goes; exit code 1 if they differ."""
    with clear_errors(debug):
        from autopar.explain.tables.difference import difference, difference_table
        from autopar.ir.plan import Plan

        plans = Plan.load(first), Plan.load(second)
        found = difference(*plans)
        # Files of one name in two folders could not be told apart in the table.
        names = (first.stem, second.stem) if first.stem != second.stem else ("first", "second")
        typer.echo(json.dumps(found, indent=1) if as_json else difference_table(*plans, names))
        if not found["same"]:
            raise typer.Exit(DIFFERENT)
