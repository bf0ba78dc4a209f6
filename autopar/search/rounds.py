"""`Rounds`: searches under several weights of kernels and communication, and the best plan of all."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from autopar.errors import InfeasibleError
from autopar.ir.plan import BY_AXES, INTERRUPTED, LAGRANGIAN, TIME_LIMIT, Certificate, Plan
from autopar.ir.program import Program
from autopar.search.axis_by_axis import blocks_of, bound_by_axes
from autopar.search.budget.budget_problem import BudgetProblem
from autopar.search.budget.cutoff import NO_CUTOFF, Cutoff, PrunedError
from autopar.search.budget.pareto import Frontier
from autopar.search.budget.within_budget import plan_by_axes, plan_within
from autopar.search.emitted.seconds import simulated_seconds
from autopar.search.formulation.build import Formulation
from autopar.search.formulation.memory_model import MemoryModel
from autopar.search.formulation.recipes import roles_of
from autopar.search.options import Job
from autopar.search.overlap.combine import combined
from autopar.search.overlap.launches import least_launching
from autopar.search.overlap.step_time import Floats, step_time_of
from autopar.search.overlap.weights import Weights
from autopar.search.predict import predict, step_features
from autopar.search.solver.certify import Claim
from autopar.search.solver.duals import examine
from autopar.search.solver.highs import requested
from autopar.search.solver.layer_mix import LayerMix
from autopar.search.solver.problem import Ints, locate
from autopar.sharding.dims import Dims
from autopar.sharding.layer_classes import LayerClasses

EXACT_AXES = 3
"""Layouts on up to this many axes, and what is saved, are one problem; those on more are searched pair by pair."""

ROUNDS, ROUNDS_WITHIN = 8, 4
"""At most so many weights of kernels and communication are tried; where a budget binds, the second."""

CLOSE, FAR = 3e-3, 0.1
"""A plan is good enough if at most this share of its time is above the bound of any weights; the second where a budget
binds, of which each search takes long, and for the stages of pipelines, of which there are many."""

MOST_COMBINED = 40
"""Labelings of which one is made up: the fastest."""

NEAR, SIMULATED = 1.05, 4
"""Of the plans that take at most this multiple of the best one's time, so many are simulated."""


