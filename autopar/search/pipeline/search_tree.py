"""`SearchTree`: what the branch and bound over pipelines is given, and what it knows so far."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.costs.device import Device
from autopar.errors import InfeasibleError
from autopar.ir.plan import Certificate, Plan
from autopar.ir.program import Program
from autopar.pipeline.schedules import Order
from autopar.search.budget.budget_problem import machine_of
from autopar.search.budget.cutoff import NO_CUTOFF, PrunedError
from autopar.search.microbatch.kernel_floor import KernelFloor, kernel_floor
from autopar.search.microbatch.memory_floor import MemoryFloor
from autopar.search.microbatch.needed_bytes import needed_bytes, slowdown, spread
from autopar.search.options import Job, Search
from autopar.search.pipeline.deep_models import RepeatedStages
from autopar.search.pipeline.shape import Measured, MeshKey, PipelineShape, Possible, ScheduledStages
from autopar.search.pipeline.space import inside_stage, restrictions_inside, room_for_saved, samples
from autopar.search.pipeline.stage_devices import StageDevices, devices_along
from autopar.search.rounds import EXACT_AXES
from autopar.search.solver.highs import requested
from autopar.sharding.candidates import candidates
from autopar.sharding.dims import analyze
from autopar.sharding.operator_cost import arithmetic_dtype, operator_work

GUESSED, AGAIN = 1.25, 2.0
"""Factors of estimates. Before a first plan is known: of what is not planned in any memory, since what is leads to one
soon. And of a deep model without stages within the budget, which takes longer to search than any stage. Guesses, not
fits: they decide what is planned first, and no bound depends on them."""


@dataclass(frozen=True)
class Subproblem:
    """A node of the search tree that is not expanded yet.

    Attributes:
        seconds: about what the best plan takes that it leads to.
        bound: no plan that it leads to takes less.
        expand: look into it, which may leave others open.
        checked: the bound as far as it is checked; None: it is not.
        schedule: the one it is about; empty: none.
        needed: bytes that the plan of that many seconds needs, if these are more than there are.
        unplanned: samples of a microbatch for each device of a stage, where nothing is planned yet and the seconds are
            those of kernels alone; 0: something is.
        unmeasured: whether it is not known if the plan of that many seconds fits.
        again: whether it takes longer to search than any stage.
        second: whether it comes next once a first plan is known.
        slower: about how many times as long a step takes within the memory, before that is searched.
        spread: about how many times as long as its kernels a plan takes, where nothing is planned yet.
        of: the mesh and the number of microbatches where nothing is planned yet.
        room: bytes that there are for what one of these microbatches saves.
        flat: whether it has no stages.
    """

    seconds: float
    bound: float
    expand: Callable[[], None]
    checked: float | None = None
    schedule: str = ""
    needed: float = 0.0
    unplanned: float = 0.0
    unmeasured: bool = False
    again: bool = False
    second: bool = False
    slower: float = 1.0
    spread: float = 1.0
    of: tuple[MeshKey, int] | None = None
    room: float = math.inf
    flat: bool = False


@dataclass
class SearchTree:
    """What is searched, and what the search knows.

    Attributes:
        program: of the whole batch.
        job: what is searched for, on the whole mesh.
        shapes: the pipelines that the pins allow.
        floor: seconds that no step without stages falls below.
        deadline: after which a plan that is known has to do.
        open: subproblems that are not expanded.
        best: the fastest plan that fits.
        flat: the certificate of no stages, once these are planned.
        certificates: of all plans that were found.
        pruned: bounds of attempts that the best plan ended.
        tried: numbers of microbatches by shape.
        errors: why attempts found nothing.
        free: by mesh and microbatches the plan for the devices of a stage, in any memory.
        rough: those of them that are estimates, see `autopar.search.options.Job`, and the shapes that they are for.
        blocks: such a plan of a deep model, cut into stages.
        heavy: schedules that need far too much somewhere.
        ratios: by mesh, or None without stages, and by the samples of a microbatch for each device of a stage, how much
            longer plans without a budget take than their kernels would alone, where samples are split along slow links
            as many times longer as `spread` says.
        slowdowns: bytes needed without a budget, and how much longer a step takes within it.
        along: by mesh the devices along the axis of the stages.
        floors: by mesh, or None without stages, bounds of what is not planned.
        measured: by shape and microbatches, see `ScheduledStages.measured`.
        lightest: of the pipelines that do not fit, the one that needs the least.
        searched: how many were searched within the budget.
        stopped: whether time was up, or the user stopped it.
    """

    program: Program
    job: Job
    shapes: tuple[PipelineShape, ...]
    floor: float
    deadline: float
    open: list[Subproblem] = field(default_factory=list)
    best: Plan | None = None
    flat: Certificate | None = None
    certificates: list[Certificate] = field(default_factory=list)
    pruned: list[float] = field(default_factory=list)
    tried: dict[PipelineShape, list[int]] = field(default_factory=dict)
    errors: list[InfeasibleError] = field(default_factory=list)
    free: dict[tuple[MeshKey, int], Plan] = field(default_factory=dict)
    rough: dict[tuple[MeshKey, int], Possible] = field(default_factory=dict)
    blocks: dict[tuple[MeshKey, int], RepeatedStages] = field(default_factory=dict)
    heavy: set[str] = field(default_factory=set)
    ratios: dict[MeshKey | None, dict[float, float]] = field(default_factory=dict)
    slowdowns: list[tuple[float, float]] = field(default_factory=list)
    measured: dict[tuple[PipelineShape, int], list[Measured]] = field(default_factory=dict)
    along: dict[MeshKey, StageDevices] = field(default_factory=dict)
    floors: dict[MeshKey | None, MemoryFloor] = field(default_factory=dict)
    lightest: Plan | None = None
    searched: int = 0
    stopped: bool = False

    @property
    def search(self) -> Search:
        """Limits and pins."""
        return self.job.search

    @property
    def random(self) -> bool:
        """Whether a random plan is drawn, and none is searched."""
        return self.search.recipe == "random"

    @property
    def memory(self) -> float | None:
        """Bytes per device; random plans need not fit."""
        return None if self.random else self.job.memory

    @property
    def is_rough(self) -> bool:
        """Whether what has any memory is planned roughly: it takes long for a deep model, and is seldom in a budget."""
        return self.memory is not None and self.program.repeat is not None and not self.search.check

    @property
    def seconds(self) -> float:
        """Of the best plan."""
        return math.inf if self.best is None else self.best.predicted.step_seconds

    def job_inside(self, shape: PipelineShape) -> Job:
        """What is searched for the devices of a stage, if they had the whole model and any memory."""
        limits = restrictions_inside(self.job.restrictions, self.job.axes, shape.axis)
        search, machine = inside_stage(self.search, shape), self.devices(shape).pooled(self.speeds(shape))
        return replace(
            self.job, axes=shape.inside, cluster=machine, memory=None, search=search, restrictions=limits,
            graphs=shape.devices,
        )  # fmt: skip

    def devices(self, shape: PipelineShape) -> StageDevices:
        """The devices along the axis of the stages, with a link for each axis.

        A cluster assigns its links to the axes of a mesh from the inside out. The mesh inside a stage has an axis less,
        so that its axes would get other links than they have on the whole mesh: they are named here.
        """
        if shape.mesh not in self.along:
            self.along[shape.mesh] = devices_along(self.job.cluster, dict(shape.axes), shape.axis)
        return self.along[shape.mesh]

    def speeds(self, shape: PipelineShape) -> tuple[float, ...]:
        """How fast the devices at each coordinate are for this program, 1 on average."""
        devices = self.devices(shape)
        if devices.alike:
            return (1.0,) * shape.devices
        rates = {m: 1 / least_seconds(self.program, m.device, 1) for m in dict.fromkeys(devices.machines)}
        mean = sum(rates[m] for m in devices.machines) / shape.devices
        return tuple(rates[m] / mean for m in devices.machines)

    @property
    def alone(self) -> float:
        """How many times as fast a device is while the others idle, of the kind of which that is the most."""
        cluster = self.job.cluster
        return max([cluster.device.alone, *(g.own_device.alone for g in cluster.groups)])

    def floor_of(self, shape: PipelineShape) -> float:
        """Seconds that no step with stages on this mesh falls below, idle time left out."""
        if self.devices(shape).alike:
            return self.floor
        pooled = self.devices(shape).pooled(self.speeds(shape)).device
        return least_seconds(self.program, pooled, math.prod(size for _, size in shape.axes))

    def kernels_without_stages(self) -> KernelFloor:
        """Seconds of kernels without stages; the bound is one of a whole step."""
        return self._kernels(self.job, 1.0, 1, self.floor)

    def kernels(self, shape: PipelineShape, count: int) -> KernelFloor:
        """The same with stages, in a number of microbatches or a multiple of it; idle time is left out."""
        return self._kernels(self.job_inside(shape), shape.devices, count, self.floor_of(shape))

    def _kernels(self, job: Job, stages: float, count: int, floor: float) -> KernelFloor:
        # Decided layouts may pad more than is assumed there; and nothing of a random plan is known before it is drawn.
        if self.random or self.search.layouts or self.job.restrictions.layouts:
            return KernelFloor(floor, floor)
        found = kernel_floor(self.program, machine_of(job), count)
        return KernelFloor(max(floor, found.bound / stages), max(floor, found.typical / stages))

    def rows_of_device(self, stages: int, count: int) -> float:
        """Samples of one of so many microbatches for each device of a stage."""
        return samples(self.program) * stages / (count * math.prod(self.job.axes.values()))

    def room(self, shape: PipelineShape, count: int) -> float:
        """Bytes that there are for what a microbatch saves of the whole model, see `room_for_saved`."""
        if self.memory is None or not self.program.training:
            return math.inf
        return self.memory * max(self.devices(shape).room) * room_for_saved(shape, count)

    def slower(self, stages: int, count: int, in_flight: float = 1.0, *, split: bool = False) -> float:
        """About how many times as long a step takes within the memory, before anything is planned.

        Args:
            stages: of the model that are on different devices.
            count: of microbatches.
            in_flight: how often a device holds what one microbatch saves of the whole model.
            split: whether backward passes are in two parts.
        """
        if self.memory is None or not self.program.training:
            return 1.0
        devices = math.prod(self.job.axes.values()) // stages
        needed = needed_bytes(self.program, self.job.optimizer).of_device(stages, devices, count, in_flight)
        return slowdown(needed, self.memory, split=split)

    def spread(self, shape: PipelineShape, count: int) -> float:
        """About how many times as long as its kernels a plan takes, before anything is planned on its mesh."""
        return self._spread(self.job_inside(shape), count)

    def _spread(self, job: Job, count: int) -> float:
        return spread(samples(self.program) / count, tuple(job.axes.values()), job.cluster.link_for(job.axes))

    def expected(self, shape: PipelineShape | None, count: int) -> float:
        """About what a step takes in whatever memory, before anything is planned; without stages: None."""
        if shape is None:
            return self.kernels_without_stages().typical * self._spread(self.job, count)
        return self.kernels(shape, count).typical * self.spread(shape, count)

    @property
    def most_without_stages(self) -> int:
        """Microbatches, a power of 2, beyond which slow links would split samples on the whole mesh."""
        counts = [2**i for i in range(samples(self.program).bit_length())]
        return max((n for n in counts if self._spread(self.job, n) <= 1), default=1)

    def _without_stages(self) -> float:
        """About what a step takes without stages within the memory, in as many microbatches as are best."""
        counts = [2**i for i in range(samples(self.program).bit_length())]
        return min(
            self._kernels(self.job, 1.0, n, self.floor).typical * self._spread(self.job, n)
            * self._ratio(self.rows_of_device(1, n)) * self.slower(1, n)
            for n in ([self.search.microbatches] if self.search.microbatches else counts)
        )  # fmt: skip

    def compare(self, seconds: float, expected: float, mesh: MeshKey | None, rows: float) -> None:
        """Remember how much longer a plan without a budget takes than expected, see `ratios`."""
        self.ratios.setdefault(mesh, {})[rows] = seconds / max(expected, 1e-300)

    def _ratio(self, rows: float, own: Mapping[float, float] | None = None) -> float:
        """About how much longer plans take than expected, where devices have so many samples of a microbatch.

        Args:
            rows: the samples.
            own: what is known of the mesh; if nothing is, that of all.
        """
        of = sorted((own or {r: x for known in self.ratios.values() for r, x in known.items()}).items()) or [(1.0, 1.0)]
        return float(np.interp(math.log(rows), [math.log(r) for r, _ in of], [r for _, r in of]))

    def bound_multiples(self, shape: PipelineShape, count: int) -> None:
        """What is open for multiples of a number of microbatches, in which the devices of a stage are not faster."""
        found = self.free[shape.mesh, count].certificate
        for i, o in enumerate(self.open):
            if o.of is not None and o.of[0] == shape.mesh and o.of[1] % count == 0:
                bound = max(o.bound, found.lower_bound / shape.devices)
                known = None if o.checked is None or found.checked is None else found.checked / shape.devices
                checked = None if known is None else max(o.checked or 0.0, known)
                self.open[i] = replace(o, seconds=max(o.seconds, bound), bound=bound, checked=checked)

    def least_open(self) -> Subproblem | None:
        """What is open with the lowest bound, if a plan may lie so far below the best one that this matters."""
        least = min(self.open, key=lambda o: o.bound, default=None)
        if least is None or self.best is None or self.seconds - least.bound <= self.search.gap * self.seconds:
            return None
        return least

    def weakest(self, node: Subproblem) -> tuple[MeshKey | None, int, float] | None:
        """Whose bound to raise: mesh, microbatches, and bytes for what one of them saves; None: there is no way to."""
        if node.of is not None:
            mesh, room = node.of[0], node.room
            return (*node.of, room) if len(mesh[0]) <= EXACT_AXES + 1 else None
        if not node.flat or len(self.job.axes) > EXACT_AXES:
            return None
        floor, room = self.memory_floor(None), math.inf if self.memory is None else self.memory
        return None, min(self._flat_counts, key=lambda n: floor.bound(n, room)), room

    def memory_floor(self, mesh: MeshKey | None) -> MemoryFloor:
        """The bounds of what is not planned on a mesh with stages; None: without."""
        if mesh not in self.floors:
            if mesh is None:
                job, devices = replace(self.job, memory=None, cutoff=NO_CUTOFF), 1
                counts = [n for n in self._flat_counts if n > 1]
            else:
                shape = next(a for a in self.shapes if a.mesh == mesh)
                job, devices = self.job_inside(shape), shape.devices
                counts = [o.of[1] for o in self.open if o.of is not None and o.of[0] == mesh]
            self.floors[mesh] = MemoryFloor(self.program, job, 1 / devices, math.gcd(*counts))
        return self.floors[mesh]

    def raise_bounds(self, mesh: MeshKey | None) -> None:
        """Raise the bounds of what is open on a mesh; if bounds are checked, as far as they were verified."""
        floor, seconds = self.memory_floor(mesh), self.search.time_limit if self.search.check else None
        for i, o in enumerate(self.open):
            if o.of is not None and o.of[0] == mesh:
                shape = next(a for a in self.shapes if a.mesh == mesh)
                bound = floor.bound(o.of[1], o.room, seconds) / shape.devices
            elif o.flat and mesh is None:
                room = math.inf if self.memory is None else self.memory
                bound = min(floor.bound(n, room, seconds) for n in self._flat_counts)
            else:
                continue
            if bound > o.bound:
                checked = o.checked if seconds is None else bound
                self.open[i] = replace(o, seconds=max(o.seconds, bound), bound=bound, checked=checked)

    @property
    def _flat_counts(self) -> list[int]:
        """Numbers of microbatches to try without stages."""
        if self.search.microbatches or self.program.loss is None:
            return [self.search.microbatches or 1]
        return [2**i for i in range(samples(self.program).bit_length()) if samples(self.program) % 2**i == 0]

    def next(self) -> Subproblem | None:
        """The most promising subproblem, which is not open from here on; None: no other can lead to a better plan."""
        promising = [o for o in self.open if self.promised(o) < self.seconds]
        if not promising:
            return None
        # Best first, and last the schedules that needed far too much memory somewhere.
        found = min(promising, key=lambda o: (o.schedule in self.heavy, self._urgency(o), self.promised(o)))
        self.open.remove(found)
        return found

    def _urgency(self, node: Subproblem) -> float:
        """Seconds by which subproblems are ordered: before a plan is known, those count that lead to one soon."""
        seconds = self.promised(node)
        if node.second and self.best is not None:
            return 0.0
        if node.unmeasured:
            seconds = max(seconds, self._without_stages())
        elif node.of is not None:
            ratio = self._ratio(node.unplanned, self.ratios.get(node.of[0]))
            seconds = max(seconds, node.seconds * node.spread * ratio) * node.slower
        elif not (node.needed and self.slowdowns):
            seconds *= node.slower
        if node.again:
            return seconds * AGAIN
        return seconds * GUESSED if node.unplanned and self.best is None else seconds

    def scheduled(self, part: Program, shape: PipelineShape, schedule: str, actions: Order) -> ScheduledStages:
        """A microbatch's program in stages; all schedules of a shape share what was measured."""
        measured = self.measured.setdefault((shape, part.microbatches), [])
        devices, speeds = self.devices(shape), self.speeds(shape)
        return ScheduledStages(part, shape, schedule, actions, devices, speeds, self.memory, measured)

    def promised(self, node: Subproblem) -> float:
        """Seconds; one that needs too much memory slows down at least as much as those that needed less did.

        What is not planned communicates, too: as samples that are split along slow links ask for, and as plans in other
        numbers of microbatches on its mesh do.
        """
        if node.unplanned:
            own = self.ratios.get(node.of[0]) if node.of else None
            return max(node.bound, node.seconds * node.spread * (self._ratio(node.unplanned, own) if own else 1.0))
        return node.seconds * max((slower for needed, slower in self.slowdowns if needed <= node.needed), default=1.0)

    def is_late(self) -> bool:
        """Whether what is known has to do."""
        # Without a plan the search goes on: a late answer is better than none.
        late = self.best is not None and (requested() or time.monotonic() > self.deadline)
        self.stopped = self.stopped or late
        return late

    def say(self, phase: str) -> None:
        """Report progress."""
        self.job.progress(phase, self.seconds, min((node.bound for node in self.open), default=0.0))

    def add(self, plan: Plan) -> None:
        """Remember a plan that fits."""
        self.certificates.append(plan.certificate)
        if plan.predicted.step_seconds < self.seconds:
            self.best = plan

    def fail(self, error: InfeasibleError) -> None:
        """Remember why an attempt found no plan, or by which bound none that is faster."""
        if isinstance(error, PrunedError):
            self.pruned.append(error.bound)
        else:
            self.errors.append(error)


def least_seconds(program: Program, device: Device, devices: int) -> float:
    """Seconds that no step falls below: what operators compute and move, at the peak, shared by so many devices."""
    total = 0.0
    for operator, times in Counter(analyze(program).operators.values()).items():
        work = operator_work(operator, candidates(operator, ()), ())
        rate = device.peak(arithmetic_dtype(operator, device)) * device.efficiency
        # Neither launches nor collectives nor small tiles: less than any real device takes.
        total += times * max(float(work.flops[0]) / rate, float(work.moved[0]) / (device.bandwidth * device.streaming))
    total /= devices
    repeat = program.repeat
    return total if repeat is None else float(repeat.extrapolate(total, least_seconds(repeat.shorter, device, devices)))
