"""`search_within_budget`: a pipeline that needs more memory than there is, searched until it fits."""

from __future__ import annotations

import gc
from dataclasses import replace

from autopar.errors import InfeasibleError
from autopar.ir.plan import Plan
from autopar.search.budget.cutoff import Cutoff, PrunedError
from autopar.search.budget.tighten import HOPELESS
from autopar.search.padding import best_padded
from autopar.search.pipeline.search_tree import SearchTree
from autopar.search.pipeline.shape import ScheduledStages
from autopar.search.pipeline.stage_peak import fastest_stages

SEARCHED = 12
"""How many pipelines that do not fit as they are, are searched within the budget."""


def search_within_budget(tree: SearchTree, scheduled: ScheduledStages, seconds: float, needed: float) -> None:
    """Search a pipeline within the budget that takes so many seconds, and needs so many bytes, in any memory."""
    if tree.searched >= SEARCHED or _is_hopeless(tree, scheduled):
        return
    tree.searched += 1
    try:
        found = _fitting(tree, scheduled)
        tree.add(found)
        tree.slowdowns.append((needed, found.predicted.step_seconds / seconds))
    except InfeasibleError as e:
        tree.fail(e)
    if _is_hopeless(tree, scheduled):
        tree.heavy.add(scheduled.schedule)
    if tree.searched % 4 == 0:
        gc.collect()  # graphs that were measured: their nodes refer to each other in circles


def _fitting(tree: SearchTree, scheduled: ScheduledStages) -> Plan:
    """The best plan under a schedule that fits.

    Raises:
        InfeasibleError: none does.
        PrunedError: none is faster than the best plan.
    """
    part, shape = scheduled.part, scheduled.shape
    tree.say(f"{shape.devices} devices along {shape.axis}, {shape.stages} stages, {scheduled.schedule}")
    job = tree.job_inside(shape)
    search = replace(job.search, check=False)  # the bound that holds is that of any memory
    # The search plans devices that have the whole model: as many times as long as those of a stage.
    cutoff = Cutoff(tree.seconds * shape.devices)
    job = replace(job, memory=tree.memory, cutoff=cutoff, search=search, stages=scheduled, graphs=shape.stages)
    any_memory = tree.free[shape.mesh, part.microbatches].certificate
    try:
        plan = best_padded(tree.program, part, job)
    except PrunedError as e:
        # Pruned by a bound of products in one piece.
        raise PrunedError(any_memory.lower_bound / shape.devices) from e
    cut = fastest_stages(part, plan, scheduled, search)
    return cut.whole(scheduled, cut.seconds(scheduled.actions), any_memory)


def _is_hopeless(tree: SearchTree, scheduled: ScheduledStages) -> bool:
    """Whether what needed least under any schedule needs far too much under this one."""
    if tree.memory is None or not scheduled.measured:
        return False
    needed, schedule, plan = min(scheduled.measured, key=lambda found: found[0])
    if schedule != scheduled.schedule:
        cut = fastest_stages(scheduled.part, plan, scheduled, tree.search)
        needed = sum(cut.peak(scheduled.actions).values())
    return needed > HOPELESS * tree.memory
