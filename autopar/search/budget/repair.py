"""`repaired`: memory repair. Where no plan of the search fits, the peak of its graph says what else to recompute.

Memory constraints are relaxations: they leave out live ranges of values that are recomputed, and program points other
than their own. So near the least memory that a model needs, a constraint that is tightened further leads to plans that
need more. There, what is saved is chosen for all program points at once (`autopar.search.budget.min_peak`); then the
peak of the plan's own graph is lowered, one live tensor after the other: it is recomputed instead of saved, or saved
instead of recomputed, or re-gathered per use instead of held between two uses. Each change is measured on its graph,
and the one with the lowest peak is taken.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from torch import fx

from autopar.costs.memory import format_bytes
from autopar.errors import InfeasibleError
from autopar.ir.graph import is_backward
from autopar.ir.plan import MEMORY_REPAIR, PER_USE, Certificate, Plan
from autopar.memory.peak_snapshot import PeakSnapshot
from autopar.memory.recompute import class_of, ranges
from autopar.search.budget.budget_problem import BudgetProblem, missing
from autopar.search.budget.lagrangian import fits
from autopar.search.budget.min_peak import min_peak_recomputation
from autopar.search.budget.pareto import Frontier
from autopar.search.emitted.peak import peak_snapshot_of
from autopar.search.formulation.memory_model import block_boundary_activations
from autopar.search.read_plan import plan_of
from autopar.search.solver.highs import requested
from autopar.search.solver.layer_mix import LayerMix
from autopar.search.solver.minimize import Limits
from autopar.sharding.factor_kinds import from_parameters

NEAR = 1.5
"""A plan that needs this multiple of the budget is not repaired one tensor at a time."""

ALMOST = 1.05
"""In a plan that needs at most this multiple of the budget, only single tensors are decided anew."""

EASIER = 2
"""How often a plan is tried that saves more than the min-peak plan of its layouts, where that one fits."""

ALWAYS = ("parameters", "optimizer", "buffers", "batch")
"""Held whatever is saved for the backward pass."""

SHARE = 0.5
"""Share of the time limit for changes of one plan."""

ENOUGH = 0.9
"""A change that frees this share of its tensor at the peak is taken at once, without trying the others."""

SMALL = 1e-3
"""Tensors smaller than this share of the peak are left as they are."""


Entry = tuple[str, int | None]
"""A name in a plan's ``recompute``, and one member of its class, or all of them."""


Measured = tuple[Plan, PeakSnapshot]
"""A plan, and the live tensors at the peak of its graph."""


def minimum_memory_plan(searched: BudgetProblem, certificate: Certificate) -> Plan:
    """The plan of least memory at the peak of two plans: the fastest, and the one that saves the least.

    An error that says how much memory would be enough must say the same for every budget that is too small. So where
    nothing fits, repair starts from this plan, and not from one that the search met on the way to its budget. Each
    operator works on as little as it can: what is moved for it is transient, and counts at its own program point only.
    A tiny Llama on 4 needs 83 KiB so, and 110 otherwise.

    Args:
        searched: what was searched; its budget makes no difference.
        certificate: of the plan, whose bound holds for all plans.

    Raises:
        InfeasibleError: the restrictions leave no plan.
    """
    job = searched.job
    limits = Limits(job.search.gap, time.monotonic() + job.search.time_limit / 2)
    memory = searched.states_and_activations(offload=False)
    built = searched.formulation(job.restrictions, memory)
    frontier = Frontier(built.problem, limits)
    if built.peak_point is not None:
        point = built.peak_point([frontier.free().labels, frontier.least().labels])
        built = searched.formulation(job.restrictions, replace(memory, point=point, working=0.0))
        frontier = Frontier(built.problem, limits)
    mix = LayerMix.of(frontier.least())
    return plan_of(searched.program, searched.dims, searched.classes, built, mix, certificate, job, searched.tables)


def _members(plan: Plan, name: str, count: Mapping[str, int]) -> set[int]:
    """The members of a class that are recomputed."""
    most = count[class_of(name)]
    return {i for start, stop in plan.recompute.get(name, ()) for i in range(start, min(stop, most))}


def _changed(plan: Plan, entries: Collection[Entry], recompute: bool, count: Mapping[str, int]) -> Plan:
    """The plan with some entries of ``recompute`` added, or removed.

    Args:
        plan: the plan.
        entries: in question.
        recompute: whether they are added.
        count: members of each class.
    """
    table = dict(plan.recompute)
    for name, member in sorted(entries, key=str):
        have = _members(plan, name, count) if member is not None else set()
        members = range(count[class_of(name)]) if member is None else (member,)
        have = have.union(members) if recompute else have.difference(members)
        table[name] = ranges(have, count[class_of(name)])
    return replace(plan, recompute={name: found for name, found in table.items() if found})


