"""`strategies_of`: the strategies of a plan, for the same model on a batch of another shape."""

from __future__ import annotations

from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.sharding.candidates import candidates
from autopar.sharding.dims import analyze
from autopar.sharding.layer_classes import layer_classes


def strategies_of(plan: Plan, program: Program) -> dict[str, tuple[frozenset[str], ...]]:
    """What each class of operators may take on each axis, so that it is split as in a plan.

    A class that the plan lacks is not among them, nor one that cannot be split so here, such as rows that an axis does
    not divide: these stay open.

    Args:
        plan: of an earlier shape.
        program: of one microbatch.
    """
    dims = analyze(program)
    found = {}
    for key, members in layer_classes(program, dims).members.items():
        names = plan.choices.get(key)
        if names is None or members[0] not in dims.operators:
            continue
        only = tuple(frozenset({name}) for name in names)
        if len(candidates(dims.operators[members[0]], plan.axis_sizes, allowed=only).choice):
            found[key] = only
    return found
