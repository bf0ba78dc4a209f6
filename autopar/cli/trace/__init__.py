"""``autopar trace``: the simulated and a measured step of a plan in one picture."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.options import Debug, Json, Model, Policy, check_target, clear_errors, parse_axes

WORKER = "autopar.cli.trace.worker"

MOST_PROCESSES = 64


def trace_command(
    model: Model,
    axes: Annotated[str, typer.Option(metavar="NAME=SIZE,...", help="Mesh axes: a process of this machine for each.")],
    save: Annotated[Path, typer.Option(metavar="FILE.json", help="The trace, for Perfetto.")],
    plan: Annotated[Path | None, typer.Option(metavar="FILE.json", help="A plan; default: search.")] = None,
    cluster: Annotated[
        str, typer.Option(metavar="NAME|FILE.toml", help="What the simulation takes the devices for, see calibrate.")
    ] = "cpu",
    precision: Policy = None,
    steps: Annotated[int, typer.Option(help="Steps that are measured; the fastest is shown.", min=1)] = 5,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run some steps of a model in processes of this machine, and write them beside the simulated step."""
    with clear_errors(debug):
        sizes = parse_axes(axes)
        processes = 1
        for size in sizes.values():
            processes *= size
        if processes > MOST_PROCESSES:
            raise ValueError(
                f"--axes {axes} asks for {processes} processes of this machine; take at most {MOST_PROCESSES}"
            )
        check_target("--save", save)
        if plan is not None and not plan.is_file():
            raise ValueError(f"no file {plan}; --plan takes what autopar plan --save has written")
        from autopar.runtime.launch.agent import Launch, launch

        facts = {
            "model": model, "plan": None if plan is None else str(plan), "cluster": cluster, "precision": precision,
            "steps": steps, "save": str(save), "json": as_json,
        }  # fmt: skip
        code = launch(Launch(processes, axes=sizes), WORKER, [json.dumps(facts)], is_module=True, told=False)
        if code:
            raise typer.Exit(code)
        typer.echo(f"saved {os.fspath(save)}", err=True)
