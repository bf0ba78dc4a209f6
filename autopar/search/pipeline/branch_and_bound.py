"""`best_pipeline`: which stages, how many microbatches and which schedule, around the search inside a stage.

It is a branch and bound, the most promising first. What is not looked into yet waits with the seconds that it may lead
to and a bound that holds for all of it; a step looks into one of these, and may leave several that are known better:

1. A place for the stages (an axis of the mesh, or a factor of one) with a number of microbatches. Its bound costs
   nothing: all devices at the peak of their arithmetic or memory, and the bubble that a pipeline of one stage a device
   cannot avoid. Looking into it plans the devices of a stage as if they had the whole model and any memory: no pipeline
   there is faster than that by more than the number of its devices, in so many microbatches or in more.
2. So many stages on each device. The planned model is cut into them.
3. A schedule. It is simulated.
4. A pipeline that is known to the second, but needs more memory than there is. It is searched within the budget.

What waits with more seconds than the best plan found takes is left there. To have no stages at all waits with the rest.
"""

from __future__ import annotations

import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autopar.costs.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.ir.plan import TIME_LIMIT, Certificate, Plan, Scatter
from autopar.ir.program import Program
from autopar.pipeline.schedules import Order, alone, order, require_numbers
from autopar.pipeline.stage_graphs import INPUT
from autopar.search.budget.cutoff import Cutoff, PrunedError
from autopar.search.budget.lagrangian import fits
from autopar.search.budget.within_budget import HOPELESS
from autopar.search.microbatch.split import require_early_backward
from autopar.search.options import Job
from autopar.search.pipeline.deep_models import RepeatedStages, require_blocks
from autopar.search.pipeline.space import (
    PipelineShape,
    bubble,
    counts,
    inside_stage,
    pipeline_shapes,
    restrictions_inside,
    waits,
)
from autopar.search.pipeline.stage_plan import (
    INSIDE,
    StagePlan,
    fastest,
    missing,
    sends_behind,
    share_of,
    staged,
    suitable,
)
from autopar.search.solver.interrupt import requested
from autopar.search.variants import part_of, plan_in_any_memory, plan_of_part, plan_of_whole
from autopar.sharding.candidates import candidates
from autopar.sharding.dims import analyze
from autopar.sharding.operator_cost import arithmetic_dtype, operator_work

LIMITS = 5
"""So many time limits of one search are for all pipelines together, once a plan is known."""

SEARCHED = 12
"""How many pipelines that do not fit as they are, are searched within the budget."""


def best_pipeline(program: Program, job: Job, *, factored: bool = False) -> Plan:
    """The fastest plan with the stages that are asked for; where they are searched, with or without.

    Args:
        program: of the whole batch.
        job: what is searched for, on the whole mesh.
        factored: whether stages may take a factor of an axis.

    Raises:
        InfeasibleError: the mesh, the model or the schedule allows none, or nothing fits.
    """
    if program.training:
        require_early_backward(program)
    found = _PipelineSearch(program, pipeline_shapes(job.search, job.axes, program.training, factored), job)
    found.run()
    return found.result()


@dataclass(frozen=True)
class _Open:
    """What is not looked into yet.

    Attributes:
        seconds: about what the best plan takes that it leads to.
        bound: no plan that it leads to takes less.
        look: into it, which may leave others open.
        checked: the bound as far as it is checked; None: it is not.
        schedule: the one it is about; empty: none.
        needed: bytes that the plan of that many seconds needs, if these are more than there are.
    """

    seconds: float
    bound: float
    look: Callable[[], None]
    checked: float | None = None
    schedule: str = ""
    needed: float = 0.0


_Key = tuple[tuple[tuple[str, int], ...], str]
"""Axes of a mesh, and the one along which stages lie."""


@dataclass(frozen=True)
class _Place:
    """Where stages may lie, and the microbatches that they may work on.

    Attributes:
        ways: with so many stages on each device.
        numbers: of microbatches, in the order in which they are tried, each with those ways for which it is.
    """

    ways: tuple[PipelineShape, ...]
    numbers: tuple[tuple[int, tuple[PipelineShape, ...]], ...]

    @property
    def key(self) -> _Key:
        """Axes, and that of the stages."""
        return self.ways[0].axes, self.ways[0].axis


