"""`ProgramSearch`: one program that is searched for one job, between its formulations and the plans they lead to."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from autopar.costs.cluster import Cluster
from autopar.costs.memory import format_bytes, optimizer_state_bytes
from autopar.ir.layout import Layout, item_bytes
from autopar.ir.plan import EVERY, Certificate, Plan
from autopar.ir.program import Program
from autopar.search.budget.lagrangian import fits
from autopar.search.formulation.build import Formulation, build
from autopar.search.formulation.memory_model import WHOLE, MemoryModel
from autopar.search.formulation.pins import Restrictions
from autopar.search.options import Job, Search
from autopar.search.peak import PeakMeter
from autopar.search.solver.certify import Claim
from autopar.search.solver.duals import require_cost
from autopar.search.solver.layer_mix import LayerMix
from autopar.search.solver.minimize import Limits
from autopar.sharding.dims import Dims
from autopar.sharding.layer_classes import LayerClasses
from autopar.sharding.redistribute import Tables


@dataclass(frozen=True)
class ProgramSearch:
    """What is searched, and what for.

    Attributes:
        program: canonical.
        dims: its dimension analysis.
        classes: which nodes share a decision.
        tables: redistribution costs.
        job: what it is for.
        limits: relative gap and deadline.
        meter: measures the peak of a plan; None: peaks are not measured.
        claims: bounds of all plans that were proved on the way, for the check.
    """

    program: Program
    dims: Dims
    classes: LayerClasses
    tables: Tables
    job: Job
    limits: Limits
    meter: PeakMeter | None = None
    claims: list[Claim] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether the whole model is searched, and not a stage's share of it."""
        return self.job.share is WHOLE

    @property
    def regions(self) -> bool:
        """Whether the model's own checkpointing decides for what is in it."""
        return self.job.search.regions and bool(self.program.pins)

    @property
    def offload(self) -> bool:
        """Whether saved activations and optimizer state may be offloaded."""
        return self.job.search.offload and self.tables.machine.device.host_bandwidth > 0

    @property
    def seconds(self) -> float:
        """What is left of the time limit."""
        return max(1.0, self.limits.deadline - time.monotonic())

    def formulate(self, restrictions: Restrictions, memory: MemoryModel) -> Formulation:
        """The problem under restrictions, with memory counted in some way."""
        return build(self.program, self.dims, self.classes, self.tables, memory, restrictions)

    def memory_of_state(self, gradients: bool) -> dict[str, float]:
        """Bytes of each parameter with its optimizer state, with its gradient or without."""
        return state_bytes(self.program, self.job.optimizer, gradients=gradients)

    def offloadable_state(self) -> dict[str, float]:
        """Bytes of optimizer state of each parameter, where that may be offloaded."""
        return optimizer_bytes(self.program, self.job.optimizer) if self.offload else {}

    def plan(self, built: Formulation, mix: LayerMix, bound: float, method: str) -> Plan:
        """The plan of a solution, with its certificate."""
        job = self.job
        if job.search.check:
            require_cost(built.problem, mix, [v.count for v in built.variables])
        space = _space(job.search, job.cluster, self.regions, self.offload)
        certificate = Certificate(mix.cost, min(max(bound, 0.0), mix.cost), space, method, mix.price)
        return plan_of(self.program, self.dims, self.classes, built, mix, certificate, job, self.tables)

    def measured(self, plan: Plan) -> tuple[Plan, bool]:
        """The plan with its peak, and whether that is within the budget."""
        if self.job.memory is None or self.meter is None:
            return plan, True
        held = self.meter.held(plan)
        total, known = sum(held.values()), plan.certificate
        self.job.progress(f"peak {format_bytes(total)}", known.objective, known.lower_bound)
        plan = replace(plan, predicted=replace(plan.predicted, peak_bytes=held))
        return plan, fits(total, self.job.memory)


