"""`find_plan`: the search, from a program and its dims to a plan with a certificate."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.errors import InfeasibleError
from autopar.ir.plan import INTERRUPTED, TIME_LIMIT, Certificate, Plan
from autopar.ir.program import Program
from autopar.search.axis_by_axis import bound_by_axes
from autopar.search.budget.budget_problem import BudgetProblem, peak_bytes
from autopar.search.budget.cutoff import PrunedError
from autopar.search.budget.tighten import HOPELESS
from autopar.search.budget.within_budget import plan_by_axes, plan_by_products, plan_within
from autopar.search.formulation.recipes import roles_of
from autopar.search.options import Job
from autopar.search.overlap.regions import regions_of
from autopar.search.overlap.simulated import simulated_seconds, with_chunks
from autopar.search.overlap.step_time import Floats, StepTime
from autopar.search.overlap.weights import Weights
from autopar.search.predict import predict, step_features
from autopar.search.solver.certify import Claim
from autopar.search.solver.duals import examine
from autopar.search.solver.highs import requested
from autopar.sharding.candidates import strategies
from autopar.sharding.dims import Dims
from autopar.sharding.layer_classes import LayerClasses, layer_classes

EXACT_AXES = 3
"""Layouts on up to this many axes are one problem; those on more are searched axis by axis, with the gap stated."""

WITHIN_AXES = 2
"""So are, on up to this many axes, layouts and what is saved, where a budget binds."""

ROUNDS = 4
"""At most so many weights of kernels and communication are tried."""

CLOSE, CLOSE_WITHIN = 3e-3, 0.1
"""A plan is good enough if at most this share of its time is above the bound of any weights; where a budget binds, of
which each round takes long, the second."""

NEAR, SIMULATED = 1.2, 4
"""Of the plans that take at most this multiple of the best one's time, so many are simulated."""


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
    if not job.overlaps:
        return _plain(program, dims, job, classes)
    try:
        return _overlapping(program, dims, job, classes)
    except PrunedError:
        raise
    except InfeasibleError as e:
        if job.memory is None or e.least is None:
            raise
        # What is in flight takes memory, too: perhaps collectives that are waited for one by one fit.
        alone = BudgetProblem.of(program, dims, classes, job)
        if alone.impossible or peak_bytes(alone.measured(replace(e.least, overlap=False))[0]) > HOPELESS * job.memory:
            raise
    return _plain(program, dims, job, classes)


def _plain(program: Program, dims: Dims, job: Job, classes: LayerClasses) -> Plan:
    """The best plan whose collectives are waited for one by one."""
    found = _search(BudgetProblem.of(program, dims, classes, job))
    plan = predict(program, dims, found.plan, classes)
    return replace(plan, certificate=found.checked(job, plan.certificate))


def _overlapping(program: Program, dims: Dims, job: Job, classes: LayerClasses) -> Plan:
    """The best plan whose collectives run beside kernels.

    Its time is a maximum of sums. Under any weights of these, the cheapest plan bounds the time of all: first under
    weights by which all is hidden that can be, then under those by which all plans that are known cost much.
    """
    rounds = _Rounds(program, dims, job, classes)
    rounds.search(rounds.all_hidden)
    if rounds.best.certificate.binds and not rounds.above_bound(CLOSE_WITHIN):
        # What the budget costs is far more than what is left to hide, and each round would search it anew.
        return rounds.result()
    if rounds.go_on():
        rounds.apart()
    while rounds.go_on() and len(rounds.found) < ROUNDS:
        # Half way from the best so far: plans are few, and say little of weights that are far from theirs.
        weights, known = rounds.strongest.between(rounds.strongest.best(rounds.features)), rounds.known
        try:
            rounds.search(weights)
        except InfeasibleError:
            break
        if rounds.known == known:  # the next weights would be these
            break
    return rounds.result()


