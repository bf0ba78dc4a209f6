"""`Staged`: a plan with stages, from a plan for the devices of one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from autopar.candidates import REPLICATE
from autopar.cluster import Cluster
from autopar.cost.memory import format_bytes
from autopar.dims import analyze
from autopar.durations import Durations
from autopar.errors import InfeasibleError
from autopar.layout import At, Layout, Placement, Replicate
from autopar.passes.pad_dims import pad
from autopar.pipeline.asked import Arrangement
from autopar.pipeline.choose import Line, balanced_cuts, line_of, named_cuts, random_cuts
from autopar.pipeline.memory import Holdings
from autopar.pipeline.pieces import FORWARD, INPUT, WEIGHT, Cutting
from autopar.pipeline.schedules import Order, device_of, order
from autopar.plan import Certificate, Pipeline, Plan
from autopar.program import Program
from autopar.search.build import Share
from autopar.search.find import Search

INSIDE = "; the devices of a stage: "
"""Between what a certificate says of stages and of what is inside them."""

Rewrite = Callable[[Program, Plan], Program]


class Staged:
    """A program cut into stages.

    Args:
        program: of one microbatch.
        plan: for the devices of a stage, if these had the whole model.
        arrangement: of the stages.
        axes: of the whole mesh.
        machine: the devices, with a link for each axis.
        search: for which it is cut.
        rewrite: the program under such a plan.

    Raises:
        InfeasibleError: the model has too few modules.
    """

    def __init__(
        self,
        program: Program,
        plan: Plan,
        arrangement: Arrangement,
        axes: Mapping[str, int],
        machine: Cluster,
        search: Search,
        rewrite: Rewrite,
    ) -> None:
        padded = pad(program, plan.padding)
        link = machine.axis_links[arrangement.axis]
        line = line_of(padded, analyze(padded), plan)
        stages = line.stages(_cuts(line, search, arrangement, machine))
        self.plan = replace(plan, stages=stages)
        self.arrangement, self.axes = arrangement, axes
        self.cutting = Cutting(rewrite(program, self.plan), arrangement.stages)
        self.durations = Durations(self.cutting, self.plan, link)
        self.holdings = Holdings(self.cutting, self.plan)

    def peak(self, actions: Order) -> dict[str, float]:
        """Bytes by category, on the device that holds the most."""
        return max(self.holdings.peaks(actions), key=lambda held: sum(held.values()))

    def whole(self, schedule: str, actions: Order) -> Plan:
        """The plan for the whole mesh under a schedule."""
        plan, count = self.plan, self.arrangement.devices
        peak, devices = self.peak(actions), device_of(actions)
        seconds = self.durations.step(actions)
        sent = {**plan.predicted.communication_bytes, self.arrangement.axis: _sent(self.cutting, devices)}
        predicted = replace(
            plan.predicted,
            step_seconds=seconds,
            compute_seconds=plan.predicted.compute_seconds / count,  # of a device, on average
            peak_bytes=peak,
            memory_bytes={category: peak.get(category, 0.0) for category in plan.predicted.memory_bytes},
            communication_bytes=sent,
        )
        wide = _widened(plan, self.axes, Pipeline(self.arrangement.axis, schedule), self.cutting, devices)
        return replace(wide, predicted=predicted, certificate=_certificate(plan, seconds, self.arrangement))


def orders(arrangement: Arrangement, count: int) -> dict[str, Order]:
    """What the devices do, under every schedule that works for these numbers.

    Raises:
        InfeasibleError: none does; says what would.
    """
    found, errors = {}, []
    for schedule in arrangement.schedules:
        try:
            found[schedule] = order(schedule, arrangement.devices, count, arrangement.virtual)
        except ValueError as e:
            errors.append(f"no pipeline: {e}")
    if not found:
        raise InfeasibleError(errors[0])
    return found


def share_of(actions: Order, stages: int) -> Share:
    """What the device with the most microbatches under way holds."""
    most = 0
    for row in actions:
        under_way = 0
        split = any(a.kind == INPUT for a in row)
        for action in row:
            under_way += 1 if action.kind == FORWARD else -1 if not split or action.kind == WEIGHT else 0
            most = max(most, under_way)
    return Share(states=1 / len(actions), kept=most / stages)


def missing(plan: Plan, needed: float, memory: float) -> InfeasibleError:
    """Says what is missing where at least so many bytes are needed, which of them are most in a plan, and a remedy."""
    peak = plan.predicted.peak_bytes
    return InfeasibleError(
        f"the pipeline needs {format_bytes(needed)} on a device, {format_bytes(needed - memory)} more than the budget "
        f"of {format_bytes(memory)}, most of it {max(peak, key=peak.__getitem__)}; ask for more stages or more "
        "microbatches, or for a schedule with fewer of them under way, such as 1f1b",
        needed=needed,
        budget=memory,
    )


def _cuts(line: Line, search: Search, arrangement: Arrangement, machine: Cluster) -> list[int]:
    if arrangement.modules:
        return named_cuts(line, arrangement.modules)
    if search.recipe == "random":
        return random_cuts(line, arrangement.stages, search.seed)
    return balanced_cuts(line, arrangement.stages, machine.axis_links[arrangement.axis])


def _certificate(plan: Plan, seconds: float, arrangement: Arrangement) -> Certificate:
    """The bound that the devices of a pipeline cannot all be faster than their average, if none ever waits."""
    inside, devices = plan.certificate, arrangement.devices
    space = (
        f"stages cut anywhere, alike inside, in any order, on {devices} devices of axis {arrangement.axis}, "
        f"{arrangement.virtual} each, {plan.microbatches} microbatches{INSIDE}{inside.space}"
    )
    return replace(inside, objective=seconds, lower_bound=inside.lower_bound / devices, space=space, checked=None)


def _sent(cutting: Cutting, devices: list[int]) -> float:
    """Bytes that the device which sends the most sends to other stages' devices in the microbatches of a step."""
    sent = [0.0] * (max(devices) + 1)
    for stage, device in enumerate(devices):
        for names, other in ((cutting.received(stage + 1), stage + 1), (cutting.returned(stage - 1), stage - 1)):
            if 0 <= other < len(devices) and devices[other] != device:
                size = sum(cutting.node(name).meta["val"].nbytes for name in names)
                sent[device] += float(size * cutting.program.microbatches)
    return max(sent)


def _widened(plan: Plan, axes: Mapping[str, int], pipeline: Pipeline, cutting: Cutting, devices: list[int]) -> Plan:
    """The plan of the whole mesh: everything is alike on all stages, but for parameters."""
    index, everywhere = list(axes).index(pipeline.axis), Replicate()

    def wide(layout: Layout, placement: Placement = everywhere) -> Layout:
        return (*layout[:index], placement, *layout[index:])

    parameters = {}
    for name, layout in plan.parameters.items():
        holders = cutting.holders(name)
        parameters[name] = wide(layout, At(devices[holders[0]]) if len(holders) < len(plan.stages) else everywhere)
    return replace(
        plan,
        axes=tuple(axes.items()),
        parameters=parameters,
        batch={name: wide(layout) for name, layout in plan.batch.items()},
        results={name: wide(layout) for name, layout in plan.results.items()},
        relays={name: wide(layout) for name, layout in plan.relays.items()},
        choices={name: (*names[:index], REPLICATE, *names[index:]) for name, names in plan.choices.items()},
        pipeline=pipeline,
    )
