"""`autopar plan --report`: one page with a plan's layouts, traffic, timeline, memory and what-if table.

Everything is in the file: the data as JSON, and the script that draws it (``page.html`` beside this file). The page
loads nothing from anywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

from torch import nn

from autopar.capture import Batch, LossFunction
from autopar.compiler import program_of, rewrite
from autopar.costs.memory import format_bytes
from autopar.explain.html_pipeline import (
    SimulatedPipeline,
    device_rows,
    kinds_of,
    lanes,
    pipeline_caption,
    simulate_pipeline,
    stage_rows,
)
from autopar.explain.recipes import Comparison
from autopar.explain.tables.recipes import comparison_list
from autopar.explain.what_if import Case, Tick, memory_of, needed_by, what_if
from autopar.ir.plan import Plan
from autopar.ir.plan_table import format_seconds, format_share
from autopar.ir.precision import Precision
from autopar.ir.signature.outputs import Loss
from autopar.search.microbatch.shares import last_device
from autopar.search.options import Search
from autopar.simulate import COMPUTE, Timeline, simulate
from autopar.simulate.graph_tasks import emitted

MICROSECONDS = 1e6

Rows = list[dict[str, Any]]


def report_page(
    model: nn.Module,
    batch: Batch,
    plan: Plan,
    recipes: Sequence[Comparison],
    *,
    budget: float,
    loss_fn: LossFunction | None = None,
    loss: Loss = None,
    precision: Precision | None = None,
    search: Search | None = None,
    tick: Tick = lambda *_: None,
) -> str:
    """The page of a plan: simulates its whole graph, and searches other devices, budgets and batches.

    Args:
        model: as it was planned.
        batch: as it was planned.
        plan: what the page is of.
        recipes: what it is compared with.
        budget: bytes per device that it was planned for.
        loss_fn: as it was planned.
        loss: which scalar of the output is the loss.
        precision: as it was planned.
        search: as it was planned.
        tick: called after each search, see `autopar.explain.what_if.what_if`.
    """
    program = program_of(model, batch, loss_fn=loss_fn, loss=loss, precision=precision, fused=plan.fused)
    local = rewrite(program, plan)
    # The whole graph, all layers: the prediction of a deep model may come from three of them.
    step = simulate(emitted(*last_device(local, plan))) if plan.pipeline is None else simulate_pipeline(local, plan)
    cases = what_if(
        model, batch, plan, budget=budget, loss_fn=loss_fn, loss=loss, precision=precision, search=search, tick=tick
    )
    return plan_page(type(model).__name__, plan, recipes, step, cases, budget)


def plan_page(
    name: str,
    plan: Plan,
    recipes: Sequence[Comparison],
    step: Timeline | SimulatedPipeline,
    cases: Sequence[Case],
    budget: float,
) -> str:
    """The page as HTML.

    Args:
        name: of the model.
        plan: what the page is of.
        recipes: what it is compared with.
        step: the simulated step of one device (`autopar.simulate.graph_tasks.emitted`), or of all stages.
        cases: from `autopar.explain.what_if.what_if`.
        budget: bytes per device that it was planned for.
    """
    data = page_data(name, plan, recipes, step, cases, budget)
    # "</script>" in a module's name would end the script element; JSON may escape any character.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = resources.files("autopar.explain").joinpath("page.html").read_text(encoding="utf-8")
    return page.replace("/*DATA*/", text)


def page_data(
    name: str,
    plan: Plan,
    recipes: Sequence[Comparison],
    step: Timeline | SimulatedPipeline,
    cases: Sequence[Case],
    budget: float,
) -> dict[str, Any]:
    """What the page shows, as plain data: simulated times in microseconds, everything else in seconds and bytes."""
    staged = isinstance(step, SimulatedPipeline)
    return {
        "title": f"{name} on {plan.cluster.name}",
        # The bound is of these plans only; readers must not take it for a bound on all.
        "space": f"Best of: {plan.certificate.space}.",
        "facts": _facts(plan, step, budget),
        "recipes": _recipes(plan, recipes),
        "modules_caption": "Seconds, bytes sent and parameters are per device and step"
        + (", as if the devices of a stage had the whole model" if staged else "")
        + "; repeated modules are added up. A name in braces is the axis that splits a dim.",
        "modules": _modules(plan),
        "traffic": _traffic(plan),
        "whatif": [_case(case) for case in cases],
        **(_pipeline(step, plan, budget) if isinstance(step, SimulatedPipeline) else _one_device(step, plan, budget)),
    }


def _one_device(timeline: Timeline, plan: Plan, budget: float) -> dict[str, Any]:
    """The step of a plan without stages: all devices do the same."""
    return {"timeline": _timeline(timeline), "memory": _memory(timeline, plan, budget), "stages": [], "pipeline": []}


def _pipeline(step: SimulatedPipeline, plan: Plan, budget: float) -> dict[str, Any]:
    """The step of a plan with stages: a lane for each device of the pipeline."""
    return {
        "timeline": _pipeline_timeline(step, plan),
        "memory": _pipeline_memory(step, plan, budget),
        "stages": stage_rows(step, plan),
        "pipeline": device_rows(step),
    }


def _facts(plan: Plan, step: Timeline | SimulatedPipeline, budget: float) -> list[tuple[str, str]]:
    """The figures at the top of the page."""
    staged = isinstance(step, SimulatedPipeline)
    timeline = step.timeline if isinstance(step, SimulatedPipeline) else step
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.axes)
    splits = f"{plan.microbatches} microbatches" + (f", {len(plan.stages)} stages" if staged else "")
    predicted = "step, predicted" if plan.overlap else "step, nothing overlapped"
    return [
        ("devices", f"{math.prod(plan.axis_sizes)}: {mesh}"),
        (predicted, format_seconds(plan.predicted.step_seconds)),
        ("step, simulated, without the optimizer's", format_seconds(timeline.step_seconds)),
        *([("the step is split into", splits)] if plan.microbatches > 1 or staged else []),
        ("peak memory per device, of the budget", f"{format_bytes(needed_by(plan))} of {format_bytes(budget)}"),
        ("of that between steps", format_bytes(memory_of(plan))),
        ("gap to the lower bound", format_share(plan.certificate.gap)),
    ]


def _recipes(plan: Plan, recipes: Sequence[Comparison]) -> Rows:
    own = {"name": "this plan", "seconds": plan.predicted.step_seconds, "ratio": 1.0, "reason": "", "chosen": True}
    rows = [{**own, "memory": needed_by(plan)}]
    for row in comparison_list(plan, recipes):
        rows.append(
            {
                "name": row["recipe"],
                "recomputing": row["recomputing"],
                "seconds": row.get("step_seconds"),
                "memory": row.get("peak_bytes"),
                "ratio": row.get("ratio"),
                "reason": row.get("reason", ""),
                "chosen": False,
            }
        )
    return rows


def _modules(plan: Plan) -> Rows:
    return [
        {
            "path": row.path,
            "instances": row.instances,
            "layouts": dict(row.layouts),
            "seconds": row.seconds,
            "sent": sum(row.communication_bytes.values()),
            "memory": row.memory_bytes,
        }
        for row in plan.modules
    ]


def _traffic(plan: Plan) -> Rows:
    # The same links as the search: each axis over the innermost level that holds it.
    links = plan.cluster.link_for(dict(plan.axes))
    return [
        {
            "axis": axis,
            "size": size,
            "link": link.name,
            "bytes": plan.predicted.communication_bytes.get(axis, 0.0),
            "collectives": dict(plan.predicted.collectives.get(axis, {})),
        }
        for (axis, size), link in zip(plan.axes, links, strict=True)
    ]


def _case(case: Case) -> dict[str, Any]:
    return {
        "devices": case.devices,
        "budget": case.budget,
        "samples": case.samples,
        "seconds": case.step_seconds,
        "memory": case.memory_bytes,
        "splits": case.splits,
        "reason": case.reason,
        "needed": case.needed,
        "chosen": case.given,
    }


def _timeline(timeline: Timeline) -> dict[str, Any]:
    """Tasks that take time, a lane for each stream."""
    # Views and other tasks of no time would be invisible, and are many.
    chosen = [(i, task) for i, task in enumerate(timeline.tasks) if task.seconds > 0]
    # Computation is the first lane; streams of communication follow by name.
    streams = sorted({task.stream for _, task in chosen}, key=lambda s: (s != COMPUTE, s))
    exposed = timeline.exposed_communication.get(0, 0.0)
    return {
        "caption": (
            f"The plan's graph on one device, simulated: computes {format_seconds(timeline.busy.get(0, 0.0))}, "
            f"exposed communication {format_seconds(exposed)}. All devices do the same."
        ),
        "streams": streams,
        "kinds": {s: sum(task.seconds for _, task in chosen if task.stream == s) for s in streams},
        **_tasks(timeline, [(i, streams.index(task.stream), streams.index(task.stream)) for i, task in chosen]),
    }


def _pipeline_timeline(step: SimulatedPipeline, plan: Plan) -> dict[str, Any]:
    """The same of a pipeline: a lane for each device, colors for what a task does for its microbatch."""
    streams, chosen = lanes(step)
    return {
        "caption": pipeline_caption(step, plan),
        "streams": streams,
        "kinds": dict(kinds_of(step)),
        **_tasks(step.timeline, chosen),
    }


def _tasks(timeline: Timeline, chosen: Iterable[tuple[int, int, int]]) -> dict[str, Any]:
    """Tasks as ``[name, lane, start, duration, kind]``, given as ``(position, lane, kind)``.

    Names are numbered: every layer and microbatch repeats them, and a page has tens of thousands of tasks.
    """
    names: dict[str, int] = {}
    tasks = []
    for i, lane, kind in chosen:
        # In microseconds with three decimals: full floats would make the page much larger.
        start, end = float(timeline.start[i]), float(timeline.end[i])
        number = names.setdefault(timeline.tasks[i].name, len(names))
        tasks.append([number, lane, _microseconds(start), _microseconds(end - start), kind])
    return {"names": list(names), "tasks": tasks}


def _microseconds(seconds: float) -> float:
    return round(seconds * MICROSECONDS, 3)


def _limited(simulated: float, plan: Plan) -> str:
    """Which figure the budget is about, where the simulation has another one."""
    return (
        f"At most {format_bytes(simulated)} here; the budget is about the peak of the plan's graph, "
        f"{format_bytes(needed_by(plan))}, as everywhere else on this page."
    )


def _pipeline_memory(step: SimulatedPipeline, plan: Plan, budget: float) -> dict[str, Any]:
    """Bytes over time on the device with the highest peak; only activations vary, the rest stays as at the peak."""
    device, end = step.fullest, step.timeline.step_seconds
    times, by_category = step.timeline.memory(device)
    activations = [0.0, *by_category.get("activations", [])]
    # The simulator tracks activations alone: the other categories are drawn as constants, one value per time.
    constant = {name: size for name, size in step.peaks[device].items() if size and name != "activations"}
    shown = {name: [size] * (len(activations) + 1) for name, size in constant.items()}
    shown["activations"] = [*activations, activations[-1]]
    ordered = sorted(shown.items(), key=lambda item: -max(item[1]))
    return {
        "caption": f"On device {device} of the pipeline, which has the highest peak, simulated. Transient memory, "
        f"which is freed within a task, is drawn as at its peak. {_limited(sum(step.peaks[device].values()), plan)}",
        "times": [_microseconds(float(t)) for t in (0.0, *times, end)],
        "categories": {name: [round(size) for size in sizes] for name, sizes in ordered},
        "budget": budget,
    }


def _memory(timeline: Timeline, plan: Plan, budget: float) -> dict[str, Any]:
    """Bytes by category over time, the largest category at the bottom."""
    times, by_category = timeline.memory(0)
    # The largest is drawn first, at the bottom, where it is easiest to read.
    shown = sorted((n for n, sizes in by_category.items() if sizes.any()), key=lambda n: -float(by_category[n].max()))
    return {
        "caption": f"On one device, simulated. {_limited(sum(timeline.peak_memory(0).values()), plan)}",
        "times": [_microseconds(float(t)) for t in times],
        "categories": {name: [round(float(b)) for b in by_category[name]] for name in shown},
        "budget": budget,
    }