@dataclass(frozen=True)
class _Cut:
    """A model in stages, and a schedule."""

    part: Program
    arrangement: PipelineShape
    schedule: str
    actions: Order


class _PipelineSearch:
    """The search, and what it has found."""

    def __init__(self, program: Program, ways: list[PipelineShape], job: Job) -> None:
        self.program, self.ways, self.job, self.search, self.progress = program, ways, job, job.search, job.progress
        self.random = job.search.recipe == "random"
        self.memory = None if self.random else job.memory  # random plans need not fit
        # No step is faster than this, with stages or without.
        self.floor = least_seconds(program, job.cluster, math.prod(job.axes.values()))
        self.deadline = time.monotonic() + LIMITS * self.search.time_limit
        self.open: list[_Open] = []
        self.best: Plan | None = None
        self.flat: Certificate | None = None  # of no stages
        self.certificates: list[Certificate] = []
        self.bounds: list[float] = []  # of what was given up
        self.tried: dict[PipelineShape, list[int]] = {}
        self.errors: list[InfeasibleError] = []
        self.free: dict[tuple[_Key, int], Plan] = {}  # by place and microbatches
        self.blocks: dict[tuple[_Key, int], RepeatedStages] = {}
        self.heavy: set[str] = set()  # schedules that need far too much somewhere
        self.costs: list[tuple[float, float]] = []  # bytes needed, and how much longer it takes in the budget
        self.lightest: dict[
            tuple[PipelineShape, int], tuple[float, Plan, str]
        ] = {}  # what needed least within a budget
        self.least: Plan | None = None
        self.searched = 0
        self.stopped = False

    def run(self) -> None:
        """Look into what promises the most, until nothing promises more than what is known."""
        if self.search.stages_open:
            self.open.append(_Open(self.floor, self.floor, self._without_stages, self.floor))
        for place in self._places():
            self._consider(place, 0)
        while candidates := [o for o in self.open if self._promised(o) < self._seconds]:
            if self._is_late():
                break
            found = min(candidates, key=lambda o: (o.schedule in self.heavy, self._promised(o)))
            self.open.remove(found)
            try:
                found.look()
            except InfeasibleError as e:
                self.errors.append(e)

    def _places(self) -> list[_Place]:
        """Where stages may lie; of a random plan one."""
        ways, seed = [a for a in self.ways if self._has_enough(a)], self.search.seed
        if self.random and ways:
            ways = [ways[seed % len(ways)]]
        grouped: dict[_Key, list[PipelineShape]] = {}
        for a in ways:
            grouped.setdefault((a.axes, a.axis), []).append(a)
        found = []
        for own in grouped.values():
            allowed = {a: counts(self.program, self.search, a) for a in own}
            numbers = sorted({n for each in allowed.values() for n in each})
            if self.random:
                numbers = [numbers[seed % min(len(numbers), 3)]]
            found.append(_Place(tuple(own), tuple((n, tuple(a for a in own if n in allowed[a])) for n in numbers)))
        return found

    def _has_enough(self, a: PipelineShape) -> bool:
        """Whether there is a block for each stage, where blocks are left out."""
        try:
            require_blocks(self.program, a)
        except InfeasibleError as e:
            self.errors.append(e)
            return False
        return True

    def _promised(self, o: _Open) -> float:
        """Seconds; where more memory is needed than there is, it costs as much as where less was needed, at least."""
        return o.seconds * max((cost for needed, cost in self.costs if needed <= o.needed), default=1.0)

    def _is_late(self) -> bool:
        """Whether what is known has to do."""
        late = self.best is not None and (requested() or time.monotonic() > self.deadline)
        self.stopped = self.stopped or late
        return late

    def _try(self, attempt: Callable[[], Plan]) -> Plan | None:
        """Remember what an attempt finds, if it is the best."""
        try:
            found = attempt()
        except PrunedError as e:
            self.bounds.append(e.bound)
            return None
        except InfeasibleError as e:
            self.errors.append(e)
            return None
        self.certificates.append(found.certificate)
        if found.predicted.step_seconds < self._seconds:
            self.best = found
        return found

    @property
    def _seconds(self) -> float:
        return math.inf if self.best is None else self.best.predicted.step_seconds

    def _without_stages(self) -> None:
        """Plan the whole model on all devices, in whatever memory; that within the budget waits."""
        free = plan_in_any_memory(self.program, self.job)
        self.flat = own = free.certificate
        if self.memory is None:
            self._try(lambda: free)
        else:
            self.open.append(_Open(free.predicted.step_seconds, own.lower_bound, self._flat, own.checked))

    def _flat(self) -> None:
        """The best within the budget without stages."""
        if found := self._try(lambda: plan_of_whole(self.program, self.job, Cutoff(self._seconds))):
            self.flat = found.certificate

    def _consider(self, place: _Place, number: int) -> None:
        """Leave a place with its next number of microbatches open."""
        if number >= len(place.numbers):
            return
        count, ways = place.numbers[number]
        for a in ways:
            self.tried.setdefault(a, []).append(count)
        # In more microbatches the devices of a stage are not faster.
        known = [p for (where, n), p in self.free.items() if where == place.key and count % n == 0]
        devices, least = ways[0].devices, self.floor * min(waits(a, count) for a in ways)
        alike = max(known, key=lambda p: p.certificate.lower_bound, default=None)
        bound, seconds = least, least
        checked: float | None = least
        if alike is not None:
            bound = max(least, alike.certificate.lower_bound / devices)
            checked = None if alike.certificate.checked is None else max(least, alike.certificate.checked / devices)
            waiting = min(bubble(a, name, count) for a in ways for name in a.schedules)
            seconds = alike.predicted.step_seconds / devices * (1 + waiting)
        look = partial(self._plan, place, number)
        self.open.append(_Open(max(bound, seconds), bound, look, checked))

    def _plan(self, place: _Place, number: int) -> None:
        """Plan the devices of a stage, if they had the whole model and any memory.

        Raises:
            InfeasibleError: the model does not allow it.
        """
        (count, ways), first = place.numbers[number], place.ways[0]
        self._say(f"{first.devices} devices along {first.axis}, {count} microbatches")
        try:
            possible = [(a, allowed) for a in ways if (allowed := self._allowed(a, count))]
            if possible:
                part = part_of(self.program, self.job, count)
                free = self.free[place.key, count] = plan_of_part(self.program, part, self._job(first))
                own, seconds = free.certificate, free.predicted.step_seconds / first.devices
                checked = None if own.checked is None else own.checked / first.devices
                for a, allowed in possible:
                    promised = seconds * (1 + min(bubble(a, name, count) for name in allowed))
                    bound = max(own.lower_bound / a.devices, self.floor * waits(a, count))
                    self.open.append(_Open(promised, bound, partial(self._cut, part, a, allowed), checked))
        finally:
            self._consider(place, number + 1)

    def _allowed(self, a: PipelineShape, count: int) -> tuple[str, ...]:
        """The schedules that work for so many microbatches."""
        found = []
        for schedule in a.schedules:
            try:
                require_numbers(schedule, a.devices, count, a.virtual)
                found.append(schedule)
            except ValueError as e:
                self.errors.append(InfeasibleError(f"no pipeline: {e}"))
        if found and self.program.training and count == 1 and not any(alone(name) for name in found):
            self.errors.append(InfeasibleError(
                'in a pipeline of one microbatch all stages but one wait: pin {"microbatches": n} with n of at least 2'
            ))  # fmt: skip
            return ()
        return tuple(found)

    def _cut(self, part: Program, a: PipelineShape, schedules: Sequence[str]) -> None:
        """Cut the model, planned for any memory, into stages.

        Raises:
            InfeasibleError: it has too few modules.
        """
        self._say(f"{a.devices} devices along {a.axis}, {a.stages} stages, {part.microbatches} microbatches")
        free = self.free[(a.axes, a.axis), part.microbatches]
        allowed = {name: order(name, a.devices, part.microbatches, a.virtual) for name in schedules}
        cuts = self._staged(part, free, a, tuple(allowed.values()))
        names, seed = list(allowed), self.search.seed
        for schedule in [names[seed % len(names)]] if self.random else names:
            cut, ways = _Cut(part, a, schedule, allowed[schedule]), suitable(cuts, allowed[schedule])
            if self.random:
                ways = [ways[seed % len(ways)]]
            own, promised = free.certificate, min(w.busiest(cut.actions) for w in ways)
            checked = None if own.checked is None else own.checked / a.devices
            bound = own.lower_bound / a.devices
            self.open.append(_Open(promised, bound, partial(self._simulate, cut, ways), checked, schedule))

    def _simulate(self, c: _Cut, cuts: Sequence[StagePlan]) -> None:
        """Seconds under a schedule; where it does not fit, it waits to be searched within the budget."""
        seconds, cut = min(((cut.seconds(c.actions), cut) for cut in cuts), key=lambda found: found[0])
        whole = cut.whole(c.schedule, c.actions, seconds)
        needed, own = _needed(whole), whole.certificate
        self.certificates.append(own)  # its bound is that of all schedules, in whatever memory
        if self.memory is not None and not fits(needed, self.memory):
            self.least = whole if self.least is None else min(self.least, whole, key=_needed)
            look = partial(self._fit, c, seconds, needed)
            self.open.append(_Open(seconds, own.lower_bound, look, own.checked, c.schedule, needed))
        elif seconds < self._seconds:
            self.best = whole

    def _fit(self, c: _Cut, seconds: float, needed: float) -> None:
        """Search a pipeline that takes so many seconds, and needs so many bytes, within the budget."""
        if self.searched >= SEARCHED or self._is_hopeless(c):
            return
        self.searched += 1
        if found := self._try(partial(self._fitting, c)):
            self.costs.append((needed, found.predicted.step_seconds / seconds))
        if self._is_hopeless(c):
            self.heavy.add(c.schedule)
        if self.searched % 4 == 0:
            gc.collect()  # graphs that were measured

    def _say(self, phase: str) -> None:
        self.progress(phase, self._seconds, min((o.bound for o in self.open), default=0.0))

    def _fitting(self, c: _Cut) -> Plan:
        """The best plan under a schedule that fits.

        Raises:
            InfeasibleError: none does.
        """
        a = c.arrangement
        self._say(f"{a.devices} devices along {a.axis}, {a.stages} stages, {c.schedule}")
        share, cutoff = share_of(c.actions, a.stages), Cutoff(self._seconds * a.devices)
        job = self._job(a)
        search = replace(job.search, check=False)  # the bound that holds is that of any memory
        job = replace(job, memory=self.memory, cutoff=cutoff, share=share, search=search)
        try:
            plan = plan_of_part(self.program, c.part, job, _Stages(self, c))
        except PrunedError as e:  # of a device that has the whole model
            raise PrunedError(e.bound / a.devices) from e
        cut = self._fastest(c.part, plan, c)
        found = cut.whole(c.schedule, c.actions, cut.seconds(c.actions))
        alike = self.free[(a.axes, a.axis), c.part.microbatches].certificate  # of all plans, in whatever memory
        bound = min(alike.lower_bound / a.devices, found.predicted.step_seconds)
        checked = None if alike.checked is None else alike.checked / a.devices
        return replace(found, certificate=replace(found.certificate, lower_bound=bound, checked=checked))

    def _is_hopeless(self, c: _Cut) -> bool:
        """Whether what needed least under any schedule needs far too much under this one."""
        if self.memory is None or (c.arrangement, c.part.microbatches) not in self.lightest:
            return False
        needed, plan, schedule = self.lightest[c.arrangement, c.part.microbatches]
        if schedule != c.schedule:
            needed = sum(self._fastest(c.part, plan, c).peak(c.actions).values())
        return needed > HOPELESS * self.memory

    def _job(self, a: PipelineShape) -> Job:
        """What is searched for the devices of a stage, if they had the whole model and any memory."""
        limits = restrictions_inside(self.job.restrictions, self.job.axes, a.axis)
        search, machine = inside_stage(self.search, a), self._machine(a)
        return replace(self.job, axes=a.inside, cluster=machine, memory=None, search=search, restrictions=limits)

    def _fastest(self, part: Program, plan: Plan, c: _Cut) -> StagePlan:
        return fastest(self._staged(part, plan, c.arrangement, [c.actions]), c.actions)

    def _staged(self, part: Program, plan: Plan, a: PipelineShape, allowed: Sequence[Order]) -> list[StagePlan]:
        link = self._machine(a).axis_links[a.axis]
        ways = [Scatter(a.axis, behind) for behind in dict.fromkeys(map(sends_behind, allowed))]
        if part.repeat is None:
            return staged(part, plan, a, link, self.search, ways)
        key = (a.axes, a.axis), part.microbatches
        if plan is not self.free[key]:
            split = any(action.kind == INPUT for rows in allowed for row in rows for action in row)
            return RepeatedStages(part, plan, a, link, split).staged(a, ways)
        if key not in self.blocks:  # for all schedules
            self.blocks[key] = RepeatedStages(part, plan, a, link, part.training)
        return self.blocks[key].staged(a, ways)

    def _machine(self, a: PipelineShape) -> Cluster:
        """The devices, with a link for each axis."""
        axes = dict(a.axes)
        return replace(self.job.cluster, axis_links=dict(zip(axes, self.job.cluster.link_for(axes), strict=True)))

    def result(self) -> Plan:
        """The best plan, with a certificate for all that was looked at."""
        if self.best is None:
            needed = min((e.needed for e in self.errors if e.needed is not None), default=math.inf)
            if self.least is None or self.memory is None:
                raise self.errors[0]
            raise missing(self.least, min(needed, _needed(self.least)), self.memory)
        left = [o for o in self.open if o.bound < self._seconds]
        bound = min(*(c.lower_bound for c in self.certificates), *self.bounds, *(o.bound for o in left), self._seconds)
        if len({c.space for c in self.certificates}) == 1 and bound >= self.best.certificate.lower_bound:
            return self.best
        ways = [
            f"{a.devices} devices of axis {a.axis}, {a.virtual} each, {', '.join(map(str, numbers))} microbatches"
            for a, numbers in self.tried.items()
        ]
        inside = self.flat.space if self.flat else self.certificates[0].space.split(INSIDE)[-1]
        none = "no pipeline, or " if self.search.stages_open else ""
        space = f"{none}stages cut anywhere, alike inside, in any order, on {'; or '.join(ways)}{INSIDE}{inside}"
        method = TIME_LIMIT if self.stopped else self.best.certificate.method
        verified = [*(c.checked for c in self.certificates), *(o.checked for o in left), *self.bounds]
        checked = None if None in verified else min(b for b in verified if b is not None)
        certificate = replace(self.best.certificate, lower_bound=bound, space=space, method=method, checked=checked)
        return replace(self.best, certificate=certificate)


