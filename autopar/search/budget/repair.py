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
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from autopar.costs.memory import format_bytes
from autopar.errors import InfeasibleError
from autopar.ir.graph import is_backward
from autopar.ir.plan import MEMORY_REPAIR, PER_USE, Plan
from autopar.ir.program import Program
from autopar.memory.peak_snapshot import PeakSnapshot
from autopar.memory.recompute import class_of, ranges
from autopar.search.budget.budget_problem import missing
from autopar.search.budget.lagrangian import fits
from autopar.search.budget.min_peak import Choice, min_peak_recomputation
from autopar.search.budget.minimum_memory import minimum_memory_plan
from autopar.search.formulation.memory_model import block_boundary_activations
from autopar.search.options import Job
from autopar.search.peak import peak_snapshot_of
from autopar.search.solver.interrupt import requested
from autopar.sharding.dims import Dims
from autopar.sharding.factor_kinds import from_parameters
from autopar.sharding.layer_classes import LayerClasses

NEAR = 1.5
"""A plan that needs this multiple of the budget is not repaired one tensor at a time."""

ALMOST = 1.05
"""In a plan that needs at most this multiple of the budget, only single tensors are decided again."""

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


@dataclass(frozen=True)
class _Change:
    """Entries that come or go, and the bytes of the tensor that they are about."""

    size: float
    entries: frozenset[Entry]
    again: bool

    def of(self, plan: Plan, count: Mapping[str, int]) -> Plan:
        table = dict(plan.recompute)
        for name, member in sorted(self.entries, key=str):
            have = _members(plan, name, count) if member is not None else set()
            members = range(count[class_of(name)]) if member is None else (member,)
            have = have.union(members) if self.again else have.difference(members)
            table[name] = ranges(have, count[class_of(name)])
        return replace(plan, recompute={name: found for name, found in table.items() if found})


def _members(plan: Plan, name: str, count: Mapping[str, int]) -> set[int]:
    """The members of a class that are recomputed."""
    most = count[class_of(name)]
    return {i for start, stop in plan.recompute.get(name, ()) for i in range(start, min(stop, most))}


def repaired(
    program: Program,
    dims: Dims,
    classes: LayerClasses,
    job: Job,
    error: InfeasibleError,
    *,
    from_minimum: bool = False,
) -> Plan:
    """A plan that fits, made from the one that needs least of those found, or from the minimum-memory plan.

    What an error says would be enough must not depend on the budget that was asked for: with ``from_minimum`` it comes
    from `minimum_memory_plan`, which looks at no budget.

    Args:
        program: that was searched.
        dims: its dimension analysis.
        classes: which nodes share a decision.
        job: what it was searched for.
        error: that says what was found.
        from_minimum: whether to start from the minimum-memory plan, too, where nothing else fits.

    Raises:
        InfeasibleError: none was found; of the plan that needs least.
    """
    plan: Plan | None = error.least
    budget = job.memory
    if plan is None or budget is None or error.needed is None or plan.offload:
        raise error
    repair = _Repair(program, dims, classes, job, budget)
    known: list[tuple[Plan, PeakSnapshot]] = []
    if error.needed <= NEAR * budget:
        known += repair.near(plan, repair.peak_snapshot(plan))
    if from_minimum and not any(fits(held.totals[0], budget) for _, held in known):
        start = minimum_memory_plan(program, dims, job, classes)
        known = repair.chosen(replace(start, certificate=plan.certificate))  # the search's bound holds for it, too
    if not known:
        raise error
    plan, now = min(known, key=lambda found: found[1].totals[0])
    if not fits(now.totals[0], budget):
        plan, now = repair.eased(plan, now)
    plan = replace(plan, predicted=replace(plan.predicted, peak_bytes=now.held))
    if not fits(now.totals[0], budget):
        raise missing(budget, plan)
    return plan


