"""``autopar explain`` and ``autopar diff``: what plans say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.options import (
    DIFFERENT,
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
    clear_errors,
    parse_axes,
    parse_pins,
    parse_roles,
)
from autopar.cli.task import load_task


def explain_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A parameter, batch.N, result.N, a module or a node.")],
    model: Model,
    cluster: Machine,
    axes: Axes,
    why_not: Annotated[
        str | None, typer.Option(metavar="PLACEMENT@AXIS,...", help="Only this, also of a module: S(1)@gpu.")
    ] = None,
    memory: Memory = None,
    optimizer: Optimizer = "adamw",
    precision: Policy = None,
    recipe: Recipe = None,
    roles: RolesOption = "",
    pin: Pins = None,
    time_limit: Limit = 60.0,
    no_cache: NoCache = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say why a tensor lies as it does, solving again with other placements, and why what is kept is kept."""
    with clear_errors(debug):
        sizes = parse_axes(axes)
        task = load_task(model)
        from autopar.compiler import default_memory, program_to_plan, solve
        from autopar.costs.cluster import Cluster
        from autopar.explain.activations import activations, named
        from autopar.explain.tables.activations import activations_dict, activations_table
        from autopar.explain.tables.progress import SearchProgress
        from autopar.explain.tables.why_not import answers_dict, answers_table
        from autopar.explain.why_not import alternatives, ask, handed_layout, layout_in, lies, parse_wanted, tensor_of
        from autopar.ir.precision import Precision
        from autopar.search.microbatch.split import microbatch_program
        from autopar.search.options import Search

        wanted = parse_wanted(why_not, sizes) if why_not else None
        machine = Cluster.resolve(cluster)
        pins = parse_pins(pin, sizes)
        search = Search(time_limit=time_limit, recipe=recipe, roles=parse_roles(roles), pins=pins, cache=not no_cache)
        budget = default_memory(machine) if memory is None else memory
        with SearchProgress() as progress:
            policy = Precision.resolve(precision)
            program = program_to_plan(task.model, task.batch, loss_fn=task.loss_fn, precision=policy, search=search)
            asked = wanted is not None or lies(program, name)
            own = tensor_of(program, name)[0] if asked else name
            named(program, own)  # complain before the search
            found = solve(program, sizes, machine, memory=budget, optimizer=optimizer, search=search, progress=progress)
            others = [wanted] if wanted else alternatives(program, found, own) if asked else []
            answers = [
                ask(program, found, own, other, memory=budget, search=search, progress=progress) for other in others
            ]
            part = microbatch_program(program, found.microbatches)
            tensors = activations(part, found, own)
        facts, parts = activations_dict(own, found, tensors), [activations_table(found, tensors)] if tensors else []
        if asked:
            chosen = layout_in(found, own) if lies(program, own) else handed_layout(part, found, own)
            layout = " ".join(f"{p}@{axis}" for axis, p in zip(sizes, chosen, strict=True))
            facts |= answers_dict(own, layout, found, answers)
            parts.insert(0, answers_table(own, layout, found, answers))
        typer.echo(json.dumps(facts, indent=1) if as_json else "\n\n".join(parts))


def diff_command(
    first: Annotated[Path, typer.Argument(metavar="FIRST.json", help="A plan that `plan --save` wrote.")],
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
        names = (first.stem, second.stem) if first.stem != second.stem else ("first", "second")
        typer.echo(json.dumps(found, indent=1) if as_json else difference_table(*plans, names))
        if not found["same"]:
            raise typer.Exit(DIFFERENT)