@dataclass(frozen=True)
class _Stages:
    """Measures plans for the devices of a stage by the heaviest stage of a pipeline."""

    search: _PipelineSearch
    cut: _Cut

    def of(self, program: Program) -> _StagesOf:
        """The meter of a program, whose dims may be padded."""
        return _StagesOf(self.search, self.cut, program)


@dataclass(frozen=True)
class _StagesOf:
    """The same, of one program."""

    search: _PipelineSearch
    cut: _Cut
    program: Program

    def held(self, plan: Plan) -> Mapping[str, float]:
        """Bytes by category on the device that holds the most."""
        cut = self.cut
        held = self.search._fastest(self.program, plan, cut).peak(cut.actions)
        key, size = (cut.arrangement, cut.part.microbatches), sum(held.values())
        known = self.search.lightest.get(key)
        if self.program is cut.part and (known is None or size < known[0]):
            self.search.lightest[key] = size, plan, cut.schedule
        return held


def _needed(plan: Plan) -> float:
    return sum(plan.predicted.peak_bytes.values())


def least_seconds(program: Program, machine: Cluster, devices: int) -> float:
    """Seconds that no step falls below: what operators compute and move, at the peak, shared by so many devices."""
    device, total = machine.device, 0.0
    for operator, times in Counter(analyze(program).operators.values()).items():
        work = operator_work(operator, candidates(operator, ()), ())
        rate = device.peak(arithmetic_dtype(operator, device)) * device.efficiency
        total += times * max(float(work.flops[0]) / rate, float(work.moved[0]) / (device.bandwidth * device.streaming))
    total /= devices
    repeat = program.repeat
    return (
        total if repeat is None else float(repeat.extrapolate(total, least_seconds(repeat.shorter, machine, devices)))
    )
