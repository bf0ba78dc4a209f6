"""``autopar trace``: the simulated and a measured step of a plan in one picture."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.options import Debug, Json, Model, Policy, check_target, clear_errors, parse_axes
from autopar.cli.task import ModelAndBatch, load_task

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
        processes = math.prod(sizes.values())
        if processes > MOST_PROCESSES:
            raise ValueError(f"--axes {axes}: {processes} processes of this machine; take at most {MOST_PROCESSES}")
        check_target("--save", save)
        _require_values(load_task(model))
        if plan is not None:
            _check_plan(plan, sizes)
        from autopar.runtime.launch.agent import Launch, launch

        facts = {
            "model": model, "plan": None if plan is None else str(plan), "cluster": cluster, "precision": precision,
            "steps": steps, "save": str(save), "json": as_json,
        }  # fmt: skip
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler says when it starts and stops
        code = launch(Launch(processes, axes=sizes), WORKER, [json.dumps(facts)], is_module=True, told=False)
        if code:
            raise typer.Exit(code)
        typer.echo(f"saved {os.fspath(save)}", err=True)


def _require_values(task: ModelAndBatch) -> None:
    """Refuse what cannot run.

    Raises:
        ValueError: a tensor has no values.
    """
    from autopar.ir.signature import binding

    named = [*task.model.named_parameters(), *task.model.named_buffers()]
    named += [(f"batch tensor {i}", t) for i, t in enumerate(binding.flatten(task.model, task.batch)[0])]
    for name, tensor in named:
        if tensor.device.type != "cpu":
            raise ValueError(f"{name} is on {tensor.device}; a step is measured on CPUs: make model and batch there")


def _check_plan(file: Path, sizes: Mapping[str, int]) -> None:
    """Refuse a plan whose steps are not measured here.

    Raises:
        ValueError: it has stages, or other axes.
    """
    from autopar.ir.plan import Plan

    plan = Plan.load(file)
    if plan.pipeline is not None:
        raise ValueError(f"{file} has pipeline stages: their steps are not measured; autopar simulate shows them")
    if dict(plan.axes) != dict(sizes):
        raise ValueError(f"{file} is for axes {dict(plan.axes)} and --axes says {dict(sizes)}; give those of the plan")