class Rounds:
    """Searches under several weights, for plans whose collectives run beside kernels, and the best of all.

    The time of a plan is a maximum of sums. Under any weights of these, the cheapest plan bounds the time of all:
    first under weights by which all is hidden that can be, then under those by which all plans that are known cost
    much. Chunks of products hide less than they could: where that makes a difference, what they could hide is in
    the bound alone, and later plans are searched in one piece, and compared as they are cut.
    """

    def __init__(
        self, program: Program, dims: Dims, job: Job, classes: LayerClasses, placed: dict[str, tuple[Any, ...]]
    ) -> None:
        """``placed`` gets what variables do in the last plan that some of the axes were searched for."""
        self.placed = placed
        self.program, self.dims, self.job, self.classes = program, dims, job, classes
        self.left = job.search.time_limit / 2
        self.deadline = time.monotonic() + self.left
        self.plans: list[Plan] = []
        self.found: list[tuple[Found, Weights]] = []
        self.cuts: list[Mapping[str, Floats]] = []
        self.labelings: dict[bytes, tuple[Ints, Mapping[str, Floats]]] = {}
        self.built: Formulation | None = None
        self.proven: Found | None = None
        self.raised: Claim | None = None
        self.claims: list[Claim] = []  # of all plans, by the first search

    def first(self) -> Plan:
        """The first plan, with its bound of all.

        Raises:
            InfeasibleError: nothing fits.
        """
        job, begun = self.job, time.monotonic()
        self.deadline = begun + self.left
        if _is_many(job) and job.stages is None:
            self.search_largest()
        # The bound of a stage is that of any memory.
        self.search(self.all_hidden if job.stages is None else replace(self.all_hidden, chunks=False))
        self.left = max(0.0, self.deadline - time.monotonic())
        return replace(self.best, certificate=as_predicted(self.best, self.proof))

    def rest(self, cutoff: Cutoff | None) -> Plan:
        """The best plan; without a cutoff that of the first search.

        Raises:
            PrunedError: none takes less than the cutoff.
        """
        self.deadline = time.monotonic() + self.left
        if cutoff is None or self.is_decided:
            return self.result()
        self.job = replace(self.job, cutoff=cutoff)
        if self.job.stages is not None or self.job.rough:
            # Pipelines are many, and the best is simulated whatever the search says. Their graphs are short: what all
            # of a step could hide is often not hidden.
            if self.job.graphs > 1 and self.above_cost(FAR) and self.go_on(FAR):
                self.apart()
            return self.result()
        # Its bound is raised already. Further searches found the same plans of Llamas that are near it; a tiny GPT-2 on
        # 4, far from it, takes 1.2 ms with them and 3.2 without. On one axis they take a second, and two layers on 8
        # take 461 ms within 7 GiB with them and 475 without, 4% above the bound.
        near = CLOSE if len(self.job.axes) == 1 else FAR
        if self.best.certificate.binds and not self.above_bound(near):
            return self.result()
        if self.cut_in_vain():
            self.in_one_piece()
        if self.go_on():
            self.apart()
        self.search_on()
        if self.proven is None and self.cut_in_vain() and self.go_on():
            self.in_one_piece()
            self.search_on()
        if self.go_on() and self.sent_in_vain():
            self.one_by_one()
        if self.above_bound(CLOSE):
            self.combine()
        return self.result()

    @property
    def all_hidden(self) -> Weights:
        """Weights that price communication only where nothing can hide it."""
        axes = self.job.axes
        sizes, links = tuple(axes.values()), self.job.cluster.link_for(axes)
        return Weights(step_time_of(self.program, sizes, links, self.job.graphs))

    @property
    def is_decided(self) -> bool:
        """Whether all operators' strategies are, as for a batch of another length: other weights find the same plan."""
        known = self.job.restrictions.strategies
        operators = (key for key, members in self.classes.members.items() if members[0] in self.dims.operators)
        return all(names is not None and len(names) == 1 for key in operators for names in known.get(key, (None,)))

    @property
    def proof(self) -> Found:
        """The search with the highest bound of all plans; once they are searched in one piece, the one before that."""
        return self.proven or max(self.found, key=lambda each: each[0].bound)[0]

    @property
    def bound(self) -> float:
        """The highest bound of the plans that are searched now."""
        return max(found.bound for found, _ in self.found)

    @property
    def strongest(self) -> Weights:
        """The weights with the highest bound."""
        return max(self.found, key=lambda each: each[0].bound)[1]

    @property
    def best(self) -> Plan:
        """The fastest plan; of those for which the device waits for the host as long, that which leaves it more."""
        return min(self.plans, key=lambda plan: (plan.predicted.step_seconds, plan.predicted.device_seconds))

    def search(self, weights: Weights) -> None:
        """Search under some weights.

        Raises:
            InfeasibleError: nothing fits.
        """
        # Once: it takes the weights as far as they go, and later searches are for other plans.
        raise_bound = None if self.found else partial(self.price_memory, weights)
        problem = replace(
            self._problem(weights), start=self._cheapest(weights), raise_bound=raise_bound, placed=self.placed
        )
        self.claims = self.claims or problem.claims  # which grows, whether anything is found or not
        found = search_once(problem)
        if self.raised is not None and self.raised.bound > found.bound:
            known = replace(found.plan.certificate, lower_bound=self.raised.bound)
            found = replace(found, plan=replace(found.plan, certificate=known), claims=[self.raised])
        self.found.append((found, weights))
        self.plans.append(self._predicted(found.plan))
        if found.plan.certificate.binds or not self._look_at(problem):
            self.cuts.append(self._features(found.plan))

    def search_on(self) -> None:
        """Search under weights by which the plans that are known cost much, as long as that gains something."""
        few = ROUNDS_WITHIN if self.best.certificate.binds else ROUNDS
        while self.go_on() and len(self.found) < few:
            weights, most = self.strongest.at_level(self.cuts, self.bound)
            if most - self.bound < CLOSE * most:  # no weights have a much higher bound
                break
            bound, seconds = self.bound, self.best.predicted.device_seconds
            try:
                self.search(weights)
            except PrunedError:
                # These weights are about all plans, so that none is much faster than the one known before.
                if self.proven is None and self.best.predicted.step_seconds >= self.job.cutoff.enough:
                    raise
                break
            except InfeasibleError:
                break
            gained = max(self.bound - bound, seconds - self.best.predicted.device_seconds)
            # What memory costs is not a matter of weights, and each round searches it anew.
            if self.found[-1][0].plan.certificate.method == LAGRANGIAN and gained < CLOSE * seconds:
                break

    def search_largest(self) -> None:
        """Search the largest axes alone, which are one problem: the others are added pair by pair."""
        job = self.job
        if job.memory is not None and not self._problem(None).ample:
            return
        part = replace(
            job,
            restrictions=replace(job.restrictions, free=blocks_of(tuple(job.axes.values()), EXACT_AXES)[0]),
            search=replace(job.search, time_limit=job.search.time_limit / 2, check=False),
            cutoff=NO_CUTOFF,  # its bounds are not about all plans
        )
        with suppress(InfeasibleError):
            rounds = Rounds(self.program, self.dims, part, self.classes, self.placed)
            rounds.first()
            plan = rounds.rest(NO_CUTOFF)
            # What closed that search says nothing of all axes.
            self.plans.append(replace(plan, certificate=replace(plan.certificate, method=BY_AXES)))

    def cut_in_vain(self) -> bool:
        """Whether most of what the best plan takes above the bound is what chunks could hide, and do not."""
        step, best = self.strongest.step, self.best
        whole, most = (step.seconds(self._features(best, chunks=chunks)) for chunks in (False, True))
        seconds, lost = best.predicted.device_seconds, whole - most - best.predicted.chunked_seconds
        return lost > max(CLOSE * seconds, (seconds - self.bound) / 2)

    def sent_in_vain(self) -> bool:
        """Whether the search counts less for other plans than the best one takes: of messages it counts shares."""
        step, seconds = self.all_hidden.step, self.best.predicted.device_seconds
        return any(step.seconds(own) < (1 - CLOSE) * seconds for _, own in self.labelings.values())

    def price_memory(self, weights: Weights, memory: MemoryModel, frontier: Frontier) -> float:
        """The highest bound of weights and of prices of memory, which are chosen together.

        One price under other weights takes one minimization, a tenth of a search within the budget; and the plans next
        to the budget say nearly all of what weights do.

        Args:
            weights: of the first search.
            memory: how it counts memory, which holds for all plans.
            frontier: what it found.
        """
        budget, problem = self.job.memory, self._problem(weights)
        assert budget is not None
        claim, points = frontier.claim(budget), frontier.next_to(budget)
        built, price = problem.formulation(self.job.restrictions, memory), claim.price
        cuts, excess = [], []
        for _ in range(ROUNDS):
            for point in points:
                plan = problem.plan(built, LayerMix.of(point), claim.bound, LAGRANGIAN)
                cuts.append(self._features(plan))
                excess.append(point.memory - budget)
            tried, trial_price, most = weights.at_level_with_memory(cuts, claim.bound, excess, price)
            if most - claim.bound < CLOSE * most or time.monotonic() > self.deadline:
                break
            problem = self._problem(tried)
            built = problem.formulation(self.job.restrictions, memory)
            found = Frontier(built.problem, problem.limits)
            points = [found.cheapest(trial_price)]
            self.job.progress("price of memory", self.job.cutoff.seconds, found.bound(budget))
            if found.bound(budget) > claim.bound:
                weights, price, claim = tried, trial_price, found.claim(budget)
                self.raised = claim
                self.job.cutoff.require_less(claim.bound)
        return claim.bound

    def in_one_piece(self) -> None:
        """Search as if products and collectives were not cut into chunks, from here on."""
        self.proven = self.proof
        weights, plan = self.strongest, self.best
        self.found, self.cuts, self.labelings, self.built = [], [self._features(plan)], {}, None
        with suppress(InfeasibleError):
            self.search(replace(weights, chunks=False))
        if not self.found:  # nothing is faster than the cutoff
            self.found.append((self.proven, weights))

    def apart(self) -> None:
        """Search as if nothing was hidden: the plan that sends least may be the best of all."""
        self._search_as_if(None)

    def one_by_one(self) -> None:
        """Search as if units of parameters had messages of their own.

        Plans that send a few of those that a message has room for take longer than the search counts.
        """
        weights = self.strongest
        self._search_as_if(replace(weights, step=replace(weights.step, limits=())))

    def _search_as_if(self, weights: Weights | None) -> None:
        """Search for a plan alone: the bound is none of all plans."""
        problem = self._problem(weights)
        try:
            plan = search_once(problem).plan
        except InfeasibleError:
            return
        ahead, enough = problem.within(replace(plan, overlap=True))
        plan = self._predicted(ahead if enough else plan)
        self.plans.append(plan)
        if plan.certificate.binds or self.built is None or not self._look_at(problem):
            self.cuts.append(self._features(plan))

    def combine(self) -> None:
        """Look at the fastest labeling that those known make up, if it is faster than any of them."""
        built, step = self.built, self.all_hidden.step
        if built is None or built.spent is None or len(self.labelings) < 2:
            return
        known = sorted(self.labelings.values(), key=lambda each: step.seconds(each[1]))
        pool = [labels for labels, _ in known[:MOST_COMBINED]]
        labels = combined(built.problem, built.spent, step, pool, max(1.0, self.deadline - time.monotonic()))
        if labels is None:
            return
        problem = self._problem(self.strongest)
        problem.met.append((built, labels))
        self._look_at(problem)

    def above_bound(self, share: float) -> bool:
        """Whether more than a share of the best plan's time is above the bound of the plans that are searched."""
        seconds = self.best.predicted.device_seconds
        return seconds - self.bound > share * seconds

    def above_cost(self, share: float) -> bool:
        """Whether more than a share of the best plan's time is above what the last search counts for its own."""
        seconds = self.best.predicted.device_seconds
        return seconds - self.found[-1][0].plan.certificate.objective > share * seconds

    def go_on(self, close: float = CLOSE) -> bool:
        """Whether the best plan may be further from the best there is, and there is time."""
        self.job.progress("communication behind kernels", self.best.predicted.step_seconds, self.proof.bound)
        return self.above_bound(close) and time.monotonic() < self.deadline

    def result(self) -> Plan:
        """The best plan, with the highest bound; of several that are close, that which the simulator finds fastest."""
        best, proof = self.best, self.proof
        close = {
            p.predicted.step_seconds: p
            for p in self.plans
            if p.predicted.step_seconds < NEAR * best.predicted.step_seconds
        }
        if len(close) > 1 and self.job.graphs == 1:  # graphs of stages are simulated anyway
            few = [close[seconds] for seconds in sorted(close)[:SIMULATED]]
            self.job.progress(f"simulating {len(few)} plans", best.predicted.step_seconds, proof.bound)
            best = min(few, key=lambda plan: simulated_seconds(self.program, plan, self.classes))
        # The best plan may be one that was found as if nothing was hidden.
        certificate = proof.checked(self.job, as_predicted(best, proof))
        return self._problem(None).with_peak(replace(best, certificate=certificate))

    def _problem(self, weights: Weights | None) -> BudgetProblem:
        return BudgetProblem.of(self.program, self.dims, self.classes, self.job, weights)

    def _predicted(self, plan: Plan) -> Plan:
        return predict(self.program, self.dims, plan, self.classes, graphs=self.job.graphs)

    def _features(self, plan: Plan, chunks: bool | None = None) -> Mapping[str, Floats]:
        """By default as plans are searched now: of stages, and since `in_one_piece`, without chunks."""
        if chunks is None:
            chunks = self.proven is None and self.job.stages is None
        return step_features(self.program, self.dims, plan, self.classes, chunks=chunks)

    def _cheapest(self, weights: Weights) -> Ints | None:
        """The labeling of those known that costs least under some weights."""
        known = [(sum(float(weights.prices(r) @ own) for r, own in features.items()), n, labels)
                 for n, (labels, features) in enumerate(self.labelings.values())]  # fmt: skip
        return min(known, default=(0.0, 0, None))[2]

    def _look_at(self, problem: BudgetProblem) -> bool:
        """Labelings that a search met on its way are cuts as well, and the fastest of them may be a better plan.

        Whether it met any whose features are known.
        """
        step, fastest = self.all_hidden.step, self.best.predicted.device_seconds
        better: tuple[Formulation, Ints] | None = None
        for built, labels in problem.met:
            self.built = self.built or built
            if self.built.features is None or labels.tobytes() in self.labelings:
                continue
            # The same labels are the same plan under all weights.
            features = self.built.features(labels)
            self.labelings[labels.tobytes()] = labels, features
            self.cuts.append(features)
            seconds = step.seconds(features)
            if seconds < fastest:
                fastest, better = seconds, (built, labels)
        if better is not None:
            built, labels = better
            known, mix = self.proof, LayerMix.of(locate(built.problem, labels))
            plan = problem.plan(built, mix, known.bound, known.plan.certificate.method)
            plan, enough = problem.within(replace(plan, overlap=True))
            self.plans += [self._predicted(plan)] * enough
        return bool(problem.met) and self.built is not None and self.built.features is not None


