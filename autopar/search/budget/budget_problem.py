"""`BudgetProblem`: what is searched within a memory budget: a program, its devices and what is decided already.

Its methods lead from memory counted in some way to a problem, from a solution to a plan, and from a plan to the peak of
its graph.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from autopar.costs.memory import format_bytes
from autopar.errors import InfeasibleError
from autopar.ir.plan import Certificate, Plan
from autopar.ir.program import SHORT, Program
from autopar.search.budget.lagrangian import fits
from autopar.search.budget.pareto import Frontier
from autopar.search.emitted.peak import least_state, optimizer_bytes, peak_of, saved_for_backward, state_bytes
from autopar.search.emitted.rewritten import unverified
from autopar.search.formulation.build import Formulation, build
from autopar.search.formulation.memory_model import MemoryModel
from autopar.search.formulation.pins import Restrictions
from autopar.search.options import Job, Search
from autopar.search.overlap.weights import Weights
from autopar.search.pipeline.stage_peak import peak_in_stages
from autopar.search.read_plan import plan_of
from autopar.search.solver.certify import Claim
from autopar.search.solver.duals import require_cost
from autopar.search.solver.layer_mix import LayerMix
from autopar.search.solver.minimize import Limits
from autopar.search.solver.problem import Ints
from autopar.sharding.assignment import all_moves, assign
from autopar.sharding.candidates import split_parts
from autopar.sharding.dims import Dims
from autopar.sharding.layer_classes import LayerClasses
from autopar.sharding.redistribute import Tables
from autopar.sharding.redistribute.moves import Machine, held_parts

ROOM = 2
"""Tensors far within a budget take it this many times at least: operators and collectives have buffers besides."""


@dataclass(frozen=True)
class BudgetProblem:
    """What is searched.

    Attributes:
        program: canonical program.
        dims: its dimension analysis.
        classes: which nodes share a decision.
        tables: redistribution costs.
        limits: relative gap and deadline.
        job: what it is for.
        claims: grows by each bound of all plans that is proved.
        weights: prices of seconds, where collectives overlap kernels.
        met: grows by the labelings that the search without a budget looks at, each with its problem.
        start: a labeling that is known, for that search.
        placed: what variables do on each axis in the last plan that some of the axes were searched for.
        raise_bound: raises a bound of all plans within a memory constraint, of which this much is known.
    """

    program: Program
    dims: Dims
    classes: LayerClasses
    tables: Tables
    limits: Limits
    job: Job
    claims: list[Claim] = field(default_factory=list)
    weights: Weights | None = None
    met: list[tuple[Formulation, Ints]] = field(default_factory=list)
    start: Ints | None = None
    placed: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    raise_bound: Callable[[MemoryModel, Frontier], float] | None = None

    @staticmethod
    def of(
        program: Program, dims: Dims, classes: LayerClasses, job: Job, weights: Weights | None = None
    ) -> BudgetProblem:
        """The problem of a job, whose time limit begins now."""
        limits = Limits(job.search.gap, time.monotonic() + job.search.time_limit)
        return BudgetProblem(program, dims, classes, Tables(machine_of(job)), limits, job, weights=weights)

    @property
    def whole(self) -> bool:
        """Whether the model is searched, and not a stage's share of it."""
        return self.job.stages is None

    @property
    def seconds(self) -> float:
        """What is left of the time limit."""
        # At least a second: a search that begins late still finds something.
        return max(1.0, self.limits.deadline - time.monotonic())

    @property
    def regions(self) -> bool:
        """Whether the model's own checkpointing decides for what is in it."""
        return self.job.search.regions and bool(self.program.pins)

    @property
    def offload(self) -> bool:
        """Whether saved activations may be offloaded to host memory."""
        return self.job.search.offload and self.job.cluster.device.host_bandwidth > 0

    @cached_property
    def state(self) -> Mapping[str, float]:
        """Bytes of each parameter with its optimizer state."""
        return state_bytes(self.program, self.job.optimizer, gradients=False)

    @cached_property
    def state_and_gradients(self) -> Mapping[str, float]:
        """Bytes of each parameter with its optimizer state and its gradient."""
        return state_bytes(self.program, self.job.optimizer)

    @cached_property
    def optimizer_state(self) -> Mapping[str, float]:
        """Bytes of each parameter's optimizer state, if it may be offloaded."""
        return optimizer_bytes(self.program, self.job.optimizer) if self.offload else {}

    @property
    def states_alone(self) -> MemoryModel:
        """Of memory, parameters with their optimizer states and gradients count; nothing is recomputed to save some."""
        return MemoryModel(self.state_and_gradients, regions=self.regions, state_share=self.job.state_share,
                           activation_share=self.job.activation_share)  # fmt: skip

    def states_and_activations(self, *, offload: bool) -> MemoryModel:
        """Of memory, parameters with their optimizer states count, and what is saved for the backward pass."""
        return MemoryModel(
            self.state, activations=True, recompute=self.job.search.recompute, regions=self.regions, offload=offload,
            optimizer=self.optimizer_state if offload else {}, state_share=self.job.state_share,
            activation_share=self.job.activation_share,
        )  # fmt: skip

    def formulation(self, restrictions: Restrictions, memory: MemoryModel) -> Formulation:
        """The problem under restrictions, with memory counted in some way."""
        return build(self.program, self.dims, self.classes, self.tables, memory, restrictions, self.weights)

    def plan(self, built: Formulation, mix: LayerMix, bound: float, method: str) -> Plan:
        """The plan of a choice of labels, its certificate included.

        Args:
            built: the problem.
            mix: the choice.
            bound: that no plan falls below.
            method: that found it.

        Raises:
            CertificateError: the choice does not cost what the solver says.
        """
        if self.job.search.check:
            require_cost(built.problem, mix, [v.count for v in built.variables])
        # Rounding may put the bound above the plan's own cost, or below zero.
        bound = min(max(bound, 0.0), mix.cost)
        certificate = Certificate(mix.cost, bound, self.space, method, mix.price)
        plan = plan_of(self.program, self.dims, self.classes, built, mix, certificate, self.job, self.tables)
        return replace(plan, overlap=self.weights is not None)

    def within(self, plan: Plan) -> tuple[Plan, bool]:
        """The plan, and whether its peak is within the budget: measured, unless it clearly is."""
        return (plan, True) if self.has_room(plan) else self.measured(plan)

    def with_peak(self, plan: Plan) -> Plan:
        """A plan that fits, with its peak where there is a budget."""
        return plan if plan.predicted.peak_bytes else self.measured(plan)[0]

    def measured(self, plan: Plan) -> tuple[Plan, bool]:
        """The plan with its peak, and whether that is within the budget."""
        if self.job.memory is None:
            return plan, True
        held = self._held(plan)
        needed = sum(held.values())
        known = plan.certificate
        self.job.progress(f"peak {format_bytes(needed)}", known.objective, known.lower_bound)
        return replace(plan, predicted=replace(plan.predicted, peak_bytes=held)), fits(needed, self.job.memory)

    def _held(self, plan: Plan) -> dict[str, float]:
        """Bytes by category that the budget has to hold: a device's peak, unless the job says what else counts."""
        # A stage's devices hold several microbatches of some layers: only the cut graph tells how much that is.
        if self.job.stages is not None:
            return peak_in_stages(self.program, plan, self.job.stages, self.job.search)
        if not self.job.all_points:
            # A benchmark's budget, which counts as papers on recomputation do.
            saved = saved_for_backward(unverified(self.program, plan), plan)
            return {"parameters": sum(self.state.values()), "activations": saved}
        return peak_of(self.program, plan, self.classes)

    def has_room(self, plan: Plan) -> bool:
        """Whether all that a step makes under a plan is far within the budget at once, though most is freed early.

        Then its graph need not be rewritten and measured to know that it fits, which takes 0.7 s for a GPT-2.
        """
        memory = self.job.memory
        if memory is None or not (self.whole and self.job.all_points):
            return memory is None
        return ROOM * self.all_bytes(plan) < memory

    def all_bytes(self, plan: Plan) -> float:
        """Of all that a device makes in a step under a plan: states, gradients, results of operators and of moves."""
        sizes, load, repeat = tuple(self.job.axes.values()), self.job.search.load, self.program.repeat
        assignment = assign(self.program, self.dims, plan, self.classes)
        moved = all_moves(self.program, self.dims, assignment, self.tables)
        made = [*assignment.outputs.items(), *((v, move.target) for v, moves in moved.items() for move, _, _ in moves)]
        types = [(self.dims.types.get(value), layout) for value, layout in made]
        tensors = sum(t.bytes / held_parts(layout, sizes, load) for t, layout in types if t is not None)
        states = sum(
            size / split_parts(plan.parameters[name], sizes) for name, size in self.state_and_gradients.items()
        )
        return states + tensors * (repeat.blocks / SHORT if repeat else 1)

    @cached_property
    def ample(self) -> bool:
        """Whether all tensors of the program, whole and at once, are far within the budget: no plan is short of it."""
        repeat = self.program.repeat
        tensors = sum(t.bytes for t in self.dims.types.values() if t is not None)
        needed = sum(self.state_and_gradients.values()) + tensors * (repeat.blocks if repeat else 1)
        return self.job.memory is not None and ROOM * needed < self.job.memory

    @cached_property
    def impossible(self) -> bool:
        """Whether parameters, gradients and optimizer state alone exceed the budget, however they are split."""
        job = self.job
        return self.whole and job.memory is not None and job.memory < least_state(self.program, job.optimizer, job.axes)

    @property
    def space(self) -> str:
        """The plans that the certificate's bound is about, in words."""
        hidden = ", hidden behind the kernels of their blocks where these take longer" if self.weights else ""
        fused = ", kernels fused" if self.program.fused else ""
        return _space(self.job.search, f"{fused}{hidden}, on {self.job.cluster.name}", self.regions, self.offload)


