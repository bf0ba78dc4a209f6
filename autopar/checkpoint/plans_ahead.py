"""`plan_other_worlds`: plans for the sizes that a run may have after the next change, found before it comes."""

from __future__ import annotations

import json
import logging
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.costs.budget import DefaultBudget
from autopar.errors import AutoparError
from autopar.ir.plan import Plan
from autopar.ir.signature.binding import Arguments
from autopar.module.parallel_module import ParallelModule
from autopar.runtime.checkpoint import folders
from autopar.runtime.launch.environment import NODES, parse_range
from autopar.runtime.launch.mesh import axes_of_run
from autopar.runtime.mesh import MeshContext, one_device
from autopar.search import cache
from autopar.specialize import CompileOptions, Request, Specialization, default_budget, plan_again

PLANNED = "planned.json"
"""The file in which a node remembers for which sizes it has plans."""

logger = logging.getLogger("autopar")


def plan_other_worlds(model: ParallelModule, ahead: int, folder: Path | None) -> list[int]:
    """Plan for worlds of some nodes less and more than this one; every rank calls it, and plans for some of them.

    The plans go to the cache of each node, where the search finds them that would be made after a change.

    Args:
        model: its layouts are decided.
        ahead: how many sizes below, and how many above.
        folder: of this node, in which it is noted what has been planned; None: nothing is to be planned.

    Returns:
        Numbers of processes for which there are plans now, and were none that this node knows of.
    """
    session, text = model._autopar, os.environ.get(NODES)
    context, first, options = session.context, session.first, session.options
    # A process alone has no mesh, from which others would be made.
    if folder is None or text is None or first is None or options.plan is not None or context.mesh is None:
        return []
    world, kind = math.prod(context.sizes), context.device.type
    # Of a mesh that the launcher does not name, nobody knows what it will be for another world.
    wanted = _sizes(world, text, ahead) if dict(context.axes) == axes_of_run(world, kind) else []
    leads, note = os.environ.get("LOCAL_RANK", "0") == "0", folder / PLANNED
    known = json.loads(note.read_text(encoding="utf-8")) if note.exists() else []
    # What one node lacks is planned for all: a new node has a cache of its own.
    everyone = context.gather([n for n in wanted if n not in known], "for which worlds to plan")
    lacking = sorted({n for sizes in everyone for n in sizes})
    own = lacking[context.rank :: world]
    found = [plan for n in own for plan in _planned(first, options, context, axes_of_run(n, kind))]
    every_rank = context.gather(found, "plans for other worlds")
    plans, where = [plan for of_rank in every_rank for plan in of_rank], cache.folder()
    if leads and where is not None:
        for name, plan in plans:
            if not (where / name).exists():
                cache.store(where / name, Plan.from_dict(plan))
        folders.write(note, json.dumps(sorted({*known, *lacking})))
    return lacking


def _sizes(world: int, nodes: str, ahead: int) -> list[int]:
    """The nearest sizes of which there may be a mesh, as numbers of processes."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    least, most = parse_range(nodes, NODES)
    possible = [n * local for n in range(least, most + 1) if n * local != world and _has_axes(n * local)]
    return sorted(n for n in possible if n < world)[-ahead:] + sorted(n for n in possible if n > world)[:ahead]


def _has_axes(world: int) -> bool:
    try:
        axes_of_run(world, "cpu")
    except ValueError:
        return False
    return True


def _planned(
    first: Specialization, options: CompileOptions, context: MeshContext, axes: dict[str, int]
) -> list[tuple[str, dict[str, Any]]]:
    """The plan for other axes, with the name of its file in the cache, as a list of none or one."""
    other = replace(context, axes=tuple(axes.items()))
    if math.prod(axes.values()) == 1:
        other = replace(one_device(context.device), timeout=context.timeout)
    try:
        options.cluster.require_mesh(dict(other.axes))
        if isinstance(options.memory, DefaultBudget):
            options = replace(options, memory=default_budget(other, options.cluster))
        # One device draws what it draws anyway.
        options = replace(options, deterministic=options.deterministic or other.mesh is None)
        with cache.asked_for() as files:
            plan_again(first.program, Request(Arguments({}, (), {}, tuple, 0), (), {}), options, other, None)
    except (AutoparError, ValueError) as error:
        logger.info("no plan ahead for axes %s: %s", axes, error)
        return []
    return [(file.name, Plan.load(file).to_dict()) for file in dict.fromkeys(files) if file.exists()]
