"""What the branch and bound over pipelines is given (`PipelineProblem`) and what it knows so far (`SearchRecord`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autopar.costs.cluster import Cluster, Link
from autopar.errors import InfeasibleError
from autopar.ir.plan import Certificate, Plan
from autopar.ir.program import Program
from autopar.pipeline.schedules import Order
from autopar.search.budget.cutoff import PrunedError
from autopar.search.options import Job, Search
from autopar.search.pipeline.deep_models import RepeatedStages
from autopar.search.pipeline.shape import LightestPlan, PipelineShape
from autopar.search.pipeline.space import inside_stage, restrictions_inside
from autopar.search.solver.interrupt import requested

MeshKey = tuple[tuple[tuple[str, int], ...], str]
"""Axes of a mesh, and the one along which stages lie."""


@dataclass(frozen=True)
class PipelineProblem:
    """What is searched.

    Attributes:
        program: of the whole batch.
        job: what is searched for, on the whole mesh.
        shapes: the pipelines that the pins allow.
        floor: seconds that no step falls below.
        deadline: after which a plan that is known has to do.
    """

    program: Program
    job: Job
    shapes: tuple[PipelineShape, ...]
    floor: float
    deadline: float

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

    def job_inside(self, shape: PipelineShape) -> Job:
        """What is searched for the devices of a stage, if they had the whole model and any memory."""
        limits = restrictions_inside(self.job.restrictions, self.job.axes, shape.axis)
        search, machine = inside_stage(self.search, shape), self._machine(shape)
        return replace(self.job, axes=shape.inside, cluster=machine, memory=None, search=search, restrictions=limits)

    def link(self, shape: PipelineShape) -> Link:
        """The link between stages."""
        return self._machine(shape).axis_links[shape.axis]

    def _machine(self, shape: PipelineShape) -> Cluster:
        """The devices, with a link for each axis."""
        axes = dict(shape.axes)
        return replace(self.job.cluster, axis_links=dict(zip(axes, self.job.cluster.link_for(axes), strict=True)))


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
    """

    seconds: float
    bound: float
    expand: Callable[[], None]
    checked: float | None = None
    schedule: str = ""
    needed: float = 0.0


@dataclass(frozen=True)
class StagePosition:
    """Where stages may lie, and the microbatches that they may work on.

    Attributes:
        shapes: with so many stages on each device.
        numbers: of microbatches, in the order in which they are tried, each with those shapes for which it is.
    """

    shapes: tuple[PipelineShape, ...]
    numbers: tuple[tuple[int, tuple[PipelineShape, ...]], ...]

    @property
    def key(self) -> MeshKey:
        """Axes, and that of the stages."""
        return self.shapes[0].axes, self.shapes[0].axis


@dataclass(frozen=True)
class ScheduledPart:
    """The program of a microbatch in stages, and a schedule."""

    part: Program
    shape: PipelineShape
    schedule: str
    actions: Order


@dataclass
class SearchRecord:
    """What the search knows.

    Attributes:
        open: subproblems that are not expanded.
        best: the fastest plan that fits.
        flat: the certificate of no stages, once these are planned.
        certificates: of all plans that were found.
        bounds: of attempts that the best plan ended.
        tried: numbers of microbatches by shape.
        errors: why attempts found nothing.
        free: by mesh and microbatches the plan for the devices of a stage, in any memory.
        blocks: such a plan of a deep model, cut into stages.
        heavy: schedules that need far too much somewhere.
        costs: bytes needed without a budget, and how much longer a step takes within it.
        lightest: by shape and microbatches, the plan that needed the least within the budget.
        least: of the pipelines that do not fit, the one that needs the least.
        searched: how many were searched within the budget.
        stopped: whether time was up, or the user stopped it.
    """

    open: list[Subproblem] = field(default_factory=list)
    best: Plan | None = None
    flat: Certificate | None = None
    certificates: list[Certificate] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)
    tried: dict[PipelineShape, list[int]] = field(default_factory=dict)
    errors: list[InfeasibleError] = field(default_factory=list)
    free: dict[tuple[MeshKey, int], Plan] = field(default_factory=dict)
    blocks: dict[tuple[MeshKey, int], RepeatedStages] = field(default_factory=dict)
    heavy: set[str] = field(default_factory=set)
    costs: list[tuple[float, float]] = field(default_factory=list)
    lightest: dict[tuple[PipelineShape, int], LightestPlan] = field(default_factory=dict)
    least: Plan | None = None
    searched: int = 0
    stopped: bool = False

    @property
    def seconds(self) -> float:
        """Of the best plan."""
        return math.inf if self.best is None else self.best.predicted.step_seconds

    def promised(self, node: Subproblem) -> float:
        """Seconds; one that needs too much memory slows down at least as much as those that needed less did."""
        return node.seconds * max((cost for needed, cost in self.costs if needed <= node.needed), default=1.0)

    def is_late(self, deadline: float) -> bool:
        """Whether what is known has to do."""
        late = self.best is not None and (requested() or time.monotonic() > deadline)
        self.stopped = self.stopped or late
        return late

    def say(self, job: Job, phase: str) -> None:
        """Report progress."""
        job.progress(phase, self.seconds, min((node.bound for node in self.open), default=0.0))

    def add(self, plan: Plan) -> None:
        """Remember a plan that fits."""
        self.certificates.append(plan.certificate)
        if plan.predicted.step_seconds < self.seconds:
            self.best = plan

    def fail(self, error: InfeasibleError) -> None:
        """Remember why an attempt found no plan, or by which bound none that is faster."""
        if isinstance(error, PrunedError):
            self.bounds.append(error.bound)
        else:
            self.errors.append(error)
