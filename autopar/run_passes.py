"""`run_passes`: a program through passes, one after the other."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from autopar.check import check
from autopar.errors import PassError
from autopar.plan import Plan
from autopar.program import Program, copy_graph

Pass = Callable[[Program, Plan], Program]


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
    program = replace(program, graph=copy_graph(program.graph))
    for node in program.graph.graph.nodes:
        node.meta["whole"] = node.name  # whatever passes make of it: `autopar.first_difference` asks
    done: tuple[str, ...] = ()
    for step in passes:
        try:
            program = replace(step(program, plan))  # a new value: it may have changed the graph in place
            if verified:
                check(program, plan)
        except (AssertionError, RuntimeError, ValueError, TypeError) as e:
            raise PassError(step.__name__, done, str(e)) from e
        done = (*done, step.__name__)
    return program


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector: it would scan a captured graph's millions of objects over and over.

    Meanwhile what there was before is left out of `gc.collect`, which is fast enough to call now and then.
    """
    enabled, own = gc.isenabled(), gc.get_freeze_count() == 0
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
