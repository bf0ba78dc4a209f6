"""`find_plan`: the search, from a program and its dims to a plan with a certificate."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from autopar.costs.cluster import Cluster
from autopar.costs.memory import optimizer_state_bytes
from autopar.errors import InfeasibleError
from autopar.ir.layout import Layout, item_bytes
from autopar.ir.plan import EVERY, INTERRUPTED, TIME_LIMIT, Certificate, Plan
from autopar.ir.program import Program
from autopar.search.axis_by_axis import bound_by_axes
from autopar.search.budget.within_budget import Task, plan_by_axes, plan_within
from autopar.search.formulation.build import Formulation, build
from autopar.search.formulation.memory_model import MemoryModel
from autopar.search.formulation.pins import Restrictions
from autopar.search.formulation.recipes import roles_of
from autopar.search.options import Held, Job, Search
from autopar.search.solver.certify import Claim
from autopar.search.solver.duals import examine, require_cost
from autopar.search.solver.interrupt import requested
from autopar.search.solver.layer_mix import LayerMix
from autopar.search.solver.minimize import Limits
from autopar.sharding.candidates import strategies
from autopar.sharding.dims import Dims
from autopar.sharding.layer_classes import LayerClasses, layer_classes
from autopar.sharding.redistribute import Machine, Tables

EXACT_AXES = 2
"""Meshes of up to this many axes are solved as one problem; larger ones axis by axis, with the gap stated."""


def find_plan(
    program: Program, dims: Dims, job: Job, classes: LayerClasses | None = None, peak: Held | None = None
) -> Plan:
    """The fastest plan that fits.

    Args:
        program: canonical program.
        dims: its dimension analysis.
        job: what is searched for.
        classes: which nodes share a decision; default: as ``job.search.tie_layers`` says.
        peak: what a plan needs, measured on the graph that is rewritten for it; None: memory is not measured.

    Raises:
        InfeasibleError: nothing fits; says how much is missing.
        CertificateError: the check refutes what the search claims.
    """
    axes, cluster, search, restrictions = job.axes, job.cluster, job.search, job.restrictions
    machine = Machine(tuple(axes), tuple(axes.values()), cluster.link_for(dict(axes)), cluster.device)
    classes = classes or layer_classes(program, dims, tie=search.tie_layers)
    tables = Tables(machine)
    # Roles of all axes leave so little open that any number of them is one problem.
    decided = all(roles_of(search.recipe, axes, search.roles)) and bool(restrictions.strategies)
    exact = decided or len(axes) <= EXACT_AXES
    limits = Limits(search.gap, time.monotonic() + search.time_limit)
    away = search.offload and machine.device.host_bandwidth > 0
    regions = search.regions and bool(program.pins)

    def make(restrictions: Restrictions, memory: MemoryModel) -> Formulation:
        return build(program, dims, classes, tables, memory, restrictions)

    def read(built: Formulation, mix: LayerMix, bound: float, method: str) -> Plan:
        if search.check:
            require_cost(built.problem, mix, [v.count for v in built.variables])
        bound = min(max(bound, 0.0), mix.cost)
        certificate = Certificate(mix.cost, bound, _space(search, cluster, regions, away), method, mix.price)
        plan = plan_of(program, dims, classes, built, mix, certificate, job, tables)
        return replace(plan, forced_consumer_layouts=restrictions.forced_consumer_layouts)

    def state(gradients: bool) -> dict[str, float]:
        return state_bytes(program, job.optimizer, gradients=gradients)

    claims: list[Claim] = []
    rest = optimizer_bytes(program, job.optimizer) if away else {}
    task = Task(make, read, state, limits, job, peak, regions, away, rest, claims.append)
    if exact:
        plan, fixed = plan_within(task), 0.0
    else:
        fixed, claims = bound_by_axes(program, dims, classes, machine, restrictions)
        plan = plan_by_axes(task, tables, fixed + sum(claim.bound for claim in claims))
    if limits.expired():
        plan = replace(plan, certificate=replace(plan.certificate, method=INTERRUPTED if requested() else TIME_LIMIT))
    if not search.check or requested():
        return plan
    if exact:
        claims = [max(claims, key=lambda claim: claim.bound)]  # each is about all plans
    job.progress("checking the bound", plan.certificate.objective, plan.certificate.lower_bound)
    checked = fixed + sum(examine(claim, search.time_limit / len(claims)) for claim in claims)
    return replace(plan, certificate=replace(plan.certificate, checked=max(checked, 0.0)))


def require_splits(dims: Dims, axes: Mapping[str, int]) -> None:
    """Refuse a mesh axis that no operator can share its work along.

    Raises:
        InfeasibleError: names the axis, the sizes that there are and the remedy.
    """
    operators = dict.fromkeys(dims.operators.values())
    factors = [(o, s.factor) for o in operators for s in strategies(o) if s.factor is not None]
    sizes = sorted({o.letters[letter].factors[j].size for o, (letter, j) in factors}, reverse=True)
    for axis, n in axes.items():
        if n > 1 and not any(size % n == 0 for size in sizes):
            raise InfeasibleError(
                f"no operator can be split along axis {axis!r} of size {n}: it divides no factor of the model's "
                f"dims ({', '.join(map(str, sizes[:12]))}); choose an axis size that divides the batch or the weights"
            )


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
        torch=str(torch.__version__), certificate=certificate, recompute=recompute,
        offload=offload,
    )  # fmt: skip


def _joined(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ranges that are not empty, neighbors made one."""
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if start < stop:
            found = [*found[:-1], (found[-1][0], stop)] if found and found[-1][1] == start else [*found, (start, stop)]
    return tuple(found)