def machine_of(job: Job) -> Machine:
    """The mesh of a job, and everything that costs on it depend on."""
    links, sizes = job.cluster.link_for(dict(job.axes)), tuple(job.axes.values())
    return Machine(tuple(job.axes), sizes, links, job.cluster.device, quantized=job.quantized, load=job.search.load)


def peak_bytes(plan: Plan) -> float:
    """What a device holds at most under a plan whose peak is measured; as of the one with the least memory."""
    return sum(plan.predicted.peak_bytes.values()) / plan.predicted.room


def missing(memory: float, least: Plan | None) -> InfeasibleError:
    """Say how much is missing, of what, and what would do."""
    if least is None:
        return InfeasibleError("no choice of labels avoids every forbidden label and pair; allow more candidates")
    held = least.predicted.peak_bytes
    needed = peak_bytes(least)
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in sorted(held.items(), key=lambda x: -x[1])[:3])
    # As if all that a device holds were split further: a mesh of so many devices may be enough.
    more = math.ceil(math.prod(least.axis_sizes) * needed / memory)
    return InfeasibleError(
        f"no plan was found that needs less than {format_bytes(needed)} a device on axes {dict(least.axes)} ({parts}), "
        f"and the budget is {format_bytes(memory)}: {format_bytes(needed - memory)} are missing. Raise memory= to "
        f"{format_bytes(needed)}, or use a mesh of about {more} devices or a smaller batch",
        needed=needed,
        budget=memory,
        least=least,
    )


def _space(search: Search, machine: str, regions: bool, offload: bool) -> str:
    tied = ", repeated layers alike in layout" if search.tie_layers else ""
    recipe = f"what recipe {search.recipe} leaves open; " if search.recipe else ""
    roles = ", ".join(f"{axis} for {role}" for axis, role in search.roles.items())
    recipe += f"axes as told ({roles}); " if roles else ""
    words = {
        "search": "any tensor saved, recomputed or re-gathered (outputs of repeated layers are saved)",
        # ZeRO-2 or ZeRO-3, tensor by tensor.
        "regather": "parameters gathered once, or re-gathered in the backward pass",
    }
    saved = words.get(search.recompute, "no recomputation")
    saved += ", but checkpointed regions as the model has them" if regions else ""
    saved += ", or offloaded where that takes less time than recomputation, as optimizer state may" if offload else ""
    return (
        f"{recipe}one layout per tensor on every axis{tied}; a value has one layout besides its own for all its users; "
        f"no pipelines, {saved}; costs: kernels by tiles and traffic, collectives by ring or "
        f"tree{machine}"
    )
