"""`strategies_of`: the strategies of a plan, for the same model on a batch of another shape."""

from __future__ import annotations

from autopar.errors import PlanError
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes import as_planned
from autopar.sharding.candidates import candidates
from autopar.sharding.dims import analyze
from autopar.sharding.layer_classes import layer_classes


def strategies_of(plan: Plan, before: Program, program: Program, *, tie: bool) -> dict[str, tuple[frozenset[str], ...]]:
    """What each class of operators may take on each axis, so that it is split as in a plan of another shape.

    The classes of the two programs have other names, which shapes are part of: nodes at the same place in the two
    graphs belong together. Empty where some operator cannot be split so, such as rows that an axis does not divide: the
    layouts of all others may then be better ones. Empty, too, where the plan pads a parameter that has another name or
    other dims by now: what its layout needs is then padded as in any search.

    Args:
        plan: of an earlier shape.
        before: the program that it is for, of one microbatch.
        program: the same of this shape.
        tie: whether repeated layers are classes, in both.
    """
    first = as_planned(before, plan)
    try:
        second = as_planned(program, plan)
    except PlanError:  # padding of parameters that are not there: the script has put a parametrization around one, say
        return {}
    if [n.target for n in first.calls] != [n.target for n in second.calls]:
        return {}
    dims, known = analyze(second), layer_classes(first, analyze(first), tie=tie).key
    own = layer_classes(second, dims, tie=tie).key
    names: dict[str, tuple[str, ...]] = {}
    for old, new in zip(first.calls, second.calls, strict=True):
        chosen = plan.choices.get(known[old], ())
        fits = len(chosen) == len(plan.axes) and names.setdefault(own[new], chosen) == chosen
        only = [{name} for name in chosen]
        if not fits or not len(candidates(dims.operators[new], plan.axis_sizes, allowed=only).choice):
            return {}
    return {key: tuple(frozenset({n}) for n in chosen) for key, chosen in names.items()}
