"""Shares of the batch by speed: along one axis, faster devices run more microbatches of a step.

Between the first microbatch and the last, devices along this axis must have nothing to say to each other: it splits the
batch and nothing else, and gradients are reduced once a step. The plan is searched for devices that are all as slow as
the slowest, and what it takes on each kind decides the shares: the device that is done last is done as early as can be.

The bound is a search on devices such that nothing takes longer on them than a device's share of what it takes there,
see `autopar.costs.mixed.figures.pooled_device`: the step of any plan takes at least the mean, over devices, of what
each takes for its own share.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import fx

from autopar.costs.cluster import Cluster
from autopar.costs.mixed.shares import Shares
from autopar.errors import InfeasibleError
from autopar.ir.layout import Split
from autopar.ir.node_info import info
from autopar.ir.ops.collectives import axis_index
from autopar.ir.ops.random import seeded
from autopar.ir.plan import Certificate, Plan
from autopar.ir.program import Program, draws, is_hoisted
from autopar.passes import as_planned
from autopar.search.budget.cutoff import NO_CUTOFF
from autopar.search.finished_plan import joint_certificate
from autopar.search.formulation.axis_roles import DATA
from autopar.search.formulation.recipes import roles_of
from autopar.search.microbatch.count import plan_of_count
from autopar.search.microbatch.split import microbatch_program
from autopar.search.options import Job
from autopar.search.pipeline.stage_devices import StageDevices, devices_along
from autopar.search.predict import predict
from autopar.sharding.dims import analyze
from autopar.sharding.layer_classes import layer_classes
from autopar.simulate import simulate
from autopar.simulate.graph_tasks import emitted

MOST = 16
"""Microbatches, at most, that are tried by themselves."""


def best_shares(program: Program, job: Job) -> Plan:
    """The best plan with shares along the axis that the pin ``shares`` names.

    Raises:
        InfeasibleError: the axis does more than split the batch, or nothing fits.
        ValueError: the mesh has no such axis, or not as many devices along it.
    """
    pinned = job.search.shares
    assert pinned is not None
    axis, given = pinned
    job.search.require_axes(job.axes)
    _require_role(axis, job)
    if given is not None:
        numbers = [Shares(axis, given).microbatches]
    elif job.search.microbatches:
        numbers = [job.search.microbatches]
    else:
        numbers = [2**i for i in range(1, int(math.log2(MOST)) + 1)]
    best: Plan | None = None
    error: InfeasibleError | None = None
    bounds: list[Certificate] = []
    tried: list[int] = []
    for count in numbers:
        try:
            part = microbatch_program(program, count, deterministic=job.deterministic)
            even = plan_of_count(program, count, replace(job, cutoff=NO_CUTOFF))
        except InfeasibleError as e:
            if best is not None:  # the batch does not divide into more
                break
            error = error or e  # more microbatches need less memory
            continue
        devices = _devices(even.cluster, job.axes, axis)
        counts = given or fastest(_line(part, even, devices), count, len(devices.machines))
        found = with_shares(part, replace(even, shares=Shares(axis, counts)))
        speeds = [n / count for n in counts]
        machine = devices.pooled(speeds) if len(set(devices.machines)) > 1 else devices.machines[0]
        bound = plan_of_count(program, count, replace(job, cluster=machine, cutoff=NO_CUTOFF)).certificate
        bounds.append(replace(bound, objective=max(bound.lower_bound, found.certificate.objective)))
        tried.append(count)
        job.progress(f"shares {Shares(axis, counts)} of axis {axis}", found.certificate.objective, bound.lower_bound)
        if best is not None and found.certificate.objective >= best.certificate.objective:
            break
        best = found
    if best is None:
        assert error is not None
        raise error
    of = f"{', '.join(map(str, tried))} microbatches a device in the mean"
    space = f"shares {'as given' if given else 'of any size'} along axis {axis}, {of}; {best.certificate.space}"
    certificate = joint_certificate(best.certificate, bounds, [], space, bounds[-1].method)
    return replace(best, certificate=certificate)


def _require_role(axis: str, job: Job) -> None:
    """Refuse an axis that does more than split the batch.

    Raises:
        InfeasibleError: it does; names its role.
    """
    search = job.search
    role = dict(zip(job.axes, roles_of(search.recipe, job.axes, search.roles), strict=True))[axis]
    if role != DATA:
        raise InfeasibleError(
            f"pin 'shares' names axis {axis!r}, whose role is {role or 'open'}: devices run different numbers of "
            "microbatches only along an axis that they send nothing but gradients along; give it the role with "
            f"roles={{{axis!r}: {DATA!r}}}, and inner axes any other"
        )


def _devices(cluster: Cluster, axes: Mapping[str, int], axis: str) -> StageDevices:
    """The devices along an axis; what they exchange along it is over the slowest link."""
    found = devices_along(cluster, axes, axis)
    link = found.whole.axis_links[axis]
    machines = tuple(replace(m, axis_links={**m.axis_links, axis: link}) for m in found.machines)
    return replace(found, machines=machines)


Seconds = Callable[[int, int], float]
"""``seconds(coordinate, count)``: of a step of so many microbatches on the devices there."""


def _line(part: Program, plan: Plan, devices: StageDevices) -> Seconds:
    """What a step takes by two predictions for each kind of devices, and about as many microbatches more or less."""
    padded, count = as_planned(part, plan), part.microbatches
    known: dict[Cluster, tuple[float, float]] = {}
    for machine in dict.fromkeys(devices.machines):
        first, second = (_alone(padded, plan, machine, n).predicted.step_seconds for n in (count, 2 * count))
        known[machine] = first, (second - first) / count

    def seconds(coordinate: int, number: int) -> float:
        at, slope = known[devices.machines[coordinate]]
        return at + (number - count) * slope

    return seconds


def with_shares(part: Program, plan: Plan) -> Plan:
    """A plan with shares, with its prediction and objective: those of the devices that are done last.

    Args:
        part: of one microbatch, not padded.
        plan: for it.
    """
    assert plan.shares is not None
    padded = as_planned(part, plan)
    devices = _devices(plan.cluster, dict(plan.axes), plan.shares.axis)
    pairs = dict.fromkeys(zip(devices.machines, plan.shares.counts, strict=True))
    alone = [_own(padded, plan, machine, count) for machine, count in pairs]
    last = max(alone, key=lambda found: found.predicted.step_seconds)
    certificate = replace(plan.certificate, objective=last.predicted.step_seconds)
    return replace(plan, predicted=last.predicted, modules=last.modules, certificate=certificate)


_BY_RUNS = (
    "step_seconds", "compute_seconds", "communication_seconds", "host_seconds", "host_bytes", "waiting_seconds"
)  # fmt: skip
"""Figures of a step that grow with the number of microbatches."""


def _own(padded: Program, plan: Plan, machine: Cluster, count: int) -> Plan:
    if count > 1:
        return _alone(padded, plan, machine, count)
    # A program of one microbatch hoists nothing, and is another: what a step in two has more than one in three less.
    two, three = (_alone(padded, plan, machine, n) for n in (2, 3))
    seconds = {name: max(2 * getattr(two.predicted, name) - getattr(three.predicted, name), 0.0) for name in _BY_RUNS}
    return replace(two, predicted=replace(two.predicted, **seconds))


def _alone(padded: Program, plan: Plan, machine: Cluster, count: int) -> Plan:
    """The plan with its prediction for devices of one kind that run so many microbatches."""
    program = _in(padded, count)
    if padded.repeat is not None:
        program = replace(program, repeat=replace(padded.repeat, shorter=_in(padded.repeat.shorter, count)))
    dims = analyze(program)
    return predict(program, dims, replace(plan, cluster=machine, microbatches=count), layer_classes(program, dims))


def last_device(local: Program, plan: Plan) -> tuple[Program, Plan]:
    """A rewritten program and its plan as the devices run it that are done last; the same where there are no shares."""
    if plan.shares is None:
        return local, plan
    devices = _devices(plan.cluster, dict(plan.axes), plan.shares.axis)
    pairs = dict.fromkeys(zip(devices.machines, plan.shares.counts, strict=True))
    options = [(_in(local, count), replace(plan, cluster=machine)) for machine, count in pairs]
    return max(options, key=lambda option: simulate(emitted(*option)).step_seconds)


def _in(program: Program, count: int) -> Program:
    return replace(program, part=replace(program.part, count=count))


def fastest(seconds: Seconds, count: int, devices: int) -> tuple[int, ...]:
    """How many microbatches each of some devices runs, so that the last is done as early as can be.

    Args:
        seconds: that a device takes for a number of microbatches, more for each.
        count: how many each runs in the mean.
        devices: how many there are.
    """
    counts = [1] * devices
    for _ in range(devices * (count - 1)):
        # Whoever is done first with one more gets it: no other order ends earlier, as each takes longer with each.
        counts[min(range(devices), key=lambda i: seconds(i, counts[i] + 1))] += 1
    return tuple(counts)


def require_apart(local: Program, plan: Plan) -> None:
    """Check that the microbatches of a rewritten program need nothing of other devices along the axis of the shares.

    Nor may one be told its place along the axis, or hold a part of a tensor that is split along it, but for its rows of
    the batch: the rows that it computes may be another's.

    Raises:
        InfeasibleError: names what does.
    """
    if plan.shares is None:
        return
    axis = plan.axis_names.index(plan.shares.axis)
    if local.part.results:
        raise InfeasibleError(
            f"output {min(local.part.results)} has rows of the batch, which devices with shares (pin 'shares') have in "
            "other numbers than its layout says: return the loss alone, such as with "
            "loss_fn=lambda output, batch: output.loss"
        )
    outside = {n: i.name for n, i in zip(local.placeholders, local.inputs, strict=True) if i.kind != "batch"}
    for node in local.graph.graph.nodes:
        if node.op in ("placeholder", "output") or node in local.per_step or is_hoisted(node):
            continue
        if draws(node) and node.target is not seeded:
            raise InfeasibleError(
                f"{node.name} draws random numbers in each microbatch from a generator that all devices have alike "
                "(deterministic=True), and devices with shares (pin 'shares') run different numbers of these: leave "
                "one of them out"
            )
        collective = info(node).collective
        if collective is not None and collective.axis == plan.shares.axis:
            raise _exchanges(plan, node.name, "exchanges something with other devices")
        if node.target is axis_index and node.args[0] == plan.shares.axis and not _seeds(node):
            raise _exchanges(plan, node.name, "depends on the place of a device")
        for source in node.all_input_nodes:
            known = source in outside or is_hoisted(source) or source.op == "get_attr"
            layouts = info(source).layouts if known else ()
            if any(lay is not None and isinstance(lay[axis], Split) for lay in layouts):
                raise _exchanges(plan, node.name, f"reads a part of {outside.get(source, source.name)}")


def _exchanges(plan: Plan, name: str, what: str) -> InfeasibleError:
    assert plan.shares is not None
    return InfeasibleError(
        f"{name} {what} along axis {plan.shares.axis!r} in each microbatch, and devices along it run different numbers "
        "of these (pin 'shares'); leave the pin or the pinned layout out"
    )


def _seeds(node: fx.Node) -> bool:
    """Whether a number only says which random numbers are drawn."""
    return all(u.target is seeded or (u.target in (operator.add, operator.mul) and _seeds(u)) for u in node.users)