@dataclass(frozen=True)
class Found:
    """A plan, and what proves its bound: claims whose bounds add up, besides seconds that no plan avoids.

    Attributes:
        plan: what was found.
        claims: about seconds of the device.
        fixed: seconds of the device that no plan avoids.
        launching: seconds in which the host launches kernels, see `least_launching`.
    """

    plan: Plan
    claims: Sequence[Claim]
    fixed: float
    launching: float

    @property
    def bound(self) -> float:
        """Seconds of the device that no plan falls below."""
        return self.plan.certificate.lower_bound

    def checked(self, job: Job, certificate: Certificate) -> Certificate:
        """The certificate with a bound that was verified apart from the search, if that is asked for."""
        if not (job.search.check and self.claims) or requested():
            return certificate
        job.progress("checking the bound", certificate.objective, certificate.lower_bound)
        seconds = job.search.time_limit / len(self.claims)
        proved = self.fixed + sum(examine(claim, seconds) for claim in self.claims)
        return replace(certificate, checked=max(proved, min(self.launching, certificate.objective)))


def _is_many(job: Job) -> bool:
    """Whether so many axes are searched that they are no one problem."""
    # Roles of all axes leave so little open that any number of them is one problem.
    decided = all(roles_of(job.search.recipe, job.axes, job.search.roles)) and bool(job.restrictions.strategies)
    free = job.restrictions.free
    return not decided and len(job.axes if free is None else free) > EXACT_AXES


