"""`microbatch_program`: the program of one of several parts of the batch, cut by a search along the microbatch axis."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from autopar.costs.cluster import Cluster, Link
from autopar.errors import InfeasibleError
from autopar.ir.graph import values_of
from autopar.ir.program import Program
from autopar.ir.signature.outputs import WHICH
from autopar.passes import Pass, collector_paused, run_passes
from autopar.passes.annotate_layouts import annotate_layouts
from autopar.passes.eliminate_dead_code import eliminate_dead_code
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.localize_shapes import localize_shapes
from autopar.passes.lower_operators import lower_operators
from autopar.passes.rng.replicate import replicate_random
from autopar.search.find import find_plan
from autopar.search.microbatch.rewrite import TIME, cut_microbatches
from autopar.search.microbatch.time_axis import along_samples
from autopar.search.options import Job, Search
from autopar.sharding.dims import analyze
from autopar.sharding.layer_classes import layer_classes

TIME_PASSES: tuple[Pass, ...] = (
    annotate_layouts,
    insert_collectives,
    localize_shapes,
    lower_operators,
    eliminate_dead_code,
)
"""Passes for the microbatch axis."""

DETERMINISTIC_TIME_PASSES: tuple[Pass, ...] = (annotate_layouts, replicate_random, *TIME_PASSES[1:])


def require_early_backward(program: Program) -> None:
    """Check that gradients can be computed before `backward` is called, which then only scales them.

    Raises:
        InfeasibleError: there is no loss, or it has to be scaled.
    """
    if program.loss is None:
        if (count := _losses(program)) > 1:
            raise InfeasibleError(
                f"microbatches and pipelines need one loss, and {count} scalars that the model returns or keeps in "
                "attributes carry gradients: detach() what is not trained on (self.last = y.mean().detach()), or say "
                f"which is the loss, with {WHICH}"
            )
        raise InfeasibleError(
            "microbatches are added up by the loss, and the model returns none: return it alone or as the only scalar, "
            f"or pass loss_fn=lambda output, batch: ...; of several scalars name it, with {WHICH}"
        )
    if program.input_gradients:
        raise InfeasibleError(
            f"batch tensor {min(program.input_gradients)} requires a gradient, which is computed when backward() is "
            "called, of the whole batch: not in microbatches or a pipeline. Detach it where no gradient is needed, "
            'leave these out (pins={"microbatches": 1}), or compute what it depends on inside the model'
        )
    if any(v is not None and v.dtype is torch.float16 for n in program.graph.graph.nodes for v in values_of(n)):
        raise InfeasibleError(
            "gradients of microbatches and pipelines are computed before backward() is called, and so before the loss "
            'is scaled, which float16 needs: compute in bfloat16, or leave these out (pins={"microbatches": 1})'
        )


def hint_of_loss(program: Program) -> str:
    """The end of an error where memory is short and microbatches cannot help, as there are several losses."""
    count = _losses(program)
    if count < 2:
        return ""
    return (
        f"; microbatches, which need less, would need one loss, and {count} scalars carry gradients: name it, {WHICH}"
    )


def _losses(program: Program) -> int:
    """The number of scalars of the output that carry gradients."""
    carrying = [i.name for i in program.inputs if i.kind == "tangent"]
    return sum(o.name in carrying and v.meta["val"].ndim == 0 for o, v in program.results)


def microbatch_program(program: Program, count: int, *, deterministic: bool = False) -> Program:
    """The program of one of ``count`` microbatches, whose sum is the step.

    Args:
        program: of the whole batch.
        count: microbatches.
        deterministic: random numbers are drawn for the whole batch at once, as one device would.

    Raises:
        InfeasibleError: the samples do not divide, or something needs the whole batch at once.
    """
    if count == 1 or not program.training:
        return program
    require_early_backward(program)
    # Cached with the program: searches, rewriting and verification ask for the same parts.
    key = ("in_microbatches", count, deterministic)
    if key in program.memo:
        known: Program = program.memo[key]
        return known
    try:
        # Tied layers make the search small, and the parts of all layers alike.
        found = _in_microbatches(program, count, deterministic, tie=True)
    except InfeasibleError:  # nodes of repeated layers may have to be cut in different ways
        found = _in_microbatches(program, count, deterministic, tie=False)
    if program.repeat is not None:
        shorter = microbatch_program(program.repeat.shorter, count, deterministic=deterministic)
        found = replace(found, repeat=replace(program.repeat, shorter=shorter))
    program.memo[key] = found
    return found


def _in_microbatches(program: Program, count: int, deterministic: bool, *, tie: bool) -> Program:
    """The program of a microbatch; with ``tie``, nodes of repeated layers are cut alike."""
    steps = DETERMINISTIC_TIME_PASSES if deterministic else TIME_PASSES
    program = replace(program, repeat=None)
    with collector_paused():
        dims, axes = analyze(program), {TIME: count}
        classes = layer_classes(program, dims, tie=tie)
        limits = along_samples(program, dims, classes, count)
        # Exact: a collective that the best plan avoids would make the cut impossible.
        search = Search(gap=0.0, padding=False, pins={"recompute": "none"})
        job = Job(axes, _slow_clock(), search=search, restrictions=limits, overlap=False)
        plan = find_plan(program, dims, job, classes)
        return cut_microbatches(program, run_passes(program, plan, steps), count)


@functools.cache
def _slow_clock() -> Cluster:
    """A cluster whose collectives take so long that a plan has none that it can avoid."""
    return replace(Cluster.preset("cpu"), links=(Link("time", 1e12, 1.0),), group_sizes=())