@dataclass(frozen=True)
class _Repair:
    """How the peak of a plan is lowered to a budget."""

    program: Program
    dims: Dims
    classes: LayerClasses
    job: Job
    budget: float

    def peak_snapshot(self, plan: Plan) -> PeakSnapshot:
        """The live tensors at the peak of a plan's graph."""
        return peak_snapshot_of(self.program, plan, self.classes)

    @cached_property
    def changes(self) -> _Changes:
        return _Changes(self.program, self.classes, self.job)

    def near(self, plan: Plan, now: PeakSnapshot) -> list[tuple[Plan, PeakSnapshot]]:
        """A plan slightly over the budget, repaired one tensor at a time; or with all chosen again, if that helps."""
        chosen = [] if fits(now.totals[0], ALMOST * self.budget) else self.chosen(plan)
        return [self.eased(*min([(plan, now), *chosen], key=lambda found: found[1].totals[0]))]

    def chosen(self, plan: Plan) -> list[tuple[Plan, PeakSnapshot]]:
        """The plan with what it saves chosen again: for the least peak, or, where that fits, as much as fits."""
        if self.program.repeat is not None or requested():
            return []
        choice = Choice(self.changes.free, self.changes.moved)
        least = min_peak_recomputation(self.program, self.dims, self.classes, plan, choice)
        if least is None:
            return []
        found = self._for_each(least)
        held = found[0][1].held
        room = self.budget - sum(size for name, size in held.items() if name in ALWAYS)
        slack = 0.0
        while fits(found[0][1].totals[0], self.budget) and len(found) <= EASIER:
            more = min_peak_recomputation(self.program, self.dims, self.classes, plan, choice, room - slack)
            easier = self._for_each(more) if more is not None else found
            if fits(easier[0][1].totals[0], self.budget):
                return easier
            found += easier
            slack += easier[0][1].totals[0] - self.budget
        return found

    def _for_each(self, plan: Plan) -> list[tuple[Plan, PeakSnapshot]]:
        """The plan; or, if it does not fit, the same with re-gathering per use, if that helps."""
        found = [(plan, self.peak_snapshot(plan))]
        if not fits(found[0][1].totals[0], self.budget):
            each = {PER_USE + name: r for name, r in plan.recompute.items() if name.startswith("consumer ")}
            apart = replace(plan, recompute={**plan.recompute, **each})
            found.append((apart, self.peak_snapshot(apart)))
        return [min(found, key=lambda known: known[1].totals[0])]

    def eased(self, plan: Plan, now: PeakSnapshot) -> tuple[Plan, PeakSnapshot]:
        """A plan repaired one tensor at a time, until it fits or nothing helps."""
        deadline = time.monotonic() + SHARE * self.job.search.time_limit
        while not fits(now.totals[0], self.budget):
            best: tuple[PeakSnapshot, _Change] | None = None
            for change in self.changes.of(plan, now):
                if time.monotonic() > deadline or requested():
                    break
                found = self.peak_snapshot(change.of(plan, self.classes.count))
                if found.totals < (best[0].totals if best else now.totals):
                    best = found, change
                    if now.totals[0] - found.totals[0] >= ENOUGH * change.size:
                        break
            if best is None:
                break
            now, plan = best[0], best[1].of(plan, self.classes.count)
            self.job.progress(f"peak {format_bytes(now.totals[0])}, memory repair", plan.certificate.objective, 0.0)
        return plan, now


def costed(plan: Plan) -> Plan:
    """A plan that was changed since its search, with its predicted seconds as its objective."""
    seconds, known = plan.predicted.step_seconds, plan.certificate
    bound = min(known.lower_bound, seconds)
    own = replace(known, objective=seconds, lower_bound=bound, method=MEMORY_REPAIR, memory_price=0.0, checked=None)
    return replace(plan, certificate=own)