def repaired(searched: BudgetProblem, error: InfeasibleError, *, from_minimum: bool = False) -> Plan:
    """A plan that fits, made from the one that needs least of those found, or from the minimum-memory plan.

    What an error says would be enough must not depend on the budget that was asked for: with ``from_minimum`` it comes
    from `minimum_memory_plan`, which looks at no budget.

    Args:
        searched: what was searched.
        error: that says what was found.
        from_minimum: whether to start from the minimum-memory plan, too, where nothing else fits.

    Raises:
        InfeasibleError: none was found; of the plan that needs least.
    """
    plan: Plan | None = error.least
    budget = searched.job.memory
    # Repair changes what is recomputed, and nothing else: plans that offload are left as they are.
    if plan is None or budget is None or error.needed is None or plan.offload:
        raise error
    repair = _Repair(searched, budget)
    known: list[Measured] = []
    if error.needed <= NEAR * budget:
        known += repair.near(plan, repair.peak_snapshot(plan))
    if from_minimum and not any(fits(snapshot.totals[0], budget) for _, snapshot in known):
        known = repair.anew(minimum_memory_plan(searched, plan.certificate))
    if not known:
        raise error
    plan, now = min(known, key=_peak)
    if not fits(now.totals[0], budget):
        plan, now = repair.eased(plan, now)
    plan = replace(plan, predicted=replace(plan.predicted, peak_bytes=now.held))
    if not fits(now.totals[0], budget):
        raise missing(budget, plan)
    return plan


def _peak(measured: Measured) -> float:
    return measured[1].totals[0]


def costed(plan: Plan) -> Plan:
    """A plan that was changed since its search, with its predicted seconds as its objective."""
    seconds, known = plan.predicted.step_seconds, plan.certificate
    bound = min(known.lower_bound, seconds)
    own = replace(known, objective=seconds, lower_bound=bound, method=MEMORY_REPAIR, memory_price=0.0, checked=None)
    return replace(plan, certificate=own)


