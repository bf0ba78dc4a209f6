"""`autopar plan --report`: one page with a plan's layouts, traffic, timeline, memory and what-if table.

Everything is in the file: data as JSON, drawn by a script of the page's own (``page.html`` beside this file). Nothing
is loaded from anywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

from torch import nn

from autopar.capture import Batch, LossFunction
from autopar.compiler import program_of, rewrite
from autopar.costs.memory import format_bytes
from autopar.explain.html_pipeline import (
    PipelineStep,
    device_rows,
    kinds_of,
    lanes,
    pipeline_says,
    pipeline_step,
    stage_rows,
)
from autopar.explain.tables.recipes import Comparison, comparison_list
from autopar.explain.what_if import Case, memory_of, what_if
from autopar.ir.plan import Plan
from autopar.ir.plan_table import format_seconds, format_share
from autopar.ir.precision import Precision
from autopar.search.options import Search
from autopar.simulate import COMPUTE, Timeline, simulate
from autopar.simulate.graph_tasks import emitted

MICROSECONDS = 1e6


def report_page(
    model: nn.Module,
    batch: Batch,
    plan: Plan,
    recipes: Sequence[Comparison],
    *,
    budget: float,
    loss_fn: LossFunction | None = None,
    precision: Precision | None = None,
    search: Search | None = None,
    tick: Callable[[int, int, str], None] = lambda *_: None,
) -> str:
    """The page of a plan: its whole graph is simulated, and other devices, budgets and batches are searched.

    Args:
        model: as it was planned.
        batch: as it was planned.
        plan: what the page is of.
        recipes: what it is compared with.
        budget: bytes a device that it was planned for.
        loss_fn: as it was planned.
        precision: as it was planned.
        search: as it was planned.
        tick: told of the searches, see `autopar.explain.what_if.what_if`.
    """
    program = program_of(model, batch, loss_fn=loss_fn, precision=precision)
    local = rewrite(program, plan)
    step = simulate(emitted(local, plan)) if plan.pipeline is None else pipeline_step(local, plan)
    cases = what_if(model, batch, plan, budget=budget, loss_fn=loss_fn, precision=precision, search=search, tick=tick)
    return plan_page(type(model).__name__, plan, recipes, step, cases, budget)


def plan_page(
    name: str,
    plan: Plan,
    recipes: Sequence[Comparison],
    step: Timeline | PipelineStep,
    cases: Sequence[Case],
    budget: float,
) -> str:
    """The page as HTML.

    Args:
        name: of the model.
        plan: what the page is of.
        recipes: what it is compared with.
        step: its simulated step: on one device, of `autopar.simulate.graph_tasks.emitted`, or that of its stages.
        cases: of `autopar.explain.what_if.what_if`.
        budget: bytes a device that it was planned for.
    """
    data = page_data(name, plan, recipes, step, cases, budget)
    # What could end the script element is written as an escape of JSON's.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = resources.files("autopar.explain").joinpath("page.html").read_text(encoding="utf-8")
    return page.replace("/*DATA*/", text)


def page_data(
    name: str,
    plan: Plan,
    recipes: Sequence[Comparison],
    step: Timeline | PipelineStep,
    cases: Sequence[Case],
    budget: float,
) -> dict[str, Any]:
    """What the page shows, as plain data: simulated times in microseconds, everything else in seconds and bytes."""
    held = memory_of(plan)
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.axes)
    staged = isinstance(step, PipelineStep)
    timeline = step.timeline if isinstance(step, PipelineStep) else step
    peaks = step.peaks if isinstance(step, PipelineStep) else [step.peak_memory(0)]
    peak = max(sum(held.values()) for held in peaks)
    parts = f"{plan.microbatches} microbatches" + (f", {len(plan.stages)} stages" if staged else "")
    facts = [
        ("devices", f"{math.prod(plan.axis_sizes)}: {mesh}"),
        ("step, nothing overlapped", format_seconds(plan.predicted.step_seconds)),
        ("step, simulated, without the optimizer's", format_seconds(timeline.step_seconds)),
        *([("step in", parts)] if plan.microbatches > 1 or staged else []),
        ("parameters, gradients, optimizer", f"{format_bytes(held)} of {format_bytes(budget)}"),
        ("most that is held, simulated", format_bytes(peak)),
        ("gap to the lower bound", format_share(plan.certificate.gap)),
    ]
    return {
        "title": f"{name} on {plan.cluster.name}",
        "space": f"Best of: {plan.certificate.space}.",
        "facts": facts,
        "recipes": _recipes(plan, recipes),
        "told": "Seconds, bytes sent and parameters are of one device and step"
        + (", if the devices of a stage had the whole model" if staged else "")
        + "; of repeated modules, of all of them. A name in braces is the axis that splits a dim.",
        "modules": [
            {
                "path": row.path,
                "instances": row.instances,
                "layouts": dict(row.layouts),
                "seconds": row.seconds,
                "sent": sum(row.communication_bytes.values()),
                "memory": row.memory_bytes,
            }
            for row in plan.modules
        ],
        "traffic": [
            {
                "axis": axis,
                "size": size,
                "link": link.name,
                "bytes": plan.predicted.communication_bytes.get(axis, 0.0),
                "collectives": dict(plan.predicted.collectives.get(axis, {})),
            }
            for (axis, size), link in zip(plan.axes, plan.cluster.link_for(dict(plan.axes)), strict=True)
        ],
        "timeline": _pipeline(step, plan) if isinstance(step, PipelineStep) else _timeline(step),
        "memory": _memory_of_stages(step, budget) if isinstance(step, PipelineStep) else _memory(step, budget),
        "stages": stage_rows(step, plan) if isinstance(step, PipelineStep) else [],
        "pipeline": device_rows(step) if isinstance(step, PipelineStep) else [],
        "whatif": [
            {
                "devices": case.devices,
                "budget": case.budget,
                "samples": case.samples,
                "seconds": case.step_seconds,
                "memory": case.memory_bytes,
                "way": case.way,
                "reason": case.reason,
                "chosen": case.given,
            }
            for case in cases
        ],
    }


def _recipes(plan: Plan, recipes: Sequence[Comparison]) -> list[dict[str, Any]]:
    own = {"name": "this plan", "seconds": plan.predicted.step_seconds, "ratio": 1.0, "reason": "", "chosen": True}
    rows = [{**own, "memory": memory_of(plan)}]
    for row in comparison_list(plan, recipes):
        seconds, memory, ratio = (row.get(key) for key in ("step_seconds", "memory_bytes", "ratio"))
        shown = {
            "name": row["recipe"],
            "recomputing": row["recomputing"],
            "seconds": seconds,
            "memory": memory,
            "ratio": ratio,
        }
        rows.append({**shown, "reason": row.get("reason", ""), "chosen": False})
    return rows


def _timeline(timeline: Timeline) -> dict[str, Any]:
    """Tasks that take time, on streams; names are numbered, since layers repeat them."""
    chosen = [(i, task) for i, task in enumerate(timeline.tasks) if task.seconds > 0]
    streams = sorted({task.stream for _, task in chosen}, key=lambda s: (s != COMPUTE, s))
    names = {name: i for i, name in enumerate(dict.fromkeys(task.name for _, task in chosen))}
    exposed = timeline.exposed_communication.get(0, 0.0)
    return {
        "says": (
            f"The graph of the plan on one device, simulated: computes {format_seconds(timeline.busy.get(0, 0.0))}, "
            f"communicates {format_seconds(exposed)} while nothing is computed. All devices do the same."
        ),
        "streams": streams,
        "kinds": {s: sum(task.seconds for _, task in chosen if task.stream == s) for s in streams},
        "names": list(names),
        "tasks": [
            [
                names[task.name],
                streams.index(task.stream),
                round(float(timeline.start[i]) * MICROSECONDS, 3),
                round(float(timeline.end[i] - timeline.start[i]) * MICROSECONDS, 3),
                streams.index(task.stream),
            ]
            for i, task in chosen
        ],
    }


def _pipeline(step: PipelineStep, plan: Plan) -> dict[str, Any]:
    """The same of a pipeline: lanes are devices, colors what is done for a microbatch."""
    line = step.timeline
    streams, chosen = lanes(step)
    names = {name: i for i, name in enumerate(dict.fromkeys(line.tasks[i].name for i, _, _ in chosen))}
    return {
        "says": pipeline_says(step, plan),
        "streams": streams,
        "kinds": dict(kinds_of(step)),
        "names": list(names),
        "tasks": [
            [
                names[line.tasks[i].name],
                lane,
                round(float(line.start[i]) * MICROSECONDS, 3),
                round(float(line.end[i] - line.start[i]) * MICROSECONDS, 3),
                kind,
            ]
            for i, lane, kind in chosen
        ],
    }


def _memory_of_stages(step: PipelineStep, budget: float) -> dict[str, Any]:
    """Bytes over time on the device that holds the most; what is not activations as it is at its peak."""
    device, end = step.fullest, step.timeline.step_seconds
    times, by_category = step.timeline.memory(device)
    peak = step.peaks[device]
    activations = [0.0, *by_category.get("activations", [])]
    shown = {name: [size] * (len(activations) + 1) for name, size in peak.items() if size and name != "activations"}
    shown["activations"] = [*activations, activations[-1]]
    ordered = sorted(shown.items(), key=lambda item: -max(item[1]))
    return {
        "says": f"On device {device} of the pipeline, which holds the most, simulated. What is made and given back "
        "within a task (transient) is shown as at its peak.",
        "times": [round(t * MICROSECONDS, 3) for t in (0.0, *map(float, times), end)],
        "categories": {name: [round(size) for size in sizes] for name, sizes in ordered},
        "budget": budget,
    }


def _memory(timeline: Timeline, budget: float) -> dict[str, Any]:
    """Bytes by category over time, the largest category lowest."""
    times, by_category = timeline.memory(0)
    shown = sorted((n for n, sizes in by_category.items() if sizes.any()), key=lambda n: -float(by_category[n].max()))
    return {
        "says": "On one device, simulated.",
        "times": [round(float(t) * MICROSECONDS, 3) for t in times],
        "categories": {name: [round(float(b)) for b in by_category[name]] for name in shown},
        "budget": budget,
    }
