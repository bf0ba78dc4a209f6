"""`best_padded`: the plan of a program, with and without padding of dims that an axis does not divide."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from autopar.dims import Dims, analyze
from autopar.errors import InfeasibleError
from autopar.leaner import costed, leaner
from autopar.passes.pad_dims import pad
from autopar.plan import INTERRUPTED, TIME_LIMIT, Plan
from autopar.predict import predict
from autopar.program import Program
from autopar.search.find import EXACT_AXES, find_plan, require_splits
from autopar.search.floor import least_plan
from autopar.search.options import Job, Peak
from autopar.search.padding import paddings
from autopar.search.quotient import Quotient, quotient
from autopar.search.random_plan import random_plan
from autopar.search.recipes import roles_of
from autopar.search.restrict import Restrictions, complete, pin_modules, read_pins
from autopar.search.rival import NoFasterError, Rival
from autopar.search.roles import DATA, by_roles

Measure = Callable[[Program, Quotient], Peak]
"""What plans of a program need."""


def best_padded(program: Program, job: Job, measure: Measure) -> Plan:
    """The best plan that is found.

    Where parameters have dims that an axis does not divide, it is searched twice: without padding, and then with it for
    a plan that is faster. Each search has half of the time limit.
    """
    axes, search = job.axes, job.search
    roles, dims = roles_of(search.recipe, axes, search.roles), analyze(program)
    limits = read_pins(program, dims, search.layouts, axes, job.restrictions)
    helps = any(role != DATA for role in roles)  # parameters need not divide to be replicated
    options = paddings(program, dims, axes, limits.layouts, search=search.padding and helps)
    if search.recipe == "random":
        options = (options[search.seed % len(options)],)
    search = replace(search, time_limit=search.time_limit / len(options))
    found: list[Plan] = []
    bounds: list[float] = []
    errors: list[InfeasibleError] = []
    for shapes in options:
        padded = pad(program, shapes)
        dims = analyze(padded) if shapes else dims
        known = Rival.of(found[0]) if found and not search.check else job.rival
        try:
            # A later shape lives with the mesh that there is; roles say more clearly what is wrong.
            if None in roles and not job.restrictions.layouts:
                require_splits(dims, axes)
            plan = _best(padded, dims, replace(job, search=search, restrictions=limits, rival=known), measure)
        except InfeasibleError as e:
            errors.append(e)
            bounds += [e.bound] if isinstance(e, NoFasterError) else []
            continue
        found.append(replace(plan, padding=shapes))
    if not found:
        raise min(errors, key=lambda e: math.inf if e.needed is None else e.needed)
    best = _of_whole_model(min(found, key=lambda plan: plan.certificate.objective), program)
    if len(options) == 1 or search.recipe == "random":
        return best
    bound = min(*bounds, *(plan.certificate.lower_bound for plan in found), best.certificate.objective)
    verified = [plan.certificate.checked for plan in found]
    checked = None if None in verified else min(b for b in verified if b is not None)
    methods = [plan.certificate.method for plan in found]
    method = next((m for m in (INTERRUPTED, TIME_LIMIT) if m in methods), best.certificate.method)
    space = f"parameters as they are, or all padded whose dims an axis does not divide; {best.certificate.space}"
    return replace(
        best,
        certificate=replace(best.certificate, lower_bound=bound, space=space, method=method, checked=checked),
    )


def _of_whole_model(plan: Plan, program: Program) -> Plan:
    """The plan with the parameters that the program leaves out."""
    repeat = program.repeat
    if repeat is None:
        return plan
    parameters = {whole: layout for name, layout in plan.parameters.items() for whole in repeat.names(name)}
    padding = {whole: shape for name, shape in plan.padding.items() for whole in repeat.names(name)}
    return replace(plan, parameters=parameters, padding=padding)


def _best(program: Program, dims: Dims, job: Job, measure: Measure) -> Plan:
    """The best plan, or a random one, of a program whose dims are decided."""
    axes, search = job.axes, job.search
    classes = quotient(program, dims, tie=search.tie_layers or search.recipe == "random")
    limits = pin_modules(program, dims, classes, search.layouts, axes, job.restrictions)
    if search.recipe == "random":
        return predict(program, dims, _random(program, dims, job, limits))
    limits = by_roles(program, dims, classes, axes, roles_of(search.recipe, axes, search.roles), limits)
    job, peak = replace(job, restrictions=limits), measure(program, classes)
    try:
        return predict(program, dims, find_plan(program, dims, job, classes, peak.held), classes)
    except InfeasibleError as e:
        if peak.crowd is None:
            raise
        error = e
    exact = program.repeat is None and len(job.axes) <= EXACT_AXES
    start = partial(least_plan, program, dims, job, classes) if exact else None
    lean = leaner(program, dims, classes, job, peak.crowd, error, start)
    return costed(predict(program, dims, lean, classes))


def _random(program: Program, dims: Dims, job: Job, limits: Restrictions) -> Plan:
    search, machine = job.search, job.cluster
    fixed = {key: complete(key[1], layout) for key, layout in limits.layouts.items()}
    again, away = search.again == "search", search.offload and machine.device.host_bandwidth > 0
    return random_plan(program, dims, job.axes, machine, search.seed, fixed, job.optimizer, again, search.regions, away)