class _Repair:
    """How the peak of a plan is lowered to a budget, under the pins of a search.

    Attributes:
        free: classes of operators that may be recomputed.
        moved: classes of values that may be re-gathered.
        outputs: of each class that is read.
        by_name: node of each name, and its number among the members of its class.
        number: of each node among the members of its class.
    """

    def __init__(self, searched: BudgetProblem, budget: float) -> None:
        self.searched, self.budget = searched, budget
        self.program, self.classes = program, classes = searched.program, searched.classes
        search = searched.job.search
        forward = {n for n in program.sources if not is_backward(n)}
        allowed = {
            "search": forward - block_boundary_activations(program, classes),
            "regather": forward & from_parameters(program),
            "none": set[fx.Node](),
        }[search.recompute]
        if search.regions:
            allowed -= program.pins.keys()
        fixed = {classes.key[n] for n in forward - allowed}  # members of a class share the choice
        self.free = {classes.key[n] for n in allowed - program.microbatch_invariant} - fixed
        parameters = {classes.key[n] for n in program.placeholders} if search.recompute != "none" else set()
        self.moved = self.free | parameters
        self.outputs: dict[str, list[int]] = defaultdict(list)
        for key, out in classes.uses:
            self.outputs[key].append(out)
        self.by_name = {n.name: (n, i) for members in classes.members.values() for i, n in enumerate(members)}
        self.number = {node: i for node, i in self.by_name.values()}

    def peak_snapshot(self, plan: Plan) -> PeakSnapshot:
        """The live tensors at the peak of a plan's graph."""
        return peak_snapshot_of(self.program, plan, self.classes)

    def near(self, plan: Plan, now: PeakSnapshot) -> list[Measured]:
        """A plan slightly over the budget, repaired one tensor at a time; or with all chosen anew, if that helps."""
        chosen = [] if fits(now.totals[0], ALMOST * self.budget) else self.chosen(plan)
        return [self.eased(*min([(plan, now), *chosen], key=_peak))]

    def anew(self, plan: Plan) -> list[Measured]:
        """The plan with what it saves chosen anew, and as it is: what is chosen does not count what is transient."""
        return [(plan, self.peak_snapshot(plan)), *found] if (found := self.chosen(plan)) else []

    def chosen(self, plan: Plan) -> list[Measured]:
        """The plan with what it saves chosen anew: for the least peak, or, where that fits, as much as fits."""
        if self.program.repeat is not None or requested():
            return []
        least = self._min_peak(plan)
        if least is None:
            return []
        found = [self._best_per_use(least)]
        held = found[0][1].held
        room = self.budget - sum(size for name, size in held.items() if name in ALWAYS)
        slack = 0.0
        # The program of live ranges leaves out what is transient. So its budget is lowered by what the graph of its
        # last choice needed too much.
        while fits(_peak(found[0]), self.budget) and len(found) <= EASIER:
            more = self._min_peak(plan, room - slack)
            easier = self._best_per_use(more) if more is not None else found[0]
            if fits(_peak(easier), self.budget):
                return [easier]
            found.append(easier)
            slack += _peak(easier) - self.budget
        return found

    def _min_peak(self, plan: Plan, enough: float = 0.0) -> Plan | None:
        """The plan with another choice of what is saved; bytes of activations below ``enough`` are not looked for."""
        problem = self.searched
        return min_peak_recomputation(
            problem.program, problem.dims, problem.classes, plan, self.free, self.moved, enough
        )

    def _best_per_use(self, plan: Plan) -> Measured:
        """The plan; or, if it does not fit, the same with re-gathering per use, if that helps."""
        found = [(plan, self.peak_snapshot(plan))]
        if not fits(_peak(found[0]), self.budget):
            each = {PER_USE + name: r for name, r in plan.recompute.items() if name.startswith("consumer ")}
            per_use = replace(plan, recompute={**plan.recompute, **each})
            found.append((per_use, self.peak_snapshot(per_use)))
        return min(found, key=_peak)

    def eased(self, plan: Plan, now: PeakSnapshot) -> Measured:
        """A plan repaired one tensor at a time, until it fits or nothing helps."""
        # For one plan: the caller may have several, and later steps need time, too.
        deadline = time.monotonic() + SHARE * self.searched.job.search.time_limit
        while not fits(now.totals[0], self.budget):
            best: Measured | None = None
            for size, changed in self._changes(plan, now):
                if time.monotonic() > deadline or requested():
                    break
                found = self.peak_snapshot(changed)
                # All totals, the largest first: to lower one of two equal peaks is progress, too.
                if found.totals < (best[1].totals if best else now.totals):
                    best = changed, found
                    if now.totals[0] - found.totals[0] >= ENOUGH * size:
                        break
            if best is None:
                break
            plan, now = best
            phase = f"peak {format_bytes(now.totals[0])}, memory repair"
            self.searched.job.progress(phase, plan.certificate.objective, 0.0)
        return plan, now

    def _changes(self, plan: Plan, now: PeakSnapshot) -> Iterator[tuple[float, Plan]]:
        """Plans whose peak may be lower: the largest tensors first, in all layers and in one.

        Yields:
            Bytes of the tensor that is saved or recomputed instead, and the plan.
        """
        seen: set[frozenset[Entry]] = set()
        live = [(t, *self.by_name[t.name]) for t in now.tensors if t.name in self.by_name]
        saved = {node for tensor, node, _ in live if not tensor.recomputed and not tensor.moved}
        for tensor, node, _ in sorted(live, key=lambda t: -t[0].size):
            if tensor.size < SMALL * now.totals[0]:
                break
            several = self.program.repeat is None and self.classes.count[self.classes.key[node]] > 1
            for one in (False, True) if several else (False,):
                per_use = self._per_use(node, plan, one) if tensor.recomputed and tensor.moved else frozenset[Entry]()
                if tensor.recomputed:
                    entries = self._saved_instead(node, plan, one)
                else:
                    entries = self._recomputed_instead(node, plan, saved, one)
                for found, recompute in ((per_use, True), (entries, not tensor.recomputed)):
                    if found and found not in seen:
                        seen.add(found)
                        yield tensor.size, _changed(plan, found, recompute, self.classes.count)

    def _per_use(self, node: fx.Node, plan: Plan, one: bool) -> frozenset[Entry]:
        """What to re-gather per use, where a re-gathered value is held until its next use."""
        moved = [
            e for e in self._entries(node, plan, one) if e[0].startswith("consumer ") and self._recomputes(e, plan)
        ]
        each = ((PER_USE + name, member) for name, member in moved)
        return frozenset(e for e in each if not self._recomputes(e, plan))

    def _saved_instead(self, node: fx.Node, plan: Plan, one: bool) -> frozenset[Entry]:
        """What is no longer recomputed where a value is saved."""
        return frozenset(e for e in self._entries(node, plan, one) if self._recomputes(e, plan))

    def _recomputed_instead(self, node: fx.Node, plan: Plan, saved: Collection[fx.Node], one: bool) -> frozenset[Entry]:
        """What else to recompute or re-gather with a value: its inputs, unless they are live or recomputed already."""
        found: set[fx.Node] = set()
        entries = set(self._entries(node, plan, one))  # all that there is of an input
        waiting = [node]
        while waiting:
            last = waiting.pop()
            key, member = self.classes.key[last], self.number[last] if one else None
            live = (last is not node and last in saved) or self._recomputes((key, member), plan)
            if last in found or live or key not in self.free:
                continue
            found.add(last)
            entries.update(self._entries(last, plan, one))
            for source, _ in self.program.sources[last]:
                entries.update(e for e in self._entries(source, plan, one) if e[0].startswith("consumer "))
                waiting.append(source)
        return frozenset(e for e in entries if not self._recomputes(e, plan))

    def _recomputes(self, entry: Entry, plan: Plan) -> bool:
        """Whether a plan's ``recompute`` names an entry already."""
        name, member = entry
        return name in plan.recompute if member is None else member in _members(plan, name, self.classes.count)

    def _entries(self, node: fx.Node, plan: Plan, one: bool) -> Iterator[Entry]:
        """Those of what an operator computes, and of its consumer layouts."""
        key, member = self.classes.key[node], self.number[node] if one else None
        if key in self.free:
            yield key, member
        for out in self.outputs.get(key, ()) if key in self.moved else ():
            if f"{key} {out}" in plan.consumer_layouts:
                yield f"consumer {key} {out}", member
