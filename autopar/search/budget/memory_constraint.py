"""`MemoryConstraint`: the problem with memory counted in one way, and its frontier; both are built when first read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from autopar.search.budget.budget_problem import BudgetProblem
from autopar.search.budget.cutoff import NO_CUTOFF, Cutoff
from autopar.search.budget.pareto import Frontier
from autopar.search.formulation.build import Formulation
from autopar.search.formulation.memory_model import MemoryModel
from autopar.search.formulation.pins import Restrictions
from autopar.search.solver.minimize import Limits


@dataclass(frozen=True)
class MemoryConstraint:
    """A way to count memory.

    Attributes:
        searched: what is searched.
        restrictions: what is decided already.
        memory: what counts.
        limits: relative gap and deadline.
        budget: bytes.
        relaxed: whether every plan that fits satisfies this constraint, so that its bound holds for all plans.
        cutoff: where the constraint proves that no plan is faster, the search ends.
        like: a constraint of the same problem under another memory model, whose labelings are good ones here.
    """

    searched: BudgetProblem
    restrictions: Restrictions
    memory: MemoryModel
    limits: Limits
    budget: float
    relaxed: bool
    cutoff: Cutoff
    like: MemoryConstraint | None = None

    @cached_property
    def built(self) -> Formulation:
        """The problem."""
        return self.searched.formulation(self.restrictions, self.memory)

    @cached_property
    def frontier(self) -> Frontier:
        """Its frontier, which starts with the labelings of ``like``."""
        # Only a relaxed constraint has a cutoff: the bound of another one says nothing about all plans.
        found = Frontier(self.built.problem, self.limits, useless=(self.budget, self.cutoff))
        if self.like is not None:
            # The same layouts and states: only the bytes of the labels differ.
            found.take_over(self.like.frontier)
        return found

    def narrowed(self, memory: MemoryModel) -> MemoryConstraint:
        """The constraint under another memory model, which is no relaxation: its bound holds for no other plans."""
        return replace(self, memory=memory, relaxed=False, cutoff=NO_CUTOFF, like=None)
