"""``autopar simulate``: the step of a plan's graph, or of a pipeline with given durations."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from autopar.cli.options import (
    Debug,
    Json,
    Policy,
    Schedule,
    check_target,
    clear_errors,
)
from autopar.cli.task import ModelAndBatch, load_task


def simulate_command(
    model: Annotated[str | None, typer.Option(metavar="FILE.py:FUNCTION", help="The model, for --plan.")] = None,
    plan: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Simulate the graph of this plan.")] = None,
    precision: Policy = None,
    schedule: Schedule = None,
    stages: Annotated[int, typer.Option(help="Devices of the pipeline.")] = 0,
    microbatches: Annotated[int, typer.Option(help="Microbatches per step.")] = 0,
    forward: Annotated[float | None, typer.Option(metavar="MS", help="Forward pass of a microbatch.")] = None,
    backward_input: Annotated[float | None, typer.Option(metavar="MS", help="Backward pass for the input.")] = None,
    backward_weight: Annotated[float | None, typer.Option(metavar="MS", help="Backward pass for the weights.")] = None,
    communication: Annotated[float, typer.Option(metavar="MS", help="Sending from a stage to the next.")] = 0.0,
    virtual: Annotated[int, typer.Option(help="Stages on each device, which share its time evenly.")] = 1,
    trace: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write a trace for Perfetto.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Simulate a plan's graph, or a pipeline with given durations: step time, bubble and peak memory."""
    with clear_errors(debug):
        # Exactly one of the two, and a model goes with a plan.
        if (plan is None) == (schedule is None) or (plan is None) != (model is None):
            raise ValueError("simulate either --model and --plan, or a --schedule with its durations")
        durations = (forward, backward_input, backward_weight)
        # A plan has its own stages and microbatches: given besides, they would silently mean nothing.
        if plan is not None and (stages or microbatches or communication or virtual != 1 or any(durations)):
            raise ValueError("--stages, --microbatches, --virtual and durations are for a --schedule; leave them out")
        if schedule is not None and precision is not None:
            raise ValueError("--precision is for a --plan; leave it out")
        check_target("--trace", trace)
        from autopar.simulate import chrome_trace

        if model is not None and plan is not None:
            timeline, facts, table = _simulated_plan(load_task(model), plan, precision)
        else:
            costs = (*durations, communication)
            timeline, facts, table = _simulated_pipeline(str(schedule), stages, microbatches, costs, virtual)
        if trace is not None:
            trace.write_text(json.dumps(chrome_trace(timeline)), encoding="utf-8")
            typer.echo(f"saved {trace}", err=True)
        typer.echo(json.dumps(facts, indent=1) if as_json else table)


def _simulated_plan(task: ModelAndBatch, file: Path, precision: str | None) -> tuple[Any, dict[str, Any], str]:
    """The timeline of a plan's step, its figures and its table."""
    from autopar.compiler import program_of, rewrite
    from autopar.explain.tables.progress import SearchProgress
    from autopar.explain.tables.simulation import step_table
    from autopar.ir.plan import Plan
    from autopar.ir.precision import Precision
    from autopar.search.microbatch.shares import last_device
    from autopar.search.pipeline.stage_times import plan_tasks
    from autopar.simulate import simulate
    from autopar.simulate.graph_tasks import emitted, step_facts

    plan = Plan.load(file)
    with SearchProgress():
        policy = Precision.resolve(precision)
        program = program_of(task.model, task.batch, **task.losses, precision=policy, fused=plan.fused)
        local = rewrite(program, plan)
        if plan.pipeline is not None:
            # With stages the tasks are those of whole stages; a graph's own tasks are of one device.
            timeline = simulate(plan_tasks(local, plan))
            devices = dict(plan.axes)[plan.pipeline.axis]
            return _with_table(timeline, plan.pipeline.order, devices, plan.microbatches, len(plan.stages) // devices)
        timeline = simulate(emitted(*last_device(local, plan)))
    facts = step_facts(timeline, plan)
    return timeline, facts, step_table(facts)


def _simulated_pipeline(
    schedule: str, stages: int, microbatches: int, milliseconds: Sequence[float | None], virtual: int
) -> tuple[Any, dict[str, Any], str]:
    """A timeline of a pipeline, its figures and its table."""
    names = ("--forward", "--backward-input", "--backward-weight", "--communication")
    seconds = []
    for option, value in zip(names, milliseconds, strict=True):
        # Not nan either: a comparison with nan is false.
        if value is None or not 0 <= value < math.inf:
            raise ValueError(f"{option} {'is missing' if value is None else value}: give milliseconds, 0 or more")
        seconds.append(value / 1e3)
    from autopar.pipeline.custom_schedule import as_text, is_table
    from autopar.simulate import order, pipeline, simulate

    text = as_text(schedule)
    rows = order(text, stages, microbatches, virtual)
    forward, for_input, for_weight, sending = seconds
    # A device's time is that of all its stages; each of them has an equal part.
    tasks = pipeline(rows, forward / virtual, for_input / virtual, for_weight / virtual, sending, saved=1 / virtual)
    name = "a custom schedule" if is_table(text) else text
    return _with_table(simulate(tasks), name, stages, microbatches, virtual)


def _with_table(
    timeline: Any, schedule: str, stages: int, microbatches: int, virtual: int
) -> tuple[Any, dict[str, Any], str]:
    """A timeline of a pipeline, its figures and its table."""
    from autopar.explain.tables.simulation import pipeline_table

    numbers = {"stages": stages, "microbatches": microbatches, "virtual": virtual}
    facts: dict[str, Any] = {"schedule": schedule, **numbers, **timeline.to_dict()}
    for device in facts["devices"]:
        # The simulation saves one byte per microbatch, so that bytes count microbatches.
        device["peak_microbatches"] = device.pop("peak_memory_bytes")["activations"]
    return timeline, facts, pipeline_table(facts)
