"""`find_plan`: the search, from a program and its dims to a plan with a certificate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autopar.errors import InfeasibleError
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.search.budget.budget_problem import BudgetProblem, peak_bytes
from autopar.search.budget.cutoff import Cutoff, PrunedError
from autopar.search.budget.pareto import Frontier
from autopar.search.options import Job
from autopar.search.predict import predict
from autopar.search.rounds import Rounds, as_predicted, search_once
from autopar.search.solver.certify import Claim
from autopar.sharding.candidates import strategies
from autopar.sharding.dims import Dims
from autopar.sharding.layer_classes import LayerClasses, layer_classes

HOPELESS_APART = 1.5
"""Where the plan of least memory needs this multiple of the budget with its collectives waited for one by one, no other
plan of that kind is searched: layouts that are best where nothing is hidden may need less."""


def find_plan(program: Program, dims: Dims, job: Job, classes: LayerClasses | None = None) -> Plan:
    """The fastest plan that fits, whose peak is measured on the graph that would be emitted, and what it costs.

    Args:
        program: canonical program.
        dims: its dimension analysis.
        job: what is searched for.
        classes: which nodes share a decision; default: as ``job.search.tie_layers`` says.

    Raises:
        InfeasibleError: nothing fits; says how much is missing.
        CertificateError: the check refutes what the search claims.
    """
    classes = classes or layer_classes(program, dims, tie=job.search.tie_layers)
    return begin(program, dims, job, classes).rest(job.cutoff)


@dataclass(frozen=True)
class Begun:
    """A search that has found its first plan.

    Attributes:
        plan: the first one, with its bound of all.
        rest: searches on, for a plan that takes less than a cutoff, as long as that is worth it, and returns the best
            plan; without a cutoff it only does what is left to do for the first one.
    """

    plan: Plan
    rest: Callable[[Cutoff | None], Plan]

    @classmethod
    def of(cls, plan: Plan) -> Begun:
        """A search that ends with its first plan."""
        return cls(plan, lambda _: plan)

    def is_beaten(self, best: Plan | None) -> bool:
        """Whether a known plan is as fast as the first one, of a search whose bound is no higher than this one's."""
        if best is None:
            return False
        own, other = self.plan.certificate, best.certificate
        return own.objective >= other.objective and own.lower_bound >= other.lower_bound


def begin(program: Program, dims: Dims, job: Job, classes: LayerClasses) -> Begun:
    """Search for a first plan, see `find_plan`."""
    if not job.overlaps:
        return Begun.of(_plain(program, dims, job, classes))
    rounds = Rounds(program, dims, job, classes, {})
    try:
        return Begun(rounds.first(), rounds.rest)
    except PrunedError:
        raise
    except InfeasibleError as e:
        if job.memory is None or e.least is None:
            raise
        # What is in flight takes memory, too: perhaps collectives that are waited for one by one fit.
        alone = BudgetProblem.of(program, dims, classes, job)
        waiting, _ = alone.measured(replace(e.least, overlap=False))
        if alone.impossible or peak_bytes(waiting) > HOPELESS_APART * job.memory:
            raise
    # That none was found whose collectives run beside kernels is no proof that there is none.
    others = max(rounds.claims, key=lambda claim: claim.bound, default=None)
    return Begun.of(_plain(program, dims, job, classes, others))


def _plain(program: Program, dims: Dims, job: Job, classes: LayerClasses, others: Claim | None = None) -> Plan:
    """The best plan whose collectives are waited for one by one; ``others`` bounds those whose are not.

    Raises:
        InfeasibleError: nothing fits.
        PrunedError: no plan is much faster than the one to beat, which need not be so of the others.
    """
    try:
        problem = BudgetProblem.of(program, dims, classes, job)
        found = search_once(problem)
    except PrunedError as e:
        bound = e.bound if others is None else min(e.bound, others.bound)
        raise PrunedError(bound, in_any_memory=e.in_any_memory and others is None) from e
    if others is not None and others.bound < found.bound:
        known = replace(found.plan.certificate, lower_bound=others.bound)
        found = replace(found, plan=replace(found.plan, certificate=known), claims=[others], fixed=0.0)
    plan = problem.with_peak(predict(program, dims, found.plan, classes))
    return replace(plan, certificate=found.checked(job, as_predicted(plan, found)))


def frontier_of(program: Program, dims: Dims, job: Job, classes: LayerClasses, state_share: float) -> Frontier:
    """Seconds by memory of the plans that are searched first, of whose states such a share counts."""
    weights = Rounds(program, dims, job, classes, {}).all_hidden if job.overlaps else None
    problem = BudgetProblem.of(program, dims, classes, job, weights)
    memory = replace(problem.states_and_activations(offload=problem.offload), state_share=state_share)
    return Frontier(problem.formulation(job.restrictions, memory).problem, problem.limits)


def require_splits(dims: Dims, axes: Mapping[str, int]) -> None:
    """Refuse a mesh axis that no operator can share its work along.

    Raises:
        InfeasibleError: names the axis, the sizes that there are and the remedy.
    """
    operators = dict.fromkeys(dims.operators.values())
    factors = [(o, f) for o in operators for s in strategies(o) for f in s.factors]
    sizes = sorted({o.letters[letter].factors[j].size for o, (letter, j) in factors}, reverse=True)
    for axis, n in axes.items():
        if n > 1 and not any(size % n == 0 for size in sizes):
            raise InfeasibleError(
                f"no operator can be split along axis {axis!r} of size {n}: it divides no factor of the model's "
                f"dims ({', '.join(map(str, sizes[:12]))}); choose an axis size that divides the batch or the weights"
            )
