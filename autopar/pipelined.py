"""`pipelined`: a plan with stages, from a plan for the devices of one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from autopar.candidates import REPLICATE
from autopar.cluster import Cluster, Link
from autopar.cost.memory import format_bytes
from autopar.dims import analyze
from autopar.errors import InfeasibleError
from autopar.layout import At, Layout, Placement, Replicate
from autopar.liveness import peak_memory
from autopar.passes.pad_dims import pad
from autopar.pipeline.asked import Asked, without_pipeline
from autopar.pipeline.choose import Line, balanced_cuts, line_of, named_cuts, random_cuts
from autopar.pipeline.memory import pipeline_peaks
from autopar.pipeline.pieces import Cutting
from autopar.pipeline.schedules import Order, device_of, order
from autopar.pipeline.table import is_table
from autopar.plan import Certificate, Pipeline, Plan
from autopar.program import Program
from autopar.search.find import Search
from autopar.simulate import pipeline, simulate

Inside = Callable[[Mapping[str, int], Cluster, Search, float | None], Plan]
"""``inside(axes, cluster, search, memory)``: the plan of the devices of one stage, for the whole model."""


def pipelined(
    program: Program,
    axes: Mapping[str, int],
    machine: Cluster,
    search: Search,
    asked: Asked,
    inside: Inside,
    rewrite: Callable[[Plan], Program],
    memory: float | None,
) -> Plan:
    """A plan with the stages that are asked for.

    Args:
        program: of one microbatch.
        axes: of the whole mesh.
        machine: the devices.
        search: for which it is asked.
        asked: the pipeline.
        inside: plans the devices of a stage.
        rewrite: the program under such a plan.
        memory: bytes of a device; None for no limit.

    Raises:
        InfeasibleError: the model has too few modules, the schedule asks for other numbers, or nothing fits.
    """
    by_hand = asked.schedule.startswith("breadth-first") or is_table(asked.schedule)
    if program.training and program.microbatches == 1 and not by_hand:
        raise InfeasibleError(
            'in a pipeline of one microbatch all stages but one wait: pin {"microbatches": n} with n of at least 2'
        )
    try:
        actions = order(asked.schedule, asked.devices, program.microbatches, asked.virtual)
    except ValueError as e:
        raise InfeasibleError(f"no pipeline: {e}") from e
    links = dict(zip(axes, machine.link_for(axes), strict=True))
    within, cluster = asked.inside(axes), replace(machine, axis_links=links)

    def attempt(budget: float | None) -> tuple[Plan, float]:
        """A plan, and the bytes of the model on the devices of a stage alone."""
        plan = inside(within, cluster, without_pipeline(search), budget)
        padded = pad(program, plan.padding)
        line = line_of(padded, analyze(padded), plan)
        cuts = _cuts(line, search, asked, links[asked.axis])
        plan = replace(plan, stages=line.stages(cuts))
        local = rewrite(plan)
        cutting = Cutting(local, asked.stages)
        peak = max(pipeline_peaks(cutting, actions, plan), key=lambda held: sum(held.values()))
        seconds = _step_seconds(line, cuts, actions, links[asked.axis])
        wide = _widened(plan, axes, Pipeline(asked.axis, asked.schedule), cutting, device_of(actions))
        memory_bytes = {category: peak.get(category, 0.0) for category in plan.predicted.memory_bytes}
        sent = {**plan.predicted.communication_bytes, asked.axis: _sent(cutting, device_of(actions))}
        predicted = replace(
            plan.predicted,
            step_seconds=seconds,
            compute_seconds=plan.predicted.compute_seconds / asked.devices,  # of a device, on average
            peak_bytes=peak,
            memory_bytes=memory_bytes,
            communication_bytes=sent,
        )
        certificate = _certificate(plan, seconds, asked)
        found = replace(wide, predicted=predicted, certificate=certificate)
        return found, sum(peak_memory(local, plan).values())

    return _within(attempt, memory)


def _within(attempt: Callable[[float | None], tuple[Plan, float]], memory: float | None) -> Plan:
    """The fastest plan that fits of a few: the devices of a stage are planned for less memory, then for more again.

    Raises:
        InfeasibleError: none fits.
    """
    plan, alone = attempt(None)
    if memory is None or _needed(plan) <= memory:
        return plan
    bound = plan.certificate.lower_bound  # of all plans, in whatever memory
    best: Plan | None = None
    least = plan
    low, high = 0.0, alone
    budget = alone * memory / _needed(plan)  # what a device of a stage needs goes with what it would need alone
    for _ in range(ATTEMPTS):
        try:
            plan, _ = attempt(budget)
        except InfeasibleError:
            low = budget
        else:
            least = min(least, plan, key=_needed)
            if _needed(plan) <= memory:
                best = plan if best is None else min(best, plan, key=lambda p: p.predicted.step_seconds)
                low = budget
            else:
                high = budget
        budget = (low + high) / 2 if low else high * memory / _needed(plan)
    if best is not None:
        return replace(best, certificate=replace(best.certificate, lower_bound=bound))
    needed, peak = _needed(least), least.predicted.peak_bytes
    raise InfeasibleError(
        f"the pipeline needs {format_bytes(needed)} on a device, {format_bytes(needed - memory)} more than the budget "
        f"of {format_bytes(memory)}, most of it {max(peak, key=peak.__getitem__)}; ask for more stages or more "
        "microbatches, or for a schedule with fewer of them under way, such as 1f1b",
        needed=needed,
    )


def _certificate(plan: Plan, seconds: float, asked: Asked) -> Certificate:
    """The bound that the devices of a pipeline cannot all be faster than their average, if none ever waits."""
    inside = plan.certificate
    space = (
        f"pipelines of {asked.stages} stages on {asked.devices} devices of axis {asked.axis}, cut anywhere, in any "
        f"order, {plan.microbatches} microbatches; the devices of a stage: {inside.space}"
    )
    return replace(inside, objective=seconds, lower_bound=inside.lower_bound / asked.devices, space=space, checked=None)


def _sent(cutting: Cutting, devices: list[int]) -> float:
    """Bytes that the device which sends the most sends to other stages' devices in the microbatches of a step."""
    sent = [0.0] * (max(devices) + 1)
    for stage, device in enumerate(devices):
        for names, other in ((cutting.received(stage + 1), stage + 1), (cutting.returned(stage - 1), stage - 1)):
            if 0 <= other < len(devices) and devices[other] != device:
                size = sum(cutting.node(name).meta["val"].nbytes for name in names)
                sent[device] += float(size * cutting.program.microbatches)
    return max(sent)


