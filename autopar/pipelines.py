"""`best_pipeline`: which stages, how many microbatches and which schedule, around the search inside a stage.

Every arrangement of stages on the mesh has a bound that costs nothing: all devices at the peak of their arithmetic or
memory, and the bubble that a pipeline of one stage a device cannot avoid. Those that cannot beat the best plan known
are left out. For the others the devices of a stage are planned as if they had the whole model: no pipeline is faster
than that by more than the number of its devices. Numbers of microbatches are doubled while that helps.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autopar.candidates import candidates
from autopar.cluster import Cluster
from autopar.dims import Dims
from autopar.errors import InfeasibleError
from autopar.padded import Measure
from autopar.pipeline.asked import Arrangement, arrangements, counts, inside_stage, restrictions_inside
from autopar.pipeline.schedules import Order, alone, splits
from autopar.pipelined import INSIDE, Staged, fastest, missing, orders, sends_behind, share_of, staged, suitable
from autopar.plan import TIME_LIMIT, Certificate, Plan, Scatter
from autopar.program import Program
from autopar.search.budget import HOPELESS
from autopar.search.interrupt import requested
from autopar.search.options import Job, Peak
from autopar.search.price import fits
from autopar.search.quotient import Quotient
from autopar.search.rival import Rival
from autopar.staged_blocks import staged_blocks
from autopar.work import arithmetic_dtype, operator_work

PATIENCE = 2
"""How many numbers of microbatches in a row may be slower before no more are tried."""

LIMITS = 5
"""So many time limits of one search are for looking at pipelines, and as many for searching within the budget."""

SEARCHED = 12
"""How many pipelines that do not fit as they are, are searched within the budget."""


@dataclass(frozen=True)
class Works:
    """What plans are made with.

    Attributes:
        part: the program of one of so many microbatches.
        inside: the plan of such a program for the devices of a stage, measured as is told; None: as the whole model's.
        rewrite: a program under a plan.
        flat: the best plan without stages.
    """

    part: Callable[[int], Program]
    inside: Callable[[Program, Job, Measure | None], Plan]
    rewrite: Callable[[Program, Plan], Program]
    flat: Callable[[], Plan]


def best_pipeline(program: Program, job: Job, works: Works, floor: float, factored: bool) -> Plan:
    """The fastest plan with the stages that are asked for; where they are searched, with or without.

    Args:
        program: of the whole batch.
        job: what is searched for, on the whole mesh.
        works: what plans are made with.
        floor: seconds that no step falls below, see `least_seconds`.
        factored: whether stages may take a factor of an axis.

    Raises:
        InfeasibleError: the mesh, the model or the schedule allows none, or nothing fits.
    """
    task = _Task(program, arrangements(job.search, job.axes, program.training, factored), job, works, floor)
    task.run()
    return task.result()


@dataclass(frozen=True)
class _Waiting:
    """A pipeline that takes so many seconds in more memory than there is."""

    seconds: float
    part: Program
    arrangement: Arrangement
    schedule: str
    actions: Order


class _Task:
    """The search, and what it has found."""

    def __init__(self, program: Program, ways: list[Arrangement], job: Job, works: Works, floor: float) -> None:
        self.program, self.ways, self.job, self.search, self.progress = program, ways, job, job.search, job.progress
        self.memory = None if job.search.recipe == "random" else job.memory  # whose plans need not fit
        self.works, self.floor = works, floor
        self.deadline = math.inf
        self.best: Plan | None = None
        self.certificates: list[Certificate] = []
        self.tried: dict[Arrangement, list[int]] = {}
        self.errors: list[InfeasibleError] = []
        self.free: dict[tuple[tuple[tuple[str, int], ...], str, int], Plan] = {}  # by axes, axis and microbatches
        self.waiting: list[_Waiting] = []
        self.heavy: set[str] = set()  # schedules that need far too much somewhere
        self.lightest: dict[tuple[Arrangement, int], tuple[float, Plan, str]] = {}  # what needed least within a budget
        self.least: Plan | None = None
        self.stopped = False

    def run(self) -> None:
        """Look at all arrangements, and then within the budget at those that would be the fastest."""
        if self.search.stages_open:
            self._try(self.works.flat)
        self.deadline = time.monotonic() + LIMITS * self.search.time_limit
        random = self.search.recipe == "random"
        for arrangement in [self.ways[self.search.seed % len(self.ways)]] if random and self.ways else self.ways:
            slower, least = 0, math.inf
            for count in counts(self.program, self.search, arrangement):
                if self._is_useless(arrangement, count) or slower >= PATIENCE or self._is_late():
                    continue
                try:
                    seconds = self._look(arrangement, count)
                except InfeasibleError as e:
                    self.errors.append(e)
                    continue
                slower, least = (0, seconds) if seconds < least else (slower + 1, least)
        self.deadline = time.monotonic() + LIMITS * self.search.time_limit
        for _ in range(SEARCHED):
            candidate = self._next()
            if candidate is None or self._is_late():
                break
            self._try(partial(self._fitting, candidate))
            if self._is_hopeless(candidate):
                self.heavy.add(candidate.schedule)

    def _next(self) -> _Waiting | None:
        """Of those that may be the best and may fit the fastest; schedules last that needed far too much elsewhere."""
        while self.waiting:
            found = min(self.waiting, key=lambda c: (c.schedule in self.heavy, c.seconds))
            self.waiting.remove(found)
            if found.seconds < self._seconds and not self._is_hopeless(found):
                return found
        return None

    def _is_late(self) -> bool:
        """Whether what is known has to do."""
        late = self.best is not None and (requested() or time.monotonic() > self.deadline)
        self.stopped = self.stopped or late
        return late

    def _try(self, attempt: Callable[[], Plan]) -> None:
        """Remember what an attempt finds, if it is the best."""
        try:
            found = attempt()
        except InfeasibleError as e:
            self.errors.append(e)
            return
        self.certificates.append(found.certificate)
        if found.predicted.step_seconds < self._seconds:
            self.best = found

    @property
    def _seconds(self) -> float:
        return math.inf if self.best is None else self.best.predicted.step_seconds

    def _is_useless(self, arrangement: Arrangement, count: int) -> bool:
        """Whether no pipeline like this can beat the best plan."""
        split = arrangement.virtual > 1 or any(splits(name) for name in arrangement.schedules)
        waits = 1.0 if split else least_wait(arrangement.devices, count)
        # In more microbatches the devices of a stage are not faster.
        where = arrangement.axes, arrangement.axis
        known = [p for (*place, n), p in self.free.items() if tuple(place) == where and count % n == 0]
        bound = max((p.certificate.lower_bound / arrangement.devices for p in known), default=0.0)
        return max(self.floor * waits, bound) >= self._seconds

    def _look(self, a: Arrangement, count: int) -> float:
        """Seconds of the fastest plan with these stages and so many microbatches, whatever it needs.

        One that does not fit waits to be searched within the budget.

        Raises:
            InfeasibleError: the model does not allow it.
        """
        phase = f"{a.devices} devices along {a.axis}, {a.stages} stages, {count} microbatches"
        self.progress(phase, self._seconds, min((c.lower_bound for c in self.certificates), default=0.0))
        self.tried.setdefault(a, []).append(count)
        allowed = orders(a, count)
        part = self.works.part(count)
        if part.training and part.microbatches == 1 and not any(alone(name) for name in allowed):
            raise InfeasibleError(
                'in a pipeline of one microbatch all stages but one wait: pin {"microbatches": n} with n of at least 2'
            )
        key = (a.axes, a.axis, count)
        if key not in self.free:
            self.free[key] = self._inside(part, a)
        cuts = self._staged(part, self.free[key], a, tuple(allowed.values()))
        least = math.inf
        for cut, schedule in self._ordered(cuts, allowed):
            actions = allowed[schedule]
            whole = cut.whole(schedule, actions)
            self.certificates.append(whole.certificate)  # its bound is that of all schedules, in whatever memory
            least = min(least, whole.predicted.step_seconds)
            if self.memory is None or fits(_needed(whole), self.memory):
                if whole.predicted.step_seconds < self._seconds:
                    self.best = whole
                break  # the next takes longer
            self.waiting.append(_Waiting(whole.predicted.step_seconds, part, a, schedule, actions))
            self.least = whole if self.least is None else min(self.least, whole, key=_needed)
        return least

    def _ordered(self, cuts: Sequence[Staged], allowed: Mapping[str, Order]) -> Sequence[tuple[Staged, str]]:
        """Schedules, the fastest first, each with what is fastest for it; of a random plan one."""
        if self.search.recipe == "random":
            schedule = list(allowed)[self.search.seed % len(allowed)]
            ways = suitable(cuts, allowed[schedule])
            return [(ways[self.search.seed % len(ways)], schedule)]
        found = {name: fastest(cuts, actions) for name, actions in allowed.items()}
        return sorted(((cut, name) for name, cut in found.items()), key=lambda f: f[0].seconds(allowed[f[1]]))

    def _fitting(self, c: _Waiting) -> Plan:
        """The best plan under a schedule that fits.

        Raises:
            InfeasibleError: none does.
        """
        a = c.arrangement

        def measured(padded: Program, classes: Quotient) -> Peak:
            del classes

            def peak(plan: Plan) -> Mapping[str, float]:
                held = self._fastest(padded, plan, c).peak(c.actions)
                known = self.lightest.get((a, c.part.microbatches))
                if padded is c.part and (known is None or sum(held.values()) < known[0]):
                    self.lightest[a, c.part.microbatches] = sum(held.values()), plan, c.schedule
                return held

            return peak

        self.progress(f"{a.devices} devices along {a.axis}, {a.stages} stages, {c.schedule}", self._seconds, 0.0)
        share, rival = share_of(c.actions, a.stages), Rival(self._seconds * a.devices)
        job = replace(self._job(a), memory=self.memory, rival=rival, share=share)
        plan = self.works.inside(c.part, job, measured)
        found = self._fastest(c.part, plan, c).whole(c.schedule, c.actions)
        alike = self.free[a.axes, a.axis, c.part.microbatches].certificate  # of all plans, in whatever memory
        bound = min(alike.lower_bound / a.devices, found.predicted.step_seconds)
        checked = None if alike.checked is None else alike.checked / a.devices
        return replace(found, certificate=replace(found.certificate, lower_bound=bound, checked=checked))

    def _is_hopeless(self, c: _Waiting) -> bool:
        """Whether what needed least under any schedule needs far too much under this one."""
        if self.memory is None or (c.arrangement, c.part.microbatches) not in self.lightest:
            return False
        needed, plan, schedule = self.lightest[c.arrangement, c.part.microbatches]
        if schedule != c.schedule:
            needed = sum(self._fastest(c.part, plan, c).peak(c.actions).values())
        return needed > HOPELESS * self.memory

    def _inside(self, part: Program, a: Arrangement) -> Plan:
        """The best plan for the devices of a stage, whatever it needs."""
        return self.works.inside(part, self._job(a), None)

    def _job(self, a: Arrangement) -> Job:
        """What is searched for the devices of a stage, if they had the whole model and any memory."""
        limits = restrictions_inside(self.job.restrictions, self.job.axes, a.axis)
        search, machine = inside_stage(self.search, a), self._machine(a)
        return replace(self.job, axes=a.inside, cluster=machine, memory=None, search=search, restrictions=limits)

    def _fastest(self, part: Program, plan: Plan, c: _Waiting) -> Staged:
        return fastest(self._staged(part, plan, c.arrangement, [c.actions]), c.actions)

    def _staged(self, part: Program, plan: Plan, a: Arrangement, allowed: Sequence[Order]) -> list[Staged]:
        link = self._machine(a).axis_links[a.axis]
        ways = [Scatter(a.axis, behind) for behind in dict.fromkeys(map(sends_behind, allowed))]
        if part.repeat is not None:
            return staged_blocks(part, plan, a, link, self.works.rewrite, ways)
        return staged(part, plan, a, link, self.search, self.works.rewrite, ways)

    def _machine(self, a: Arrangement) -> Cluster:
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
        if len({c.space for c in self.certificates}) == 1:
            return self.best
        bound = min(c.lower_bound for c in self.certificates)
        ways = [
            f"{a.devices} devices of axis {a.axis}, {a.virtual} each, {', '.join(map(str, numbers))} microbatches"
            for a, numbers in self.tried.items()
        ]
        inside = self.certificates[0].space if self.search.stages_open else self.certificates[0].space.split(INSIDE)[-1]
        none = "no pipeline, or " if self.search.stages_open else ""
        space = f"{none}stages cut anywhere, alike inside, in any order, on {'; or '.join(ways)}{INSIDE}{inside}"
        method = TIME_LIMIT if self.stopped else self.best.certificate.method
        verified = [c.checked for c in self.certificates if c.checked is not None]
        checked = min(verified) if len(verified) == len(self.certificates) else None
        certificate = replace(self.best.certificate, lower_bound=bound, space=space, method=method, checked=checked)
        return replace(self.best, certificate=certificate)


def _needed(plan: Plan) -> float:
    return sum(plan.predicted.peak_bytes.values())


def least_wait(devices: int, count: int) -> float:
    """How much longer than its work a device of a pipeline takes at least, whose devices have a stage each.

    The devices of later stages wait for those before, at both ends of a step. If stages take ``t[0], t[1], ...`` for a
    microbatch, device ``d`` is busy or waits for ``count * t[d] + sum(t[:d])``; that is least where all are the same,
    ``t[d + 1] = t[d] * (1 - 1 / count)``.

    >>> round(least_wait(4, 1), 3), round(least_wait(4, 8), 3), round(least_wait(4, 800), 3)
    (4.0, 1.208, 1.002)
    """
    return float(devices / (count * (1 - (1 - 1 / count) ** devices)))


def least_seconds(dims: Dims, machine: Cluster, devices: int) -> float:
    """Seconds that no step falls below: what operators compute and move, at the peak, shared by so many devices."""
    device, total = machine.device, 0.0
    for operator, times in Counter(dims.operators.values()).items():
        work = operator_work(operator, candidates(operator, ()), ())
        rate = device.peak(arithmetic_dtype(operator, device)) * device.efficiency
        total += times * max(float(work.flops[0]) / rate, float(work.moved[0]) / (device.bandwidth * device.streaming))
    return total / devices
