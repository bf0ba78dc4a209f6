"""What if there were more devices, less memory, another batch? The same search, over all of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn

from autopar.capture import Batch, LossFunction
from autopar.compiler import program_to_plan, solve
from autopar.errors import AutoparError, InfeasibleError
from autopar.explain.recipes import SECONDS, reason_of
from autopar.ir.plan import Plan
from autopar.ir.precision import Precision
from autopar.ir.program import Program
from autopar.ir.signature import pytree
from autopar.ir.signature.outputs import Loss
from autopar.pipeline.custom_schedule import as_text, is_table
from autopar.search.options import MICROBATCHES, SCHEDULE, Search

FACTORS = (0.5, 1.0, 2.0)
"""By which devices (along the outermost axis), budget and batch are scaled."""


Tick = Callable[[int, int, str], None]
"""Progress: how many cases are done, how many there are, and what the last one was."""


@dataclass(frozen=True)
class Case:
    """The plan, or the lack of one, for one number of devices, one budget and one batch size.

    Attributes:
        devices: in all.
        budget: bytes per device.
        samples: in the batch.
        step_seconds: predicted; None without a plan.
        memory_bytes: per device at its peak; None without a plan.
        splits: into how many microbatches and stages, for people; empty: the whole batch at once.
        reason: why there is no plan.
        needed: bytes per device that would do, where the budget is why; None: it is not, or there is a plan.
        given: whether it is the case of the plan itself.
    """

    devices: int
    budget: float
    samples: int
    step_seconds: float | None = None
    memory_bytes: float | None = None
    splits: str = ""
    reason: str = ""
    needed: float | None = None
    given: bool = False


def what_if(
    model: nn.Module,
    batch: Batch,
    found: Plan,
    *,
    budget: float,
    loss_fn: LossFunction | None = None,
    loss: Loss = None,
    precision: Precision | None = None,
    search: Search | None = None,
    tick: Tick = lambda *_: None,
) -> list[Case]:
    """Plan for half, the same and twice as many devices, bytes and samples, in every combination.

    The outermost axis has half (where that is whole) or twice as many devices. The batch is scaled along the first dim
    of those of its tensors that have as many rows as most of them. The number of microbatches is searched as for the
    plan; a pinned number holds for the plan's own batch only.

    Args:
        model: as it was planned.
        batch: as it was planned.
        found: the plan.
        budget: bytes per device that it was planned for.
        loss_fn: as it was planned.
        loss: which scalar of the output is the loss.
        precision: as it was planned.
        search: as it was planned.
        tick: called after each case.
    """
    search = search or Search()
    # Dozens of searches: each is short, and none is checked, as nobody runs these plans.
    search = replace(search, time_limit=min(search.time_limit, SECONDS), check=False)
    # A cluster of several kinds of devices has as many as it says.
    batches, meshes = _batches(batch), [dict(found.axes)] if found.cluster.groups else _meshes(found.axes)
    solved: Iterable[Case]
    # Descending: see `_solved`.
    budgets = sorted((budget * factor for factor in FACTORS), reverse=True)
    total, cases = len(batches) * len(meshes) * len(budgets), list[Case]()
    for samples, scaled in batches:
        # A pinned number of microbatches divides the plan's own batch, not every other.
        own_search = search if scaled is batch else without_count(search)
        given = (dict(found.axes), budget) if scaled is batch else None
        wanted = [(axes, _cases(axes, budgets, samples, given)) for axes in meshes]
        try:
            program = program_to_plan(
                model, scaled, loss_fn=loss_fn, loss=loss, precision=precision, fused=found.fused, search=search
            )
        # The model may insist on the size of its batch, by whatever error.
        except Exception as e:
            if scaled is batch:
                raise
            reason = str(e) if isinstance(e, AutoparError) else f"{type(e).__name__}: {e}"
            solved = [replace(case, reason=reason or type(e).__name__) for _, each in wanted for case in each]
        else:
            solved = (case for axes, each in wanted for case in _solved(program, axes, each, found, own_search))
        for case in solved:
            cases.append(case)
            tick(len(cases), total, f"{case.devices} devices, {case.samples} samples")
    return cases


def _cases(
    axes: Mapping[str, int], budgets: Sequence[float], samples: int, given: tuple[Mapping[str, int], float] | None
) -> list[Case]:
    """Cases without plans, one for each budget; ``given`` is the mesh and the budget of the plan itself."""
    return [Case(math.prod(axes.values()), size, samples, given=given == (axes, size)) for size in budgets]


def _solved(
    program: Program, axes: Mapping[str, int], cases: Sequence[Case], found: Plan, search: Search
) -> Iterator[Case]:
    """The cases of one program on one mesh, with their plans or reasons.

    The budgets come in descending order, which saves searches: the best plan under a larger budget stays the best as
    long as it fits, and what did not fit a larger budget does not fit a smaller one.
    """
    fits: Plan | None = None
    failed: InfeasibleError | None = None
    for case in cases:
        if case.given:
            # The plan itself need not be searched again, and starts the series of smaller budgets.
            fits = found
            yield _with_plan(case, found)
            continue
        if failed is not None:
            yield _without_plan(case, InfeasibleError(str(failed), needed=failed.needed, budget=case.budget))
            continue
        try:
            if fits is None or needed_by(fits) > case.budget:
                fits = solve(program, axes, found.cluster, memory=case.budget, optimizer=found.optimizer, search=search)
            yield _with_plan(case, fits)
        except (AutoparError, ValueError) as e:
            failed = e if isinstance(e, InfeasibleError) and e.needed is not None else None
            yield _without_plan(case, e)


def _with_plan(case: Case, plan: Plan) -> Case:
    seconds, memory = plan.predicted.step_seconds, needed_by(plan)
    return replace(case, step_seconds=seconds, memory_bytes=memory, splits=splits_of(plan))


def _without_plan(case: Case, error: Exception) -> Case:
    needed = error.needed if isinstance(error, InfeasibleError) else None
    return replace(case, reason=reason_of(error), needed=needed)


def memory_of(plan: Plan) -> float:
    """Bytes per device between steps, all categories."""
    return sum(plan.predicted.memory_bytes.values())


def needed_by(plan: Plan) -> float:
    """Bytes per device at the peak, which the budget limits; between steps if the plan has no predicted peak."""
    return sum(plan.predicted.peak_bytes.values()) or memory_of(plan)


def splits_of(plan: Plan) -> str:
    """Into how many microbatches and stages a plan splits the step, for people."""
    parts = [f"{plan.microbatches} microbatches"] * (plan.microbatches > 1)
    return ", ".join([*parts, *[f"{len(plan.stages)} stages"] * (plan.pipeline is not None)])


def without_count(search: Search) -> Search:
    """The search without a pinned number of microbatches, unless a hand-written schedule needs just that number."""
    by_hand = SCHEDULE in search.pins and is_table(as_text(search.pins[SCHEDULE]))
    return search if by_hand else replace(search, pins={k: v for k, v in search.pins.items() if k != MICROBATCHES})


def _meshes(axes: Sequence[tuple[str, int]]) -> list[dict[str, int]]:
    (name, size), *rest = axes
    return [{name: int(size * factor), **dict(rest)} for factor in FACTORS if (size * factor).is_integer()]


def _batches(batch: Batch) -> list[tuple[int, Batch]]:
    """Batches of half, the same and twice as many samples, as most of the tensors have; the others stay as they are."""
    tensors, skeleton = pytree.flatten(batch, "batch", shared=True)
    rows = [t.shape[0] for t in tensors if t.ndim]
    # By majority, as plans tell them: positions or a number of tokens besides have no samples.
    samples = Counter(rows).most_common(1)[0][0] if rows else 0
    if not samples:
        return [(0, batch)]
    counts = [int(samples * factor) for factor in FACTORS if samples * factor >= 1]

    def scaled(count: int) -> Batch:
        own = [_with_rows(t, count) if t.ndim and t.shape[0] == samples else t for t in tensors]
        return cast(Batch, pytree.unflatten(skeleton, own))

    return [(n, batch if n == samples else scaled(n)) for n in counts]


def _with_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