def search_once(problem: BudgetProblem) -> Found:
    """The cheapest plan of one problem."""
    job, program, dims, classes = problem.job, problem.program, problem.dims, problem.classes
    claims: Sequence[Claim]
    if not _is_many(job):
        plan = plan_within(problem)
        fixed = 0.0
        # Each is about all plans; of the plans for a stage's devices nothing is claimed.
        claims = [max(problem.claims, key=lambda claim: claim.bound)] if problem.claims else []
    else:
        machine, restrictions = problem.tables.machine, job.restrictions
        fixed, claims = bound_by_axes(
            program, dims, classes, machine, restrictions, problem.weights,
            together=EXACT_AXES, time_limit=problem.seconds / 2,
        )  # fmt: skip
        plan = plan_by_axes(problem, fixed + sum(claim.bound for claim in claims))
    if problem.limits.expired():
        method = INTERRUPTED if requested() else TIME_LIMIT
        plan = replace(plan, certificate=replace(plan.certificate, method=method))
    return Found(plan, claims, fixed, least_launching(program, dims, classes, job.cluster.device))


def as_predicted(plan: Plan, proof: Found) -> Certificate:
    """The plan's certificate: its own seconds, which are at least those that the search counts, and a bound of all."""
    seconds, known = plan.predicted.step_seconds, proof.plan.certificate
    bound = min(max(proof.bound, proof.launching), seconds)
    return replace(plan.certificate, objective=seconds, lower_bound=bound, space=known.space)
