"""What if there were more devices, less memory, another batch? The same search, over all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from autopar.capture import Batch, LossFunction
from autopar.compiler import program_to_plan, solve
from autopar.errors import AutoparError, InfeasibleError
from autopar.explain.recipes import SECONDS, reason_of
from autopar.ir.plan import Plan
from autopar.ir.precision import Precision
from autopar.ir.signature import pytree
from autopar.pipeline.custom_schedule import as_text, is_table
from autopar.search.options import MICROBATCHES, SCHEDULE, Search

FACTORS = (0.5, 1.0, 2.0)
"""Of devices (along the outermost axis), of the budget and of the batch."""


@dataclass(frozen=True)
class Case:
    """One answer.

    Attributes:
        devices: in all.
        budget: bytes a device.
        samples: of the batch.
        step_seconds: predicted; None where there is no plan.
        memory_bytes: that a device needs; None where there is no plan.
        way: in how many microbatches and stages, for people; empty: the whole batch at once.
        reason: why there is no plan.
        given: it is what the plan is for.
    """

    devices: int
    budget: float
    samples: int
    step_seconds: float | None = None
    memory_bytes: float | None = None
    way: str = ""
    reason: str = ""
    given: bool = False


def what_if(
    model: nn.Module,
    batch: Batch,
    found: Plan,
    *,
    budget: float,
    loss_fn: LossFunction | None = None,
    precision: Precision | None = None,
    search: Search | None = None,
    tick: Callable[[int, int, str], None] = lambda *_: None,
) -> list[Case]:
    """Plan for half, the same and twice as many devices, bytes and samples, in every combination.

    The outermost axis has half (where that is whole) or twice as many devices. The batch is scaled along the first dim
    of its tensors, if that is the same of all. How many microbatches there are is searched as for the plan; where they
    are pinned, that is for the plan's own batch. A budget that the plan of a larger one fits into has that plan, and
    one below a budget that nothing fits into has none: neither is searched.

    Args:
        model: as it was planned.
        batch: as it was planned.
        found: the plan.
        budget: bytes a device that it was planned for.
        loss_fn: as it was planned.
        precision: as it was planned.
        search: as it was planned.
        tick: called with how many cases are done, how many there are, and what the last one was.
    """
    search = search or Search()
    search = replace(search, time_limit=min(search.time_limit, SECONDS), check=False)
    loose = without_count(search)
    cluster, batches = found.cluster, _batches(batch)
    meshes = _meshes(found.axes)
    budgets = sorted((budget * factor for factor in FACTORS), reverse=True)
    total, cases = len(batches) * len(meshes) * len(budgets), []
    for samples, own in batches:
        try:
            program = program_to_plan(model, own, loss_fn=loss_fn, precision=precision, search=search)
        except AutoparError as e:  # a model may insist on the size of its batch
            cases += [
                Case(math.prod(axes.values()), size, samples, reason=reason_of(e))
                for axes in meshes
                for size in budgets
            ]
            continue
        for axes in meshes:
            fits: Plan | None = None
            failed: InfeasibleError | None = None
            for size in budgets:
                given = own is batch and axes == dict(found.axes) and size == budget
                case = Case(math.prod(axes.values()), size, samples, given=given)
                try:
                    if given:
                        fits = found
                    elif failed is not None:  # in less memory it is no better
                        raise InfeasibleError(str(failed), needed=failed.needed, budget=size)
                    elif fits is None or needed_by(fits) > size:
                        own_search = search if own is batch else loose
                        fits = solve(program, axes, cluster, memory=size, optimizer=found.optimizer, search=own_search)
                except (InfeasibleError, ValueError) as e:
                    failed = e if isinstance(e, InfeasibleError) and e.needed is not None else failed
                    cases.append(replace(case, reason=reason_of(e)))
                else:
                    seconds, held = fits.predicted.step_seconds, needed_by(fits)
                    cases.append(replace(case, step_seconds=seconds, memory_bytes=held, way=way_of(fits)))
                tick(len(cases), total, f"{case.devices} devices, {samples} samples")
    return cases


def memory_of(plan: Plan) -> float:
    """Bytes of a device between steps, all categories."""
    return sum(plan.predicted.memory_bytes.values())


def needed_by(plan: Plan) -> float:
    """Bytes of a device at its peak, which is what a budget is for; between steps where that was not asked for."""
    return sum(plan.predicted.peak_bytes.values()) or memory_of(plan)


def way_of(plan: Plan) -> str:
    """In how many microbatches and stages a plan works, for people."""
    parts = [f"{plan.microbatches} microbatches"] * (plan.microbatches > 1)
    return ", ".join([*parts, *[f"{len(plan.stages)} stages"] * (plan.pipeline is not None)])


def without_count(search: Search) -> Search:
    """The search without a pinned number of microbatches, unless a schedule by hand is for just that number."""
    by_hand = SCHEDULE in search.pins and is_table(as_text(search.pins[SCHEDULE]))
    return search if by_hand else replace(search, pins={k: v for k, v in search.pins.items() if k != MICROBATCHES})


def _meshes(axes: Sequence[tuple[str, int]]) -> list[dict[str, int]]:
    (name, size), *rest = axes
    return [{name: int(size * factor), **dict(rest)} for factor in FACTORS if (size * factor).is_integer()]


def _batches(batch: Batch) -> list[tuple[int, Batch]]:
    """Batches of half, the same and twice as many samples; only the given one where samples are not clear."""
    tensors, skeleton = pytree.flatten(batch, "batch")
    lengths = {t.shape[0] if t.ndim else 0 for t in tensors}
    if len(lengths) != 1 or 0 in lengths:
        return [(next(iter(lengths), 0), batch)]
    (samples,) = lengths
    counts = [int(samples * factor) for factor in FACTORS if samples * factor >= 1]
    scaled = {n: [torch.empty((n, *t.shape[1:]), dtype=t.dtype, device="meta") for t in tensors] for n in counts}
    return [(n, batch if n == samples else pytree.unflatten(own, skeleton)) for n, own in scaled.items()]