def _space(search: Search, cluster: Cluster, regions: bool, away: bool) -> str:
    tied = ", repeated layers alike in layout" if search.tie_layers else ""
    recipe = f"what recipe {search.recipe} leaves open; " if search.recipe else ""
    roles = ", ".join(f"{axis} for {role}" for axis, role in search.roles.items())
    recipe += f"axes as told ({roles}); " if roles else ""
    words = {
        "search": "any tensor kept, made or moved again (what repeated layers hand on is kept)",
        "regather": "parameters gathered once or twice",
    }
    kept = words.get(search.recompute, "no recomputation")
    kept += ", but checkpointed regions as the model has them" if regions else ""
    kept += ", or on the host where that takes less time than making it again, as optimizer state may" if away else ""
    return (
        f"{recipe}one layout per tensor on every axis{tied}; a value has one layout besides its own for all its users; "
        f"no pipelines, {kept}; costs: kernels by tiles and traffic, collectives by ring or tree, "
        f"on {cluster.name}"
    )


def state_bytes(program: Program, optimizer: str, *, gradients: bool = True) -> dict[str, float]:
    """Bytes of each parameter, and of all that it stands for, with optimizer state and gradient, on one device."""
    trained = {
        o.name for o, v in zip(program.outputs, program.output_values, strict=True) if o.kind == "gradient" and v
    }
    found = {}
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        if spec.kind == "parameter":
            value = node.meta["val"]
            item = item_bytes(str(value.dtype).removeprefix("torch."))
            size = float(value.numel() * item)
            if spec.name in trained:
                size += (size if gradients else 0.0) + optimizer_state_bytes(optimizer, value.numel(), item)
            found[spec.name] = size * (len(program.repeat.names(spec.name)) if program.repeat else 1)
    return found


def optimizer_bytes(program: Program, optimizer: str) -> dict[str, float]:
    """Bytes of optimizer state of each parameter that has some, and of all that it stands for, on one device."""
    found, gone = state_bytes(program, optimizer), state_bytes(program, "sgd")
    return {name: size - gone[name] for name, size in found.items() if size > gone[name]}


def plan_of(
    program: Program,
    dims: Dims,
    classes: LayerClasses,
    built: Formulation,
    mix: LayerMix,
    certificate: Certificate,
    job: Job,
    tables: Tables,
) -> Plan:
    """A plan from the labels of every variable, and from the states of its first members and of those behind them."""
    layouts: dict[str, Layout] = {}
    choices: dict[str, tuple[str, ...]] = {}
    consumer_layouts: dict[str, Layout] = {}
    recompute: dict[str, tuple[tuple[int, int], ...]] = {}
    offload: dict[str, tuple[tuple[int, int], ...]] = {}
    for i, (variable, label) in enumerate(zip(built.variables, mix.labelings[-1], strict=True)):
        if variable.state is not None:
            starts = [*mix.starts(variable.count)[:-1], EVERY[0][1]]
            parts = [(pair, labels[i]) for pair, labels in zip(itertools.pairwise(starts), mix.labelings, strict=True)]
            for table, marked in ((recompute, variable.in_recompute), (offload, variable.in_offload)):
                if joined := _joined([pair for pair, own in parts if marked[own]]):
                    table[variable.key] = joined
        if variable.choices is not None:
            choices[variable.key] = variable.choices.names(int(variable.candidate[label]))
            continue
        layout = variable.layout(int(label), tables)
        if variable.key.startswith("consumer "):
            consumer_layouts[variable.key.removeprefix("consumer ")] = layout
        else:
            layouts[variable.key] = layout
    parameters, batch = {}, {}
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        if spec.kind == "parameter":
            parameters[spec.name] = layouts[classes.key[node]]
        if spec.kind == "batch":
            batch[spec.name] = layouts[classes.key[node]]
    results = {o.name: layouts[f"result {o.name}"] for o in program.outputs if o.kind == "result"}
    return Plan(
        axes=tuple(job.axes.items()), cluster=job.cluster, parameters=parameters, batch=batch, results=results,
        choices=choices, consumer_layouts=consumer_layouts, optimizer=job.optimizer, fingerprint=program.fingerprint,
        torch=str(torch.__version__), certificate=certificate, recompute=recompute, offload=offload,
        forced_consumer_layouts=job.restrictions.forced_consumer_layouts,
    )  # fmt: skip


def _joined(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ranges that are not empty, neighbors made one."""
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if start < stop:
            found = [*found[:-1], (found[-1][0], stop)] if found and found[-1][1] == start else [*found, (start, stop)]
    return tuple(found)