class _Rounds:
    """Searches under several weights, and the best plan of all."""

    def __init__(self, program: Program, dims: Dims, job: Job, classes: LayerClasses) -> None:
        self.program, self.dims, self.job, self.classes = program, dims, job, classes
        self.deadline = time.monotonic() + job.search.time_limit / 2
        self.plans: list[Plan] = []
        self.found: list[tuple[_Found, Weights]] = []
        self.features: list[Mapping[str, Floats]] = []

    @property
    def all_hidden(self) -> Weights:
        """Weights that price communication only where nothing can hide it."""
        regions, repeat = regions_of(self.program), self.program.repeat
        units = regions.units if repeat is None else repeat.extrapolate(regions.units, regions_of(repeat.shorter).units)
        return Weights(StepTime(regions, len(self.job.axes), self.program.part.count, units))

    @property
    def proof(self) -> _Found:
        """The search with the highest bound."""
        return max(self.found, key=lambda each: each[0].bound)[0]

    @property
    def strongest(self) -> Weights:
        """The weights with the highest bound."""
        return max(self.found, key=lambda each: each[0].bound)[1]

    @property
    def best(self) -> Plan:
        """The fastest plan."""
        return min(self.plans, key=lambda plan: plan.predicted.step_seconds)

    @property
    def known(self) -> tuple[set[float], float]:
        """What weights follow from: the plans' seconds, and the highest bound."""
        return {plan.predicted.step_seconds for plan in self.plans}, self.proof.bound

    def search(self, weights: Weights) -> None:
        """Search under some weights.

        Raises:
            InfeasibleError: nothing fits.
        """
        found = _search(self._problem(weights))
        self.found.append((found, weights))
        self._add(found.plan)

    def apart(self) -> None:
        """Search as if nothing was hidden: the plan that sends least may be the best of all."""
        problem = self._problem(None)
        try:
            plan = _search(problem).plan
        except InfeasibleError:
            return
        ahead, enough = problem.measured(replace(plan, overlap=True))
        self._add(ahead if enough else plan)

    def above_bound(self, share: float) -> bool:
        """Whether more than a share of the best plan's time is above the bound."""
        seconds = self.best.predicted.step_seconds
        return seconds - self.proof.bound > share * seconds

    def go_on(self) -> bool:
        """Whether the best plan may be far from the best there is, and there is time."""
        self.job.progress("communication behind kernels", self.best.predicted.step_seconds, self.proof.bound)
        return self.above_bound(CLOSE) and time.monotonic() < self.deadline

    def result(self) -> Plan:
        """The best plan, with the highest bound; of several that are close, that which the simulator finds fastest."""
        best, proof = self.best, self.proof
        close = {
            p.predicted.step_seconds: p
            for p in self.plans
            if p.predicted.step_seconds < NEAR * best.predicted.step_seconds
        }
        if len(close) > 1:
            few = [close[seconds] for seconds in sorted(close)[:SIMULATED]]
            self.job.progress(f"simulating {len(few)} plans", best.predicted.step_seconds, proof.bound)
            best = min(few, key=lambda plan: simulated_seconds(self.program, plan, self.classes))
        seconds = best.predicted.step_seconds
        certificate = replace(best.certificate, objective=seconds, lower_bound=min(proof.bound, seconds))
        best = with_chunks(self.program, self.dims, best, self.classes)
        return replace(best, certificate=proof.checked(self.job, certificate))

    def _problem(self, weights: Weights | None) -> BudgetProblem:
        return BudgetProblem.of(self.program, self.dims, self.classes, self.job, weights)

    def _add(self, plan: Plan) -> None:
        self.plans.append(predict(self.program, self.dims, plan, self.classes))
        self.features.append(step_features(self.program, self.dims, plan, self.classes))


@dataclass(frozen=True)
class _Found:
    """A plan, and what proves its bound: claims whose bounds add up, besides seconds that no plan avoids."""

    plan: Plan
    claims: Sequence[Claim]
    fixed: float

    @property
    def bound(self) -> float:
        """Seconds that no plan falls below."""
        return self.plan.certificate.lower_bound

    def checked(self, job: Job, certificate: Certificate) -> Certificate:
        """The certificate with a bound that was verified apart from the search, if that is asked for."""
        if not (job.search.check and self.claims) or requested():
            return certificate
        job.progress("checking the bound", certificate.objective, certificate.lower_bound)
        seconds = job.search.time_limit / len(self.claims)
        proved = self.fixed + sum(examine(claim, seconds) for claim in self.claims)
        return replace(certificate, checked=max(proved, 0.0))


def _search(problem: BudgetProblem) -> _Found:
    """The cheapest plan of one problem."""
    job, program, dims, classes = problem.job, problem.program, problem.dims, problem.classes
    # Roles of all axes leave so little open that any number of them is one problem.
    decided = all(roles_of(job.search.recipe, job.axes, job.search.roles)) and bool(job.restrictions.strategies)
    claims: Sequence[Claim]
    if decided or len(job.axes) <= EXACT_AXES:
        plan = plan_within(problem) if decided or len(job.axes) <= WITHIN_AXES else plan_by_products(problem)
        fixed = 0.0
        # Each is about all plans; of the plans for a stage's devices nothing is claimed.
        claims = [max(problem.claims, key=lambda claim: claim.bound)] if problem.claims else []
    else:
        machine, restrictions = problem.tables.machine, job.restrictions
        fixed, claims = bound_by_axes(program, dims, classes, machine, restrictions, problem.weights)
        plan = plan_by_axes(problem, fixed + sum(claim.bound for claim in claims))
    if problem.limits.expired():
        method = INTERRUPTED if requested() else TIME_LIMIT
        plan = replace(plan, certificate=replace(plan.certificate, method=method))
    return _Found(plan, claims, fixed)


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
