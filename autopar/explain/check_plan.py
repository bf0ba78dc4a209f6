"""`check_plan`: a plan that somebody hands over says what it costs, and how good it is. Both are found out anew."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.capture import Batch, LossFunction
from autopar.compiler import (
    default_memory,
    for_devices,
    part_of_worker,
    program_of,
    program_to_plan,
    require_same_graph,
    solve,
)
from autopar.costs.arguments import FLAG, FUNCTION, optional, require
from autopar.costs.memory import format_bytes, parse_bytes
from autopar.errors import PlanError
from autopar.ir.plan import Certificate, Plan
from autopar.ir.precision import Precision
from autopar.ir.program import Program
from autopar.ir.quantized.axes import QuantizedAxis, read_quantized
from autopar.ir.signature.outputs import Loss
from autopar.search.arguments import BATCH, check_planning, policy_of
from autopar.search.budget.budget_problem import peak_bytes
from autopar.search.budget.lagrangian import fits
from autopar.search.formulation.axis_roles import DATA
from autopar.search.formulation.local_axes import QUANTIZED
from autopar.search.options import (
    MICROBATCHES,
    SCHEDULE,
    SHARES,
    STAGE_AXIS,
    STAGE_ORDER,
    STAGES,
    VIRTUAL,
    Progress,
    Search,
)
from autopar.search.recost import SAME, differences, recosted

SHOWN = 3
"""So many figures that differ are named."""

AGAIN = "check it with the search= and memory= that it was made with, or plan again"


def check_plan(
    plan: Plan,
    model: nn.Module,
    batch: Batch,
    *,
    loss_fn: LossFunction | None = None,
    loss: Loss = None,
    memory: str | float | None = None,
    precision: Precision | str | torch.dtype | None = None,
    search: Search | None = None,
    deterministic: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """See `autopar.Plan.check`."""
    check_planning(model, batch, loss_fn, loss, memory, plan.optimizer, search)
    require(
        batch=(batch, BATCH),
        deterministic=(deterministic, FLAG), progress=(progress, optional(FUNCTION)),
    )  # fmt: skip
    search = _search_of(plan, search)
    axes, policy = dict(plan.axes), policy_of(model, precision, None, plan)
    batch = part_of_worker(model, batch, plan.workers)
    program = program_to_plan(
        model, batch, loss_fn=loss_fn, loss=loss, precision=policy, fused=plan.fused, search=search, progress=progress
    )
    require_same_graph(plan, program)

    def every_layer() -> Program:
        return program_of(model, batch, loss_fn=loss_fn, loss=loss, precision=policy, fused=plan.fused)

    found = _costed_anew(plan, program, every_layer, deterministic)
    budget = _budget_of(found, axes, memory)
    # The bound is verified here and now, and not read from a file.
    best = solve(
        program, axes, plan.cluster, memory=budget, optimizer=plan.optimizer, search=search, progress=progress,
        deterministic=deterministic,
    ).certificate  # fmt: skip
    objective = found.certificate.objective
    _require_possible(plan.certificate, objective, best)
    bound = min(best.lower_bound, objective)
    checked = replace(found, certificate=replace(best, objective=objective, lower_bound=bound))
    return replace(checked, workers=()).of_workers(plan.workers, plan.worker_role)


def _search_of(plan: Plan, search: Search | None) -> Search:
    """How to search for a bound: as the user says, or among plans of this kind.

    Raises:
        PlanError: the plan is none of those that the user's search is of.
    """
    given = search or _space_of(plan)
    role = given.worker_role
    workers, _, given = given.of_worker(dict(plan.workers) | dict(plan.axes))
    if search is not None and (workers, role) != (plan.workers, plan.worker_role):
        raise PlanError(
            f"the plan has workers {dict(plan.workers)} ({plan.worker_role}), and the search {dict(workers)} ({role}); "
            f"{AGAIN}"
        )
    if read_quantized(given.quantized) != plan.quantized:
        raise PlanError(
            f"the plan is quantized {_shown(plan.quantized)}, and the search "
            f"{_shown(read_quantized(given.quantized))}; {AGAIN}"
        )
    return replace(given, check=True, cache=False)


def _costed_anew(plan: Plan, program: Program, every_layer: Callable[[], Program], deterministic: bool) -> Plan:
    """The plan with the figures that it has here.

    Args:
        plan: whose figures are claims.
        program: the model's; of a deep one, of three of its layers.
        every_layer: the program of all layers.
        deterministic: see `autopar.parallelize`.

    Raises:
        PlanError: they are others than it says.
    """

    def costed(program: Program) -> tuple[Plan, list[str]]:
        here = for_devices(program, plan.cluster.device, dict(plan.axes), deterministic=deterministic)
        found = recosted(here, plan, deterministic=deterministic)
        return found, [*itertools.islice(differences(plan, found), SHOWN)]

    repeat = program.repeat
    cut = repeat is not None and any(repeat.is_inside(stage.modules[0]) for stage in plan.stages)
    found, wrong = (plan, ["its stages"]) if cut else costed(program)
    if wrong and repeat is not None:
        # `parallelize` has all layers, and measures the peak that three of them extrapolate.
        found, wrong = costed(every_layer())
    if wrong:
        raise PlanError(f"the plan does not cost here what it says: {'; '.join(wrong)}; plan again")
    return found


def _budget_of(plan: Plan, axes: dict[str, int], memory: str | float | None) -> float | None:
    """The memory that the plan may take, in bytes; None: any.

    Raises:
        PlanError: it takes more.
    """
    budget: float | None = None if memory is None else parse_bytes(memory)
    # A plan without a peak was made for any memory.
    if budget is None and plan.predicted.peak_bytes:
        budget = default_memory(plan.cluster, axes)
    needed = peak_bytes(plan)
    if budget is not None and not fits(needed, budget):
        raise PlanError(
            f"the plan's peak of {format_bytes(needed)} is above the budget of {format_bytes(budget)}; {AGAIN}"
        )
    return budget


def _require_possible(claimed: Certificate, objective: float, best: Certificate) -> None:
    """Compare what a plan claims, and costs, with what was proved just now.

    Args:
        claimed: the plan's certificate.
        objective: what the plan costs, in seconds.
        best: the certificate of a search here.

    Raises:
        PlanError: a claimed bound is above a plan that there is, or the plan below a bound that was proved.
    """
    for name, bound in (("lower_bound", claimed.lower_bound), ("checked", claimed.checked or 0.0)):
        if bound > best.objective * (1 + SAME):
            raise PlanError(
                f"certificate.{name} is {bound:.9g} s, and there is a plan of {best.objective:.9g} s in: {best.space}; "
                f"the bound is wrong, or of other plans: {AGAIN}"
            )
    proved = max(best.lower_bound, best.checked or 0.0)
    if objective < proved * (1 - SAME):
        raise PlanError(
            f"the plan takes {objective:.9g} s, and none takes less than {proved:.9g} s of: {best.space}; it is "
            f"none of these: {AGAIN}"
        )


def _shown(quantized: tuple[QuantizedAxis, ...]) -> str:
    return "; ".join(map(str, quantized)) or "nowhere"


def _space_of(plan: Plan) -> Search:
    """The search for plans of this kind, where the user says of none: with as many stages, cut anywhere."""
    # Layers that were planned apart have choices of their own.
    apart = any(" @" in name for name in plan.choices)
    quantized = {q.axis: {what: q.bits(what) for what in q.what} for q in plan.quantized}
    given = Search(tie_layers=not apart, quantized=quantized, inexact=(QUANTIZED,) if quantized else ())
    if plan.shares is not None:
        axis, counts = plan.shares.axis, plan.shares.counts
        return replace(given, roles={axis: DATA}, pins={SHARES: {axis: list(counts)}})
    if plan.pipeline is None:
        return given
    devices = dict(plan.axes)[plan.pipeline.axis]
    pins: dict[str, Any] = {
        STAGES: devices, STAGE_AXIS: plan.pipeline.axis, SCHEDULE: plan.pipeline.schedule,
        VIRTUAL: len(plan.stages) // devices, MICROBATCHES: plan.microbatches,
    }  # fmt: skip
    if plan.pipeline.places:
        pins[STAGE_ORDER] = list(plan.pipeline.places)
    return replace(given, pins=pins)
