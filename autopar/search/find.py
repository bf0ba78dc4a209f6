"""`find_plan`: the search, from a program and its dims to a plan with a certificate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.errors import InfeasibleError
from autopar.ir.plan import INTERRUPTED, TIME_LIMIT, Plan
from autopar.ir.program import Program
from autopar.search.axis_by_axis import bound_by_axes
from autopar.search.budget.budget_problem import BudgetProblem
from autopar.search.budget.within_budget import plan_by_axes, plan_within
from autopar.search.formulation.recipes import roles_of
from autopar.search.options import Job
from autopar.search.solver.duals import examine
from autopar.search.solver.interrupt import requested
from autopar.sharding.candidates import strategies
from autopar.sharding.dims import Dims
from autopar.sharding.layer_classes import LayerClasses, layer_classes

EXACT_AXES = 2
"""Meshes of up to this many axes are solved as one problem; larger ones axis by axis, with the gap stated."""


def find_plan(program: Program, dims: Dims, job: Job, classes: LayerClasses | None = None) -> Plan:
    """The fastest plan that fits, whose peak is measured on the graph that would be emitted.

    Args:
        program: canonical program.
        dims: its dimension analysis.
        job: what is searched for.
        classes: which nodes share a decision; default: as ``job.search.tie_layers`` says.

    Raises:
        InfeasibleError: nothing fits; says how much is missing.
        CertificateError: the check refutes what the search claims.
    """
    axes, search, restrictions = job.axes, job.search, job.restrictions
    classes = classes or layer_classes(program, dims, tie=search.tie_layers)
    # Roles of all axes leave so little open that any number of them is one problem.
    decided = all(roles_of(search.recipe, axes, search.roles)) and bool(restrictions.strategies)
    exact = decided or len(axes) <= EXACT_AXES
    problem = BudgetProblem.of(program, dims, classes, job)
    if exact:
        plan, fixed, claims = plan_within(problem), 0.0, problem.claims
    else:
        fixed, claims = bound_by_axes(program, dims, classes, problem.tables.machine, restrictions)
        plan = plan_by_axes(problem, fixed + sum(claim.bound for claim in claims))
    certificate = plan.certificate
    if problem.limits.expired():
        certificate = replace(certificate, method=INTERRUPTED if requested() else TIME_LIMIT)
    if search.check and not requested():
        if exact:
            claims = [max(claims, key=lambda claim: claim.bound)]  # each is about all plans
        job.progress("checking the bound", certificate.objective, certificate.lower_bound)
        checked = fixed + sum(examine(claim, search.time_limit / len(claims)) for claim in claims)
        certificate = replace(certificate, checked=max(checked, 0.0))
    return replace(plan, certificate=certificate)


def require_splits(dims: Dims, axes: Mapping[str, int]) -> None:
    """Refuse a mesh axis that no operator can share its work along.

    Raises:
        InfeasibleError: names the axis, the sizes that there are and the remedy.
    """
    operators = dict.fromkeys(dims.operators.values())
    factors = [(o, s.factor) for o in operators for s in strategies(o) if s.factor is not None]
    sizes = sorted({o.letters[letter].factors[j].size for o, (letter, j) in factors}, reverse=True)
    for axis, n in axes.items():
        if n > 1 and not any(size % n == 0 for size in sizes):
            raise InfeasibleError(
                f"no operator can be split along axis {axis!r} of size {n}: it divides no factor of the model's "
                f"dims ({', '.join(map(str, sizes[:12]))}); choose an axis size that divides the batch or the weights"
            )