def _needed(plan: Plan) -> float:
    return sum(plan.predicted.peak_bytes.values())


ATTEMPTS = 6
"""How often a stage is planned again for less memory."""


def _cuts(line: Line, search: Search, asked: Asked, link: Link) -> list[int]:
    if asked.modules:
        return named_cuts(line, asked.modules)
    if search.recipe == "random":
        return random_cuts(line, asked.stages, search.seed)
    return balanced_cuts(line, asked.stages, link)


def _step_seconds(line: Line, cuts: list[int], actions: Order, link: Link) -> float:
    """What the schedule takes, without what comes once at its end."""
    spans = line.between(cuts)
    ahead, back = (np.array([part[a:b].sum() for a, b in spans]) for part in (line.ahead, line.back))
    hops = link.latency + line.sent[cuts] / link.bandwidth
    return simulate(pipeline(actions, ahead, back / 2, back / 2, hops)).step_seconds


def _widened(plan: Plan, axes: Mapping[str, int], pipeline: Pipeline, cutting: Cutting, devices: list[int]) -> Plan:
    """The plan of the whole mesh: everything is alike on all stages, but for parameters and results."""
    index, everywhere = list(axes).index(pipeline.axis), Replicate()

    def wide(layout: Layout, placement: Placement = everywhere) -> Layout:
        return (*layout[:index], placement, *layout[index:])

    parameters = {}
    for name, layout in plan.parameters.items():
        holders = cutting.holders(name)
        parameters[name] = wide(layout, At(devices[holders[0]]) if len(holders) < len(plan.stages) else everywhere)
    made = {o.name: cutting.home(o, v) for o, v in cutting.described if o.kind == "result" and v is not None}
    homes = {name: At(devices[stage]) for name, stage in made.items() if stage is not None}
    return replace(
        plan,
        axes=tuple(axes.items()),
        parameters=parameters,
        batch={name: wide(layout) for name, layout in plan.batch.items()},
        results={name: wide(layout, homes.get(name, everywhere)) for name, layout in plan.results.items()},
        relays={name: wide(layout) for name, layout in plan.relays.items()},
        choices={name: (*names[:index], REPLICATE, *names[index:]) for name, names in plan.choices.items()},
        pipeline=pipeline,
    )