class _Changes:
    """What may be saved or recomputed, under the pins of a search."""

    def __init__(self, program: Program, classes: LayerClasses, job: Job) -> None:
        self.program, self.classes = program, classes
        forward = {n for n in program.sources if not is_backward(n)}
        allowed = {
            "search": forward - block_boundary_activations(program, classes),
            "regather": forward & from_parameters(program),
            "none": set[fx.Node](),
        }[job.search.recompute]
        if job.search.regions:
            allowed -= program.pins.keys()
        fixed = {classes.key[n] for n in forward - allowed}
        self.free = {classes.key[n] for n in allowed - program.microbatch_invariant} - fixed
        moved = {classes.key[n] for n in program.placeholders} if job.search.recompute != "none" else set()
        self.moved = self.free | moved
        self.outputs: dict[str, list[int]] = defaultdict(list)
        for key, out in classes.uses:
            self.outputs[key].append(out)
        self.by_name = {n.name: (n, i) for members in classes.members.values() for i, n in enumerate(members)}
        self.number = {node: i for node, i in self.by_name.values()}

    def of(self, plan: Plan, peak_snapshot: PeakSnapshot) -> Iterator[_Change]:
        """Changes that may lower the peak: the largest tensors first, in all layers and in one."""
        seen: set[frozenset[Entry]] = set()
        there = [(t, *self.by_name[t.name]) for t in peak_snapshot.tensors if t.name in self.by_name]
        held = {node for tensor, node, _ in there if not tensor.recomputed and not tensor.moved}
        for tensor, node, _ in sorted(there, key=lambda t: -t[0].size):
            if tensor.size < SMALL * peak_snapshot.totals[0]:
                break
            alone = self.program.repeat is None and self.classes.count[self.classes.key[node]] > 1
            for one in (False, True) if alone else (False,):
                each = self._each(node, plan, one) if tensor.recomputed and tensor.moved else frozenset[Entry]()
                found = self._kept(node, plan, one) if tensor.recomputed else self._again(node, plan, held, one)
                for entries, again in ((each, True), (found, not tensor.recomputed)):
                    if entries and entries not in seen:
                        seen.add(entries)
                        yield _Change(tensor.size, entries, again)

    def _each(self, node: fx.Node, plan: Plan, one: bool) -> frozenset[Entry]:
        """What to re-gather per use, where a re-gathered value is held until its next use."""
        moved = [e for e in self._entries(node, plan, one) if e[0].startswith("consumer ") and self._is_again(e, plan)]
        each = ((PER_USE + name, member) for name, member in moved)
        return frozenset(e for e in each if not self._is_again(e, plan))

    def _kept(self, node: fx.Node, plan: Plan, one: bool) -> frozenset[Entry]:
        """What is no longer recomputed where a value is saved."""
        return frozenset(e for e in self._entries(node, plan, one) if self._is_again(e, plan))

    def _again(self, node: fx.Node, plan: Plan, held: Collection[fx.Node], one: bool) -> frozenset[Entry]:
        """What else to recompute or re-gather with a value: its inputs, unless they are live or recomputed already."""
        found: set[fx.Node] = set()
        entries = set(self._entries(node, plan, one))  # all that there is of an input
        waiting = [node]
        while waiting:
            last = waiting.pop()
            known = self._is_again((self.classes.key[last], self.number[last] if one else None), plan)
            if last in found or known or self.classes.key[last] not in self.free or (last is not node and last in held):
                continue
            found.add(last)
            entries.update(self._entries(last, plan, one))
            for source, _ in self.program.sources[last]:
                entries.update(e for e in self._entries(source, plan, one) if e[0].startswith("consumer "))
                waiting.append(source)
        return frozenset(e for e in entries if not self._is_again(e, plan))

    def _is_again(self, entry: Entry, plan: Plan) -> bool:
        name, member = entry
        return name in plan.recompute if member is None else member in _members(plan, name, self.classes.count)

    def _entries(self, node: fx.Node, plan: Plan, one: bool) -> Iterator[Entry]:
        """Those of what an operator makes, and of its moved forms."""
        key, member = self.classes.key[node], self.number[node] if one else None
        if key in self.free:
            yield key, member
        for out in self.outputs.get(key, ()) if key in self.moved else ():
            if f"{key} {out}" in plan.consumer_layouts:
                yield f"consumer {key} {out}", member
