"""The rewriting as a list: `PASSES`, one file a pass, and `run_passes`, which checks the graph after each."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from autopar.errors import PassError
from autopar.ir.check import Seen, check
from autopar.ir.graph import copy_graph
from autopar.ir.node_info import info, set_info
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes.annotate_layouts import annotate_layouts
from autopar.passes.collectives.bucket_collectives import bucket_collectives
from autopar.passes.collectives.chunk_collectives import chunk_collectives
from autopar.passes.collectives.delay_gradients import delay_gradients
from autopar.passes.collectives.fill_waits import fill_waits
from autopar.passes.collectives.join_maxima import join_maxima
from autopar.passes.collectives.overlap_collectives import overlap_collectives
from autopar.passes.collectives.send_rounded_numbers import send_rounded_numbers
from autopar.passes.collectives.send_whole_numbers import send_whole_numbers
from autopar.passes.copy_for_backward import copy_for_backward
from autopar.passes.eliminate_dead_code import eliminate_dead_code
from autopar.passes.hoist_invariants import hoist_invariants
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.insert_offload import insert_offload
from autopar.passes.insert_recompute import insert_recompute
from autopar.passes.kernels.add_bias_in_product import add_bias_in_product
from autopar.passes.kernels.fill_in_place import fill_in_place
from autopar.passes.kernels.insert_contiguous import insert_contiguous, insert_contiguous_everywhere
from autopar.passes.kernels.merge_views import merge_views
from autopar.passes.kernels.reduce_in_place import reduce_in_place
from autopar.passes.localize_shapes import localize_shapes
from autopar.passes.lower_operators import lower_operators
from autopar.passes.pad_dims import pad_dims
from autopar.passes.pipeline.assign_stages import assign_stages
from autopar.passes.pipeline.scatter_sends import scatter_sends
from autopar.passes.rng.draw_in_attention import draw_in_attention
from autopar.passes.rng.localize import localize_random
from autopar.passes.rng.replay import replay_random
from autopar.passes.rng.replicate import replicate_random
from autopar.sharding.dims import carry_over

Pass = Callable[[Program, Plan], Program]

# Layouts before the moves between them, moves before local shapes, and lowerings on local shapes; buckets join
# collectives of any of these, and all are ordered when they are there; strides come last, since every pass before may
# change them.
PASSES: tuple[Pass, ...] = (
    pad_dims,
    copy_for_backward,
    annotate_layouts,
    insert_recompute,
    hoist_invariants,
    insert_collectives,
    localize_shapes,
    localize_random,
    lower_operators,
    draw_in_attention,
    assign_stages,
    insert_offload,
    join_maxima,
    bucket_collectives,
    eliminate_dead_code,
    scatter_sends,
    delay_gradients,
    fill_waits,
    overlap_collectives,
    chunk_collectives,
    insert_contiguous,
    merge_views,
    reduce_in_place,
    fill_in_place,
    add_bias_in_product,
)

DETERMINISTIC_PASSES: tuple[Pass, ...] = (
    pad_dims,
    copy_for_backward,
    annotate_layouts,
    insert_recompute,
    hoist_invariants,
    replicate_random,
    insert_collectives,
    localize_shapes,
    replay_random,
    lower_operators,
    draw_in_attention,
    assign_stages,
    insert_offload,
    join_maxima,
    bucket_collectives,
    eliminate_dead_code,
    scatter_sends,
    delay_gradients,
    fill_waits,
    overlap_collectives,
    chunk_collectives,
    insert_contiguous,
    merge_views,
    reduce_in_place,
    fill_in_place,
    add_bias_in_product,
)
"""Instead of `PASSES` where the ranks together draw the very numbers that one device would."""


_WHOLE: tuple[Pass, ...] = (pad_dims, copy_for_backward)
"""Passes that make another program, of which layouts are planned."""


def as_planned(program: Program, plan: Plan) -> Program:
    """The program that a plan has layouts of: of one microbatch, padded, with copies for the backward pass."""
    for step in _WHOLE:
        program = step(program, plan)
    return program


def with_any_strides(passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """The passes for a graph whose operators are made to give what strides one likes: nothing is known of them."""
    instead: dict[Pass, Pass] = {insert_contiguous: insert_contiguous_everywhere}
    return tuple(instead.get(p, p) for p in passes if p not in (merge_views, reduce_in_place, fill_in_place))


def with_whole_numbers(passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """The passes for a graph that sends whole numbers where the plan sends them in few bits, see the pass."""
    return _sending(send_whole_numbers, passes)


def with_rounded_numbers(passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """The passes for a graph that sends rounded numbers where the plan sends them in few bits, see the pass."""
    return _sending(send_rounded_numbers, passes)


def _sending(other: Pass, passes: Sequence[Pass]) -> tuple[Pass, ...]:
    # As soon as messages are there: what follows depends on their sizes.
    return tuple(p for each in passes for p in ([each, other] if each is insert_collectives else [each]))


def run_passes(program: Program, plan: Plan, passes: Sequence[Pass], *, verified: bool = True) -> Program:
    """Run passes on a copy of the graph.

    Args:
        program: stays as it is.
        plan: what the passes follow.
        passes: in their order.
        verified: whether the graph is checked after each; one that is only measured need not be.

    Raises:
        PassError: a pass left an invalid graph.
    """
    whole, program = program, replace(program, graph=copy_graph(program.graph))
    carry_over(whole, program)
    for node in program.graph.graph.nodes:
        # Whatever passes make of the node, `autopar.verify.first_difference` asks which node of the program it was.
        set_info(node, replace(info(node), program_node=node.name))
    done: tuple[str, ...] = ()
    seen: Seen = {}
    for step in passes:
        try:
            made = step(program, plan)
            # A new value, of which nothing is known: all others change the graph in place.
            program = made if step in _WHOLE else replace(made)
            if verified:
                check(program, plan, seen)
        except (AssertionError, RuntimeError, ValueError, TypeError) as e:
            raise PassError(step.__name__, done, str(e)) from e
        done = (*done, step.__name__)
    return program


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector: it would scan a captured graph's millions of objects over and over.

    Meanwhile what there was before is left out of `gc.collect`, which is fast enough to call now and then.
    """
    # Nested uses: only the outermost freezes and unfreezes. Who froze or disabled the collector does so on purpose.
    enabled = gc.isenabled()
    own = enabled and gc.get_freeze_count() == 0
    gc.disable()
    if own:
        gc.freeze()
    try:
        yield
    finally:
        if own:
            gc.unfreeze()
        if enabled:
            gc.enable()
